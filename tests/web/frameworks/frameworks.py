"""The rows of the table in docs: each framework, how its service is started, and what is tested.

A row is a server process that gets a listening socket. `Framework.checks` names the columns for
which `test_frameworks.py` runs a test with this row; the table has a tick for each of these tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import httpx

ROOT: Final = Path(__file__).resolve().parents[3]

CHECKS: Final[Mapping[str, str]] = {
    "refusals": "errors of Seawall are 429, 502, 503, 504",
    "deadlines": "504 in time, and the handler keeps its place until it ends",
    "limits": "429 with the limit's headers",
    "health": "probes",
    "draining": "SIGTERM loses no request",
}
"""The columns of the table."""


TICK: Final = "✓"

IN_GUARDS: Final = "in guards"
"""A thread cannot be stopped: the handler of /slow looks at its deadline, as guards do."""


class Framework(NamedTuple):
    """One row: the service of one framework, and its server."""

    name: str
    server: str
    command: tuple[str, ...]
    """Arguments of Python; `{fd}` stands for the listening socket."""
    environment: Mapping[str, str]
    checks: tuple[str, ...] = tuple(CHECKS)
    deadlines: str = TICK
    """What the table says of deadlines: see `IN_GUARDS`."""


def _uvicorn(name: str, module: str, **environment: str) -> Framework:
    command = ("-m", "uvicorn", "--fd", "{fd}", "--log-level", "error", f"{_HERE}.{module}:app")
    return Framework(name, "uvicorn", command, environment)


def _gunicorn(name: str, module: str, **environment: str) -> Framework:
    command = (
        "-m", "gunicorn", "--bind", "fd://{fd}", "--log-level", "error",
        "--worker-class", "gthread", "--threads", "16", f"{_HERE}.{module}:app",
    )  # fmt: skip
    return Framework(name, "gunicorn", command, environment, deadlines=IN_GUARDS)


_HERE: Final = "tests.web.frameworks"

FRAMEWORKS: Final = (
    _uvicorn("FastAPI", "fastapi_service"),
    _uvicorn("Starlette", "starlette_service"),
    _uvicorn("Litestar", "litestar_service"),
    _uvicorn("Quart", "quart_service"),
    Framework("aiohttp", "its own", ("-m", f"{_HERE}.aiohttp_service", "{fd}"), {}),
    _uvicorn("Django ASGI, `async def`", "django_service", DJANGO_VIEWS="async"),
    _uvicorn("Django ASGI, `def`", "django_service", DJANGO_VIEWS="sync"),
    _gunicorn("Django WSGI", "django_service", DJANGO_VIEWS="wsgi"),
    _gunicorn("Flask", "flask_service"),
)


class Service:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=30.0,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask on a connection of its own."""
        return self.client.get(path, headers=headers)


@contextmanager
def running(framework: Framework) -> Iterator[Service]:
    """Start the service of `framework`, and stop it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fd = str(listening.fileno())
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, *(part.format(fd=fd) for part in framework.command)],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
            | dict(framework.environment),
            pass_fds=[listening.fileno()],
        )
        port = listening.getsockname()[1]
    service = Service(process, port)
    try:
        yield service
    finally:
        service.client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def table() -> str:
    """Return the table of the docs: a tick for each framework and check that is tested."""
    lines = [
        "| framework | server | " + " | ".join(CHECKS) + " |",
        "| --- | --- |" + " :-: |" * len(CHECKS),
    ]
    for framework in FRAMEWORKS:
        said = dict.fromkeys(framework.checks, TICK) | {"deadlines": framework.deadlines}
        ticks = (said[check] if check in framework.checks else "" for check in CHECKS)
        lines.append(f"| {framework.name} | {framework.server} | " + " | ".join(ticks) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
