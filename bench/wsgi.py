"""A pod of threads under load: the same Flask app with and without Seawall, served by gunicorn.

Two questions. How much of the processor does the edge take of a request that does nothing? And what
becomes of a pod with eight threads when it is asked for 1, 2, 5 and 10 times what it can do, by
clients that ask whatever happens, if its handler waits for 80 ms, as for a database?
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.web import (
    BARE,
    SEAWALL,
    TIMES,
    Clients,
    Plan,
    Pod,
    closed_loop,
    free_port,
    hello_cost,
    load_of,
    open_loop,
    quantile,
    under,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 8
WAIT = 0.08
"""Seconds for which the handler waits: eight threads do 100 a second, as the pod of `bench.web`."""

WAITS = "waits in a thread"
HELLO = "hello, gunicorn"
LIMITED = "with two limits and a shedder"
"""The case of an edge with more than what `protect(app)` has by itself."""


def make_app(edge: str) -> Any:
    """Return a Flask app; `edge` is BARE, SEAWALL or LIMITED."""
    from flask import Flask

    app = Flask("bench")

    @app.get("/hello")
    def hello() -> dict[str, str]:
        return {"hello": "world"}

    @app.get("/wait")
    def wait() -> dict[str, str]:
        time.sleep(WAIT)
        return {"waited": "in a thread"}

    @app.get("/cpu")
    def cpu() -> str:
        return str(time.process_time())

    if edge == SEAWALL:
        from seawall.web.flask import protect

        protect(app)
    elif edge == LIMITED:
        limit(app)
    return app


def limit(app: Any) -> None:
    """Put the edge around the app, with local limits and a shedder, as `bench.web` has them."""
    from seawall import Shed
    from seawall.shedding import by_criticality
    from seawall.web import RequestLimit, RequestLimits
    from seawall.web.flask import protect

    protect(
        app,
        shed=Shed(by_criticality(), load=lambda: 0.0),
        limits=RequestLimits(
            RequestLimit("1000000/s", by="address"), RequestLimit("1000000/s", by=None, name="all")
        ),
    )


@contextmanager
def served(edge: str) -> Iterator[int]:
    """Serve the app by gunicorn in a process of its own; gives the port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "gunicorn", f"bench.wsgi:make_app('{edge}')",
            "--bind", f"127.0.0.1:{port}", "--worker-class", "gthread", "--threads", str(THREADS),
            "--log-level", "error", "--no-control-socket", "--worker-tmp-dir", folder,
        ]  # fmt: skip
        root = Path(__file__).resolve().parent.parent
        process = subprocess.Popen(command, cwd=root, env=dict(os.environ))  # noqa: S603 - ours
        try:
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def alone(port: int, plan: Plan) -> tuple[float, float]:
    """Return what a pod can do in a second, and the p99 of its answers while it idles."""
    clients = Clients(port)
    await clients.cpu()  # it has started
    replies = await open_loop(clients, "/wait", 0.2 * THREADS / WAIT, plan.seconds / 2, None)
    unloaded = quantile([reply.seconds for reply in replies], 0.99)
    await closed_loop(clients, "/wait", THREADS, 0.5)
    busy = await closed_loop(clients, "/wait", THREADS, plan.seconds / 2)
    clients.close()
    return len(busy) / (plan.seconds / 2), unloaded


def overload(edge: str, plan: Plan) -> Pod:
    """Return how a pod does at each multiple of what it can do; a fresh one for each load."""
    with served(edge) as port:
        capacity, unloaded = asyncio.run(alone(port, plan))
    loads = []
    for times in TIMES:
        with served(edge) as port:
            replies, _, _ = asyncio.run(under(port, "/wait", times * capacity, plan, evenly=True))
        loads.append(load_of(times, replies, plan.seconds))
    return Pod(capacity, unloaded, loads, 0.0)


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all; return pods by name, and the costs of a request."""
    pods = {}
    for edge in (SEAWALL, BARE):
        progress(f"{WAITS}, {edge}")
        pods[edge] = overload(edge, plan)
    progress(HELLO)
    with served(BARE) as bare, served(SEAWALL) as ours, served(LIMITED) as limited:
        ports = {BARE: bare, SEAWALL: ours, LIMITED: limited}
        cost = asyncio.run(hello_cost(ports, plan, THREADS))
    return {"pods": pods, "cost": cost}
