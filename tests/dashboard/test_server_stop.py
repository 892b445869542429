"""A real server stops while a client watches its dashboard."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clock import SYSTEM
from seawall.dashboard import Dashboard
from seawall.runtime.driver import sleep_async
from seawall.runtime.stop_signals import STOP_SIGNALS, SignalTap
from seawall.testing import run_virtual
from seawall.web.lifecycle.server_stop import STOP_MEMORY, ServerStop
from tests.redis.support import eventually, free_port
from tests.support import let_pass

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.dashboard.watched_service"
STOPPED_WITHIN = 20.0
"""Seconds, on a busy machine. A server that waits for the stream waits for minutes."""

ON_PORT = ["--interface", "asgi", "--port", "{port}"]
SERVERS = {
    "uvicorn": ["uvicorn", "--port", "{port}"],
    "uvicorn-asyncio": ["uvicorn", "--port", "{port}", "--loop", "asyncio", "--http", "h11"],
    "hypercorn": ["hypercorn", "--bind", "127.0.0.1:{port}"],
    "hypercorn-one-process": ["hypercorn", "--workers", "0", "--bind", "127.0.0.1:{port}"],
    "granian": ["granian", *ON_PORT],
    "granian-asyncio": ["granian", *ON_PORT, "--loop", "asyncio"],
}


class ViewSource:
    """A server in a process of its own, and one who watches its dashboard."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self._stream: HTTPResponse | None = None

    def record_viewer(self) -> None:
        """Open the stream, when the server is up, and read its first message."""
        eventually(self._readings, 60.0)

    def _readings(self) -> bool:
        try:
            self._connection.request("GET", "/seawall/events")
            self._stream = self._connection.getresponse()
        except OSError:
            self._connection.close()
            assert self.process.poll() is None, self.process.communicate()
            return False
        assert self._stream.status == 200
        while not self._stream.readline().startswith(b"data: "):
            pass
        return True

    def stop(self, number: signal.Signals) -> tuple[int, str, float]:
        """Send it a signal; return its exit status, what it wrote, and the seconds it took.

        The stream has to end as a response ends, and the client keeps its connection. Ctrl-C in a
        terminal reaches all processes of a server, a supervisor's SIGTERM the first of them.
        """
        assert self._stream is not None
        sent = SYSTEM.now()
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        while self._stream.readline():
            pass
        out, err = self.process.communicate(timeout=STOPPED_WITHIN)
        return self.process.returncode, out + err, SYSTEM.now() - sent

    def close(self) -> None:
        """End whatever goes on."""
        self._connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextmanager
def watched(server: str, app: str = "app") -> Iterator[ViewSource]:
    port = free_port()
    command = [part.format(port=port) for part in SERVERS[server]]
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", *command, f"{MODULE}:{app}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    made = ViewSource(process, port)
    try:
        made.record_viewer()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_stops_while_somebody_watches(server: str, number: signal.Signals):
    """One signal ends the stream and the process, with status 0 and without a traceback."""
    with watched(server) as service:
        status, wrote, seconds = service.stop(number)
    assert "Traceback" not in wrote, wrote
    assert status == 0, wrote
    assert seconds < STOPPED_WITHIN


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian"])
def test_an_app_without_an_edge_stops_while_somebody_watches(server: str):
    """The dashboard alone is enough: no lifecycle has to tell it."""
    with watched(server, "bare") as service:
        status, wrote, _seconds = service.stop(signal.SIGINT)
    assert "Traceback" not in wrote, wrote
    assert status == 0, wrote


# --- What the dashboard listens to, in this process ---


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Handle both signals as a server does; return those that it got."""
    numbers: list[int] = []
    before = [signal.signal(number, lambda got, _: numbers.append(got)) for number in STOP_SIGNALS]
    yield numbers
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda s: s.name)
def test_a_signal_reaches_the_listener_and_the_server(handled: list[int], number: signal.Signals):
    """The listener is called in its loop, and the handler of the server gets its signal."""

    async def main() -> bool:
        told = asyncio.Event()
        stop = ServerStop.of_this_loop()
        stop.listen(told.set)
        signal.raise_signal(number)
        await told.wait()
        stop.ignore(told.set)
        return stop.is_stopping()

    assert asyncio.run(main())
    assert handled == [number]


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda s: s.name)
def test_a_handler_of_the_event_loop_still_gets_its_signal(number: signal.Signals):
    """Hypercorn and granian handle signals by `loop.add_signal_handler`."""

    async def main() -> None:
        told, served = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, served.set)
        try:
            ServerStop.of_this_loop().listen(told.set)
            signal.raise_signal(number)
            await told.wait()
            await served.wait()
        finally:
            ServerStop.of_this_loop().ignore(told.set)
            loop.remove_signal_handler(number)

    asyncio.run(main())


def test_handlers_are_put_back_when_nobody_listens(handled: list[int]):
    """Whatever came in front stays in front, and what is gone hears nothing."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    calls: list[str] = []

    async def main() -> None:
        stop = ServerStop.of_this_loop()
        first, second = partial(calls.append, "first"), partial(calls.append, "second")
        stop.listen(first)
        stop.listen(second)
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
        stop.ignore(first)
        signal.raise_signal(signal.SIGTERM)
        await let_pass(1)
        stop.ignore(second)
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == before

    asyncio.run(main())
    assert calls == ["second"]
    assert handled == [signal.SIGTERM]


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), unique=True))
def test_taps_can_be_removed_in_any_order(order: list[int], removed: list[int]):
    """A signal reaches the taps that are left, the last one first, and the handler behind them."""
    got: list[object] = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("server"))
    try:
        taps = [SignalTap(lambda *_, name=name: got.append(name)) for name in range(4)]
        for name in order:
            taps[name].install()
        for name in removed:
            taps[name].remove()
        signal.raise_signal(signal.SIGTERM)
        assert got == [name for name in reversed(order) if name not in removed] + ["server"]
        for tap in taps:
            tap.remove()
        got.clear()
        signal.raise_signal(signal.SIGTERM)
        assert got == ["server"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_ends_the_process_or_is_ignored_is_left_alone():
    """A process without a handler of SIGTERM still dies of it, and Ctrl-C stays ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    tap = SignalTap(lambda *_: None)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tap.install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        tap.remove()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_of_the_main_thread_no_handler_is_installed(handled: list[int]):
    """Python would refuse it there."""
    before = signal.getsignal(signal.SIGTERM)
    thread = Thread(target=SignalTap(lambda *_: None).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert handled == []


def test_a_stream_that_is_opened_after_the_signal_ends_at_once(handled: list[int]):
    """A request that was on its way must not keep the server; if that goes on, streams are back."""

    async def main() -> None:
        stop = ServerStop.of_this_loop()
        told = asyncio.Event()
        stop.listen(told.set)
        signal.raise_signal(signal.SIGINT)
        await told.wait()
        stop.ignore(told.set)
        dashboard = Dashboard(local=True)
        try:
            assert await live_message(dashboard) is None
            await sleep_async(STOP_MEMORY)
            assert await live_message(dashboard) is not None
        finally:
            await dashboard.aclose()

    run_virtual(main())
    assert handled == [signal.SIGINT]


async def live_message(dashboard: Dashboard) -> object:
    """Return the first frame for a viewer that connects now; None without one."""
    live = dashboard._sampler()
    frame = await live.first(live.record_viewer())
    return None if live.broadcast.over else frame
