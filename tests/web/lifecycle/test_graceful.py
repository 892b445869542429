"""Real processes under uvicorn, told to stop while they serve."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from seawall.clock import SYSTEM
from seawall.testing import run_virtual
from seawall.web.lifecycle import Lifecycle
from seawall.web.lifecycle.server_stop import Signals
from tests.redis.support import eventually
from tests.support import let_pass
from tests.web.health.support import Server, plain_app

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[3]


class Service:
    """A running process of tests/web/lifecycle/graceful_service.py."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def get(self, path: str) -> tuple[int, bytes]:
        """Ask on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ready(self) -> bool:
        """Probe it, as a load balancer does."""
        try:
            return self.get("/health/ready")[0] == 200
        except OSError:
            return False

    def end(self) -> tuple[int, list[str], str]:
        """Wait for its end; return its exit code, what it printed, and its errors."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out.splitlines(), err


@contextmanager
def service(**settings: Any) -> Iterator[Service]:
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "tests.web.lifecycle.graceful_service", json.dumps(settings)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        made = Service(process, int(process.stdout.readline()))
        assert made.get("/0")[0] == 200  # waits in the listening socket until it serves
        yield made
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Balancer:
    """Sends requests from several threads, until its probes failed three times in a row."""

    def __init__(self, target: Service) -> None:
        self._target = target
        self._stop = Event()
        self.answers: list[int] = []
        self.errors: list[Exception] = []
        self._threads = [Thread(target=self._probe), *(Thread(target=self._send) for _ in range(4))]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(15)
            assert not thread.is_alive()

    def _probe(self) -> None:
        failures = 0
        while failures < 3:
            self._stop.wait(0.05)
            failures = 0 if self._target.ready() else failures + 1
        self._stop.set()

    def _send(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._target.port, timeout=10)  # kept alive
        while not self._stop.is_set():
            try:
                connection.request("GET", "/0.02")
                response = connection.getresponse()
                response.read()
                self.answers.append(response.status)
            except (OSError, HTTPException) as error:
                self.errors.append(error)
                connection.close()
        connection.close()


def drained_under_load(**settings: Any) -> tuple[Balancer, int, list[str], float]:
    """Send SIGTERM to a service under load; return what its clients and the process said."""
    with service(drain_timeout=10.0, **settings) as target:
        balancer = Balancer(target)
        balancer.run()
        eventually(lambda: len(balancer.answers) > 20)
        sent = SYSTEM.now()
        target.process.send_signal(signal.SIGTERM)
        balancer.join()
        code, printed, _errors = target.end()
        return balancer, code, printed, SYSTEM.now() - sent


def test_no_request_is_lost_when_a_service_under_load_is_told_to_stop():
    """With a delay, a balancer that needs three probes to notice loses nothing; exit code 0."""
    balancer, code, printed, seconds = drained_under_load(delay=1.0)
    assert set(balancer.answers) == {200}
    assert balancer.errors == []
    assert code == 0
    assert printed[0] == "closed"
    assert json.loads(printed[1]) == {
        "name": "service", "state": "stopped", "in_flight": 0, "sockets": 0, "refused": 0,
        "warming_up": [], "cut": 0,
    }  # fmt: skip
    assert 1.0 <= seconds < 5.0


def test_without_the_signal_handler_requests_would_be_lost():
    """The same service, where the server hears the signal first, closes its port on callers."""
    balancer, _code, _printed, _seconds = drained_under_load(delay=1.0, signals=False)
    assert balancer.errors


def test_readiness_falls_at_once_and_what_was_accepted_is_served():
    """While draining it is alive, not ready, and serves; afterwards nobody is let in."""
    with service(delay=1.0, drain_timeout=10.0) as target:
        assert target.ready()
        answers: list[tuple[int, bytes]] = []
        long = Thread(target=lambda: answers.append(target.get("/3")))
        long.start()
        target.process.send_signal(signal.SIGTERM)
        eventually(lambda: not target.ready())
        assert target.get("/health/ready") == (503, b'{"status":"fail","output":"draining"}')
        assert target.get("/health/live") == (200, b'{"status":"pass"}')
        assert target.get("/0")[0] == 200
        eventually(lambda: refused(target))
        assert long.is_alive()
        long.join(10)
        assert answers == [(200, b"done")]
        assert target.end()[0] == 0


def refused(target: Service) -> bool:
    """Tell whether a new request is turned away."""
    try:
        return target.get("/0")[0] == 503
    except OSError:
        return True


def test_a_stream_without_end_is_cut_at_the_deadline():
    """The process is gone in time, tells what was cut, and still closes the app."""
    with service(drain_timeout=0.5) as target:
        connection = HTTPConnection("127.0.0.1", target.port, timeout=10)
        connection.request("GET", "/stream")
        response = connection.getresponse()
        assert response.read(5) == b"tick\n"
        sent = SYSTEM.now()
        target.process.send_signal(signal.SIGTERM)
        code, printed, errors = target.end()
        assert SYSTEM.now() - sent < 4.0
        response.close()
        connection.close()
    assert code == 0
    assert printed[0] == "closed"
    assert json.loads(printed[1])["cut"] == 1
    found = re.search(r"1 requests were still in flight after (\S+) s of draining", errors)
    assert found is not None
    assert float(found[1]) >= 0.5


def test_ctrl_c_ends_a_stream_that_waits_for_draining():
    """Uvicorn would wait for the stream, and the stream for the draining that comes after it."""
    with service(drain_timeout=60.0) as target:
        connection = HTTPConnection("127.0.0.1", target.port, timeout=60)
        connection.request("GET", "/until-draining")
        response = connection.getresponse()
        assert response.read(5) == b"tick\n"
        target.process.send_signal(signal.SIGINT)
        assert response.read() == b"goodbye"
        code, printed, errors = target.end()
        connection.close()
    assert code == 0
    assert printed[0] == "closed"
    assert json.loads(printed[1])["cut"] == 0
    assert errors == ""


# --- Between the system and the server's handler ---


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Handle SIGTERM as a server other than uvicorn does; return the signals it heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_another_servers_handler_is_called_after_the_delay(heard: list[int]):
    """Any handler that was there hears the signal when the delay is over, and has it back then."""
    server_s_own = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        lifecycle = Lifecycle(delay=0.1)
        server = Server(lifecycle, plain_app)
        await server.startup()
        os.kill(os.getpid(), signal.SIGTERM)
        await lifecycle.until_draining()
        assert heard == []
        await lifecycle.drain()
        assert heard == [signal.SIGTERM]
        await server.shutdown()

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is server_s_own


def test_a_second_signal_does_not_wait(heard: list[int]):
    """Whoever sends it twice reaches the server at once, and the draining goes on."""

    async def main() -> None:
        lifecycle = Lifecycle(delay=5.0)
        server = Server(lifecycle, plain_app)
        await server.startup()
        os.kill(os.getpid(), signal.SIGTERM)
        await lifecycle.until_draining()
        os.kill(os.getpid(), signal.SIGTERM)
        await let_pass(0)
        assert heard == [signal.SIGTERM]
        await server.shutdown()

    asyncio.run(main())


def test_a_signal_while_it_drains_already_goes_to_the_server(heard: list[int]):
    """A service that was drained by hand has nothing left to delay for."""

    async def main() -> None:
        lifecycle = Lifecycle(delay=0.0)
        server = Server(lifecycle, plain_app)
        await server.startup()
        await lifecycle.drain()
        os.kill(os.getpid(), signal.SIGTERM)
        await let_pass(0.01)
        assert heard == [signal.SIGTERM]
        await server.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_signal_that_the_loop_handles_is_left_to_the_server(
    kind: str, caplog: pytest.LogCaptureFixture
):
    """Nobody can stand before `loop.add_signal_handler`: that `delay` cannot hold is told."""
    heard: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, heard.append, "server")
        server_s_own = signal.getsignal(signal.SIGTERM)
        lifecycle = Lifecycle(delay=5.0)
        server = Server(lifecycle, plain_app)
        await server.startup()
        assert signal.getsignal(signal.SIGTERM) is server_s_own
        os.kill(os.getpid(), signal.SIGTERM)
        while not heard:
            await let_pass(0.001)
        assert lifecycle.state == "ready"
        loop.remove_signal_handler(signal.SIGTERM)
        await server.shutdown()

    new_loop = None if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert "the delay of 5 s cannot hold" in caplog.text


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the log says of delays."""
    told = [record.getMessage() for record in caplog.records if record.name == "seawall"]
    return [line for line in told if "the delay of 5 s cannot hold" in line]


@pytest.mark.parametrize("threaded", [False, True], ids=["no handler", "no main thread"])
def test_a_delay_that_cannot_hold_is_told_at_the_start(
    threaded: bool,  # noqa: FBT001 - a parameter of pytest's
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where nobody handles the signal here: workers of some servers are told by their parent."""

    async def main() -> None:
        server = Server(Lifecycle(delay=5.0), plain_app)
        await server.startup()
        await server.shutdown()

    run = lambda: asyncio.run(main())  # noqa: E731
    if threaded:
        thread = Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    why = "main thread" if threaded else "no handler of SIGTERM"
    assert [why in line for line in warnings_of(caplog)] == [True]


def test_a_delay_under_a_server_without_lifespan_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody says when such a server starts or stops, as daphne's users know."""

    async def main() -> None:
        lifecycle = Lifecycle(delay=5.0)
        for _ in range(3):
            assert lifecycle.begin()
            lifecycle.end()

    asyncio.run(main())
    assert ["lifespan" in line for line in warnings_of(caplog)] == [True]


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "left"])
def test_a_signal_that_the_server_takes_after_the_start_is_told(
    taken: bool,  # noqa: FBT001 - a parameter of pytest's
    heard: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some install their handlers only when the app is up: then ours is not asked."""
    assert heard == []

    async def main() -> None:
        server = Server(Lifecycle(delay=5.0), plain_app)
        await server.startup()
        ours = signal.getsignal(signal.SIGTERM)
        if taken:
            signal.signal(signal.SIGTERM, lambda *_: None)
        await let_pass(1.1)
        assert ["since the start" in line for line in warnings_of(caplog)] == [True] * taken
        signal.signal(signal.SIGTERM, ours)
        await server.shutdown()

    run_virtual(main())


def test_a_server_that_stops_without_the_signal_is_told_of(
    heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A parent process may have heard it, and told its workers otherwise: too late for a delay."""
    assert heard == []

    async def main() -> None:
        server = Server(Lifecycle(delay=5.0), plain_app)
        await server.startup()
        await server.shutdown()

    run_virtual(main())
    assert ["without a SIGTERM" in line for line in warnings_of(caplog)] == [True]


def test_without_a_delay_nothing_is_told_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Nor by who looks after signals itself."""

    async def main() -> None:
        for settings in ({}, {"delay": 5.0, "signals": False}):
            lifecycle = Lifecycle(**settings)  # type: ignore[arg-type]
            server = Server(lifecycle, plain_app)
            await server.startup()
            await server.shutdown()
            assert Lifecycle(**settings).begin()  # type: ignore[arg-type]

    asyncio.run(main())
    assert "cannot hold" not in caplog.text


def test_the_signal_is_left_alone_where_nobody_handles_it():
    """Without a server's handler, or outside of the main thread, nothing is installed."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    installed: list[str | None] = []

    async def main() -> None:
        installed.append(Signals().install(lambda _stop: None))

    asyncio.run(main())
    thread = Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    assert ["no handler" in str(installed[0]), "main thread" in str(installed[1])] == [True, True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_somebody_else_installed_meanwhile_stays(heard: list[int]):
    """The handler is given back only if it is still ours to give."""
    assert heard == []

    async def main() -> None:
        signals = Signals()
        assert signals.install(lambda _stop: None) is None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    asyncio.run(main())
