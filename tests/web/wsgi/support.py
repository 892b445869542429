"""What tests of the WSGI edge need: a driver that behaves as a server does, and gunicorn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from tests.redis.support import eventually

ROOT = Path(__file__).resolve().parents[3]


class WsgiAnswer(NamedTuple):
    """What a WSGI app answered to one request."""

    status: int
    headers: dict[str, str]
    body: bytes
    starts: int
    """How often the response was started."""

    def json(self) -> Any:
        """Return the body as what its JSON says."""
        return json.loads(self.body)


def environ_of(
    path: str = "/",
    *,
    method: str = "GET",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
    client: str = "127.0.0.1",
    **more: Any,
) -> dict[str, Any]:
    """Return the environ of one request."""
    named = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers}
    return {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": client,
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        **named,
        **more,
    }


class WsgiServer:
    """The server's side of one request, as PEP 3333 has it."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, list[tuple[str, str]]]] = []
        self.sent: list[bytes] = []

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        """Take status and headers; a second time only with an exception, before any body."""
        if exc_info is not None and self.sent:
            raise exc_info[1]
        assert not self.starts or exc_info is not None, "started twice"
        assert all(type(text) is str for pair in headers for text in pair)
        self.starts.append((status, headers))
        return self.write

    def write(self, part: bytes) -> None:
        """Send a part: the response has begun."""
        assert self.starts, "a body without a start"
        if part:
            self.sent.append(part)

    @property
    def answer(self) -> WsgiAnswer:
        """What was answered so far."""
        status, headers = self.starts[-1]
        named = {name.lower(): value for name, value in headers}
        return WsgiAnswer(int(status[:3]), named, b"".join(self.sent), len(self.starts))


def ask(
    app: Callable[..., Iterable[bytes]], path: str = "/", *, read: int | None = None, **more: Any
) -> WsgiAnswer:
    """Make one request of `app`, as a server does; `read` parts at most, as if the client left."""
    server = WsgiServer()
    body = app(environ_of(path, **more), server.start_response)
    try:
        for number, part in enumerate(body):
            if number == read:
                break
            server.write(part)
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()
    return server.answer


class Gunicorn:
    """A running gunicorn."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    def get(
        self, path: str, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return response.status, named, response.read()
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """Return the status of an answer; 0 if nobody listens."""
        try:
            return self.get(path)[0]
        except OSError:
            return 0

    def terminate(self) -> None:
        """Tell the master to stop gracefully."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and its log."""
        self.process.wait(30)
        return self.process.returncode, self.log

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()


@contextmanager
def gunicorn(app: str, *options: str, **settings: Any) -> Iterator[Gunicorn]:
    """Serve `module:app` by gunicorn on a free port; `settings` are JSON for the module."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [
            sys.executable, "-m", "gunicorn", app, "--bind", "127.0.0.1:0",
            "--no-control-socket", "--worker-tmp-dir", folder, *options,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "SEAWALL_TEST_SETTINGS": json.dumps(settings),
        }
        with log.open("w") as out:
            process = subprocess.Popen(  # noqa: S603 - our own program
                command, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True
            )
        try:
            made = Gunicorn(process, 0, log)
            eventually(lambda: "Listening at" in made.log or process.poll() is not None, 20)
            assert process.poll() is None, made.log
            made.port = int(made.log.partition("Listening at: http://127.0.0.1:")[2].split()[0])
            yield made
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
