"""A pod under load: the same app with and without Seawall, served by uvicorn in a process.

Two questions. How much of the processor does the edge take of a request that does nothing? And what
becomes of a pod whose handler computes for 10 ms, when it is asked for 1, 2, 5 and 10 times what it
can do, by clients that ask whatever happens?
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BURN = 0.010
"""Seconds of processor time that the handler takes."""

PATIENCE = 1.0
"""Seconds after which a client does not want the answer any more: it is no good one."""

TIMES = (1, 2, 5, 10)

# The app


def burn(seconds: float = BURN) -> None:
    """Compute for that long, by this thread's own clock."""
    over = time.thread_time() + seconds
    while time.thread_time() < over:
        sum(range(500))


def make_app(edge: str) -> Any:
    """Return a FastAPI app; `edge` is "bare" or "seawall"."""
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/hello")
    async def hello() -> dict[str, str]:
        return {"hello": "world"}

    @app.get("/async")
    async def in_loop() -> dict[str, str]:
        burn()
        return {"burnt": "in the loop"}

    @app.get("/def")
    def in_thread() -> dict[str, str]:
        burn()
        return {"burnt": "in a thread"}

    @app.get("/cpu")
    async def cpu() -> float:
        return time.process_time()

    return app if edge == "bare" else protected(app)


def protected(app: Any) -> Any:
    """Return the app with the whole of the edge around it."""
    from seawall.web.admission import Turns, default_concurrency, default_shed
    from seawall.web.edge import Edge
    from seawall.web.inbound import Inbound

    return Edge(
        app,
        inbound=Inbound(),
        shed=default_shed(),
        turns=Turns(),
        concurrency=default_concurrency() if os.environ.get("W2_L") else None,
    )


def run_server(edge: str, loop: str, descriptor: int) -> None:
    """Serve until the process is ended."""
    import uvicorn

    listener = socket.socket(fileno=descriptor)
    config = uvicorn.Config(
        make_app(edge), loop=loop, http="httptools", access_log=False, log_level="warning"
    )
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def served(edge: str, loop: str = "asyncio") -> Iterator[int]:
    """Serve the app in a process of its own; gives the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    listener.set_inheritable(True)
    command = [sys.executable, "-m", "bench.web", "--serve", edge, loop, str(listener.fileno())]
    process = subprocess.Popen(command, pass_fds=[listener.fileno()])  # noqa: S603 - ourselves
    listener.close()
    try:
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# The clients


class Reply(NamedTuple):
    """One answer: its status, and the seconds since it was to be asked for."""

    status: int
    seconds: float


class Connection(asyncio.Protocol):
    """A connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self.buffer = b""
        self.waiter: asyncio.Future[int] | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str) -> asyncio.Future[int]:
        self.waiter = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.transport.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        return self.waiter

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or self.waiter is None or self.waiter.done():
            return
        _, _, rest = head.lower().partition(b"content-length: ")
        if len(body) >= int(rest.split(b"\r\n", 1)[0] or 0):
            self.waiter.set_result(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(0)
        self.transport = None

    @property
    def body(self) -> bytes:
        return self.buffer.partition(b"\r\n\r\n")[2]


class Clients:
    """As many connections as it takes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Connection] = []
        self.all: list[Connection] = []

    async def get(self, path: str, at: float | None = None, patience: float = 60.0) -> Reply:
        began = time.perf_counter() if at is None else at
        connection = await self._connection()
        try:
            async with asyncio.timeout(patience):
                status = await connection.ask(path)
        except TimeoutError:
            connection.transport.abort()
            return Reply(0, time.perf_counter() - began)
        if connection.transport is not None:
            self.idle.append(connection)
        return Reply(status, time.perf_counter() - began)

    async def _connection(self) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None:
                return connection
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                self.all.append(connection)
                return connection

    async def cpu(self) -> float:
        """Return the processor time that the server has used."""
        connection = await self._connection()
        await connection.ask("/cpu")
        self.idle.append(connection)
        return float(connection.body)

    def close(self) -> None:
        for connection in self.all:
            if connection.transport is not None:
                connection.transport.abort()


async def open_loop(
    clients: Clients, path: str, rate: float, seconds: float, rng: Callable[[], float] | None
) -> list[Reply]:
    """Ask at that rate whatever happens: at even distances, or by chance (`rng`, exponential)."""
    began = time.perf_counter()
    at = began
    tasks = []
    while at < began + seconds:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.ensure_future(clients.get(path, at, 3 * PATIENCE)))
        at += (rng() if rng else 1.0) / rate
    return list(await asyncio.gather(*tasks))


async def closed_loop(clients: Clients, path: str, width: int, seconds: float) -> list[Reply]:
    """Have `width` clients ask again as soon as they are answered."""
    over = time.perf_counter() + seconds

    async def client() -> list[Reply]:
        replies = []
        while time.perf_counter() < over:
            replies.append(await clients.get(path))
        return replies

    return [
        reply for own in await asyncio.gather(*(client() for _ in range(width))) for reply in own
    ]


def quantile(values: list[float], share: float) -> float:
    """Return the value that this share of all stays at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


# What is measured


class Load(NamedTuple):
    """How a pod did under one load."""

    times: float
    goodput: float
    p50: float
    p99: float
    refused: float
    late: float
    refusal_p99: float


async def overload(
    port: int, path: str, seconds: float, seed: int
) -> tuple[float, float, list[Load]]:
    """Return capacity, the p99 of an idle pod, and how it did at each multiple of capacity."""
    clients = Clients(port)
    rng = random.Random(seed)
    await closed_loop(clients, path, 1, 0.5)
    alone = await open_loop(clients, path, 0.2 / BURN, 3 * seconds, None)
    unloaded = quantile([reply.seconds for reply in alone if reply.status == 200], 0.99)
    busy = await closed_loop(clients, path, 2, seconds)
    capacity = len([1 for reply in busy if reply.status == 200]) / seconds
    loads = []
    for times in TIMES:
        replies = await open_loop(
            clients, path, times * capacity, seconds, lambda: rng.expovariate(1.0)
        )
        good = [r.seconds for r in replies if r.status == 200 and r.seconds <= PATIENCE]
        refused = [r.seconds for r in replies if r.status == 503]
        loads.append(
            Load(
                times,
                len(good) / seconds,
                quantile(good, 0.5),
                quantile(good, 0.99),
                len(refused) / seconds,
                (len(replies) - len(good) - len(refused)) / seconds,
                quantile(refused, 0.99),
            )
        )
        await asyncio.sleep(0.5)
    clients.close()
    return capacity, unloaded, loads


async def hello_cost(
    ports: dict[str, int], rounds: int, requests: int, width: int
) -> dict[str, list[float]]:
    """Return the processor seconds of a request, by server and round; one turn each in a round."""
    cost: dict[str, list[float]] = {name: [] for name in ports}
    clients = {name: Clients(port) for name, port in ports.items()}
    for number in range(rounds + 1):
        names = list(ports)
        random.Random(number).shuffle(names)
        for name in names:
            own = clients[name]
            before = await own.cpu()

            async def client(own: Clients = own) -> int:
                refused = 0
                for _ in range(requests // width):
                    refused += (await own.get("/hello")).status != 200
                return refused

            refused = sum(await asyncio.gather(*(client() for _ in range(width))))
            spent = await own.cpu() - before
            if refused:
                print(f"{name}: {refused} refused", file=sys.stderr)
            if number:
                cost[name].append(spent / (requests // width * width))
    for own in clients.values():
        own.close()
    return cost


def main() -> None:
    """Serve, or measure."""
    parser = argparse.ArgumentParser(prog="bench.web")
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--overload", nargs="*")
    parser.add_argument("--hello", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--loop", default="asyncio")
    arguments = parser.parse_args()
    if arguments.serve:
        edge, loop, descriptor = arguments.serve
        run_server(edge, loop, int(descriptor))
        return
    if arguments.overload is not None:
        for edge in arguments.overload or ["seawall", "bare"]:
            for path in ("/async", "/def"):
                with served(edge, arguments.loop) as port:
                    capacity, unloaded, loads = asyncio.run(
                        overload(port, path, arguments.seconds, 1)
                    )
                peak = max(load.goodput for load in loads)
                print(
                    f"{edge} {path}: capacity {capacity:.1f}/s, unloaded p99 {unloaded * 1e3:.1f}"
                )
                for load in loads:
                    print(
                        f"  {load.times:4}x good {load.goodput:6.1f} ({load.goodput / peak:4.0%})"
                        f" p50 {load.p50 * 1e3:6.1f} p99 {load.p99 * 1e3:6.1f}"
                        f" ({load.p99 / unloaded:.1f}x) refused {load.refused:6.1f}"
                        f" p99 {load.refusal_p99 * 1e3:6.1f} late {load.late:6.1f}",
                        flush=True,
                    )
    if arguments.hello:
        with served("bare", arguments.loop) as bare, served("seawall", arguments.loop) as ours:
            cost = asyncio.run(
                hello_cost({"bare": bare, "seawall": ours}, 12, 2000, arguments.width)
            )
        ratios = [b / a for a, b in zip(cost["bare"], cost["seawall"], strict=True)]
        print({name: f"{quantile(own, 0.5) * 1e6:.1f} us" for name, own in cost.items()})
        print(f"ratio {quantile(ratios, 0.5):.3f}", [f"{ratio:.2f}" for ratio in sorted(ratios)])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", "src")
    main()
