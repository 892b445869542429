from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seawall.dashboard import Dashboard, authorization
from seawall.testing import run_virtual
from tests.dashboard.app_support import HOME, Shown, asked_of, get
from tests.support import let_pass

pytestmark = pytest.mark.alone  # some start real servers


# --- A service that others reach does not start ---


@pytest.fixture
def listener() -> Any:
    """Return a socket that all machines could reach, if it listened."""
    with socket.socket() as bound:
        bound.bind(("0.0.0.0", 0))  # noqa: S104 - that is what is refused
        yield bound


@pytest.mark.parametrize("listening", [True, False])
def test_local_is_not_made_where_others_reach(listener: socket.socket, listening: bool):  # noqa: FBT001
    """A process that listens beyond loopback, or is about to, has no dashboard without `allow`."""
    if listening:
        listener.listen()
    place = f"0.0.0.0:{listener.getsockname()[1]}"
    with pytest.raises(RuntimeError, match=rf"listens on {place}.*127\.0\.0\.1.*allow=function"):
        Dashboard(local=True)
    Dashboard(allow=lambda _: False)
    listener.close()
    Dashboard(local=True)


def test_what_does_not_listen_for_others_is_no_matter():
    """Loopback, unix sockets, connections and UDP are not what others reach."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket() as fresh,
    ):
        datagrams.bind(("0.0.0.0", 0))  # noqa: S104
        assert fresh.fileno() >= 0
        assert authorization.listens_beyond_loopback() is None


def test_where_nobody_tells_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
):
    """On a system that does not list open files, each request is still checked."""
    listener.listen()
    monkeypatch.setattr(authorization, "FOLDERS", ("/nowhere",))
    assert authorization.listens_beyond_loopback() is None
    assert asked_of(HOME, client=("10.0.0.7", 5)) == 403


def exposed() -> socket.socket:
    """Return a socket that other machines reach."""
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104 - that is what is refused


def test_a_lifespan_that_others_reach_fails():
    """A dashboard made before the port was bound checks it at start-up and fails then."""

    async def main() -> None:
        sent: list[Any] = []
        app, mounted = Shown(), Shown()

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message)

        with exposed():
            await app({"type": "lifespan"}, receive, send)
            with pytest.raises(RuntimeError, match="other machines reach"):
                async with mounted:
                    pass
        assert [one["type"] for one in sent] == ["lifespan.startup.failed"]
        assert "allow=function" in sent[0]["message"]
        assert app.watchers == mounted.watchers == []

    run_virtual(main())


@pytest.mark.parametrize("later", [0.0, 11.0])
def test_a_port_that_is_opened_later_closes_the_page(
    later: float, caplog: pytest.LogCaptureFixture
):
    """It is looked for at the first request and now and then; found, everybody is refused."""

    async def main() -> None:
        app = Shown()
        if later:
            assert (await get(app, "/session")).status == 200
        with exposed():
            await let_pass(later)
            for _ in range(5):
                answer = await get(app, "/session")
                assert answer.status == 403
                assert "Other machines reach" in answer.json()["detail"]
        await let_pass(11.0)
        assert (await get(app, "/session")).status == 403

    run_virtual(main())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Bind the server to 127.0.0.1, or write allow=function" in record.getMessage()


# --- Real servers ---

OPEN_TO_ALL = """
import logging, threading, time, urllib.error, urllib.request
import uvicorn
from seawall.dashboard import Dashboard

logging.basicConfig(level=logging.ERROR)
app = Dashboard(local=True)
config = uvicorn.Config(app, host="0.0.0.0", port=0, log_level="error")
server = uvicorn.Server(config)


def look():
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    for path in ("", "state", "events"):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5)
            print("let in")
        except urllib.error.HTTPError as error:
            print(error.code)
            error.close()
    server.should_exit = True


thread = threading.Thread(target=look)
thread.start()
server.run()
thread.join()
"""

BOUND_BEFORE = """
import uvicorn
from seawall.dashboard import Dashboard

app = Dashboard(local=True)
config = uvicorn.Config(app, host="0.0.0.0", port=0)
listener = config.bind_socket()  # as with several workers: bound before the app is started
uvicorn.Server(config).run(sockets=[listener])
print("served")
"""


def run_service(source: str) -> subprocess.CompletedProcess[str]:
    """Run a service as a program of its own."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(  # noqa: S603 - the programs above
        [sys.executable, "-c", source],
        env={"PYTHONPATH": str(root / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_real_server_on_all_addresses_shows_nothing():
    """Uvicorn binds after the start: each request is refused, and one record says what to do."""
    ran = run_service(OPEN_TO_ALL)
    assert ran.stdout.split() == ["403", "403", "403"], ran.stderr
    assert ran.stderr.count("Bind the server to 127.0.0.1, or write allow=function") == 1


def test_a_real_server_that_was_bound_before_does_not_start():
    """With its port bound already, the service ends at start-up, with an error that says why."""
    ran = run_service(BOUND_BEFORE)
    assert ran.returncode != 0 or "served" not in ran.stdout
    assert "other machines reach" in ran.stderr
    assert ran.returncode == 3


STOPPED = """
import os, signal, threading, time, urllib.request
import uvicorn
from seawall.dashboard import Dashboard

server = uvicorn.Server(uvicorn.Config(Dashboard(local=True, every=0.1), port=0, log_level="error"))


def look():
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=5) as stream:
        while not stream.readline().startswith(b"data: "):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        while stream.readline():
            pass
    print("ended")


thread = threading.Thread(target=look)
thread.start()
signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
server.run()
thread.join()
print("stopped")
"""


def test_who_looks_does_not_keep_a_service_from_stopping():
    """On shutdown a real server ends the open streams, and stops without a time limit."""
    ran = run_service(STOPPED)
    assert ran.stdout.split() == ["ended", "stopped"], ran.stderr
