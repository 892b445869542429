"""A pod under load: the same app with and without Seawall, served by uvicorn in a process.

Three questions. How much of the processor does the edge take of a request that does nothing? What
becomes of a pod whose handler computes for 10 ms, when it is asked for 1, 2, 5 and 10 times what it
can do, by clients that ask whatever happens? And how much of its goodput is left if requests arrive
by chance (Poisson) at exactly the capacity of the bare pod?
"""

from __future__ import annotations

import asyncio
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

WARM_UP = 1.0
"""Seconds of each load before it is measured."""

TIMES = (1, 2, 5, 10)

WIDTH = 8
"""Connections by which a request that costs nothing is asked for."""

SERVERS = {
    "uvicorn": ("asyncio", "h11"),
    "with httptools": ("asyncio", "httptools"),
    "with httptools and uvloop": ("uvloop", "httptools"),
}
"""The server as it is installed, and as `uvicorn[standard]` makes it: the less the server takes,
the larger is the share of what is around the app."""

OK, REFUSED = 200, 503
BARE, SEAWALL = "bare", "seawall"
IN_LOOP, IN_THREAD = "computes in the loop", "computes in a thread"

# The app


def burn(seconds: float = BURN) -> None:
    """Compute for that long, by this thread's own clock."""
    over = time.thread_time() + seconds
    while time.thread_time() < over:
        sum(range(500))


def make_app(edge: str) -> Any:
    """Return a FastAPI app; `edge` is BARE or SEAWALL."""
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

    return app if edge == BARE else protected(app)


def protected(app: Any) -> Any:
    """Return the app with the whole of the edge around it, all limits local."""
    from seawall import Bulkhead, Shed
    from seawall.shedding import by_criticality
    from seawall.web import RequestLimit, RequestLimits
    from seawall.web.fastapi import protect

    protect(
        app,
        shed=Shed(by_criticality(), load=lambda: 0.0),
        limits=RequestLimits(
            RequestLimit("1000000/s", by="address"), RequestLimit("1000000/s", by=None, name="all")
        ),
        # What computes in threads is not the event loop's business: it has a limit of its own.
        routes={"/def": Bulkhead(1, max_wait=0.01, max_waiting=1)},
    )
    return app


def run_server(edge: str, loop: str, http: str, descriptor: str) -> None:
    """Serve until the process is ended."""
    import uvicorn

    listener = socket.socket(fileno=int(descriptor))
    config = uvicorn.Config(
        make_app(edge), loop=loop, http=http, access_log=False, log_level="warning"
    )
    uvicorn.Server(config).run(sockets=[listener])


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def served(edge: str, loop: str = "asyncio", http: str = "httptools") -> Iterator[int]:
    """Serve the app in a process of its own; gives the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    listener.set_inheritable(True)
    command = [sys.executable, "-m", "bench.web", edge, loop, http, str(listener.fileno())]
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


REQUEST = b"GET %s HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\nx-user: u7\r\n\r\n"


class Connection(asyncio.Protocol):
    """A connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self.buffer = b""
        self.waiter: asyncio.Future[int] | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Send at once what is written."""
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str) -> asyncio.Future[int]:
        """Ask; the status will be there."""
        self.waiter = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.transport.write(REQUEST % path.encode())
        return self.waiter

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or self.waiter is None or self.waiter.done():
            return
        _, _, rest = head.lower().partition(b"content-length: ")
        if len(body) >= int(rest.split(b"\r\n", 1)[0] or 0):
            self.waiter.set_result(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Be of no more use."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(0)
        self.transport = None

    @property
    def body(self) -> bytes:
        """The body of the last answer."""
        return self.buffer.partition(b"\r\n\r\n")[2]


class Clients:
    """As many connections as it takes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Connection] = []
        self.all: list[Connection] = []

    async def get(self, path: str, at: float | None = None, patience: float = 60.0) -> Reply:
        """Ask, as if that had been done at the instant `at`."""
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
        """Close all connections."""
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


async def several(clients: Clients, path: str, width: int, each: int) -> list[Reply]:
    """Have `width` clients ask `each` times, one after the other."""

    async def client() -> list[Reply]:
        return [await clients.get(path) for _ in range(each)]

    own = await asyncio.gather(*(client() for _ in range(width)))
    return [reply for replies in own for reply in replies]


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
    """How a pod did under one load, without its first second: it takes some time to be seen."""

    times: float
    goodput: float
    p50: float
    p99: float
    refused: float
    refusal_p99: float
    late: float
    """Answers a second that came when nobody waited for them any more, or never."""


class Pod(NamedTuple):
    """How a pod did: what it can do, what an answer takes without load, and under each load."""

    capacity: float
    unloaded: float
    loads: list[Load]
    refusal_cost: float
    """What a refusal costs, as a share of an answer: in the processor's time, at ten times."""


class Plan(NamedTuple):
    """How much is measured."""

    seed: int = 1
    seconds: float = 4.0
    rounds: int = 30
    requests: int = 600
    arrivals: int = 4
    """How often both pods get the same Poisson arrivals, one after the other."""


Cost = dict[str, list[float]]
"""Processor seconds of a request, by case and round."""


async def alone(port: int, path: str, plan: Plan) -> tuple[float, float]:
    """Return what a pod can do in a second, and the p99 of its answers while it idles."""
    clients = Clients(port)
    await closed_loop(clients, path, 1, 0.5)
    replies = await open_loop(clients, path, 0.2 / BURN, plan.seconds, None)
    unloaded = quantile([reply.seconds for reply in replies if reply.status == OK], 0.99)
    busy = await closed_loop(clients, path, 2, plan.seconds / 2)
    clients.close()
    return len([1 for reply in busy if reply.status == OK]) / (plan.seconds / 2), unloaded


async def under(
    port: int, path: str, rate: float, plan: Plan, *, evenly: bool
) -> tuple[list[Reply], list[Reply], float]:
    """Ask at `rate`; the first second opens the connections and lets the load be seen.

    Gives the replies, those of the first second, and the processor time of all.
    """
    clients = Clients(port)
    before = await clients.cpu()  # it has started
    warm = asyncio.ensure_future(open_loop(clients, path, rate, WARM_UP, None))
    await asyncio.sleep(WARM_UP)
    rng = random.Random(plan.seed)
    gaps = None if evenly else lambda: rng.expovariate(1.0)
    replies = await open_loop(clients, path, rate, plan.seconds, gaps)
    first = await warm
    spent = 0.0
    if any(reply.status == REFUSED for reply in replies):  # else it will be busy for a long time
        await asyncio.sleep(0.5)
        spent = await clients.cpu() - before
    clients.close()
    return replies, first, spent


def load_of(times: float, replies: list[Reply], seconds: float) -> Load:
    """Sum up the replies of so many seconds."""
    good = [r.seconds for r in replies if r.status == OK and r.seconds <= PATIENCE]
    refused = [r.seconds for r in replies if r.status == REFUSED]
    counts = len(good), len(refused), len(replies) - len(good) - len(refused)
    good_rate, refused_rate, late_rate = (number / seconds for number in counts)
    quantiles = quantile(good, 0.5), quantile(good, 0.99)
    return Load(times, good_rate, *quantiles, refused_rate, quantile(refused, 0.99), late_rate)


def at_capacity(path: str, plan: Plan) -> dict[str, Load]:
    """Return how both pods do with the same Poisson arrivals at the bare one's capacity."""
    replies: dict[str, list[Reply]] = {SEAWALL: [], BARE: []}
    for number in range(plan.arrivals):
        with served(BARE) as port:  # each time: machines get faster and slower
            capacity, _ = asyncio.run(alone(port, path, plan))
        arrivals = plan._replace(seed=plan.seed + number)
        for edge in (SEAWALL, BARE) if number % 2 else (BARE, SEAWALL):
            with served(edge) as port:
                own, _, _ = asyncio.run(under(port, path, capacity, arrivals, evenly=False))
            replies[edge] += own
    return {edge: load_of(1, own, plan.arrivals * plan.seconds) for edge, own in replies.items()}


def overload(edge: str, path: str, plan: Plan) -> Pod:
    """Return how a pod does at each multiple of what it can do; a fresh one for each load."""
    with served(edge) as port:
        capacity, unloaded = asyncio.run(alone(port, path, plan))
    loads = []
    cost = 0.0
    for times in TIMES:
        with served(edge) as port:
            replies, first, spent = asyncio.run(
                under(port, path, times * capacity, plan, evenly=True)
            )
        loads.append(load_of(times, replies, plan.seconds))
        every = [*first, *replies]
        noes = len([1 for reply in every if reply.status == REFUSED])
        if times == TIMES[-1] and noes:
            answers = len([1 for reply in every if reply.status == OK])
            cost = max(0.0, spent - answers * BURN) / noes / BURN
    return Pod(capacity, unloaded, loads, cost)


async def hello_cost(ports: dict[str, int], plan: Plan, width: int) -> Cost:
    """Return the processor seconds of a request; one turn for each server in a round."""
    cost: Cost = {name: [] for name in ports}
    clients = {name: Clients(port) for name, port in ports.items()}
    rng = random.Random(plan.seed)
    for number in range(plan.rounds + 1):
        for name in rng.sample(list(ports), len(ports)):
            own = clients[name]
            before = await own.cpu()
            replies = await several(own, "/hello", width, plan.requests // width)
            spent = await own.cpu() - before
            if any(reply.status != OK for reply in replies):
                raise RuntimeError(
                    f"{name} answered {sorted({reply.status for reply in replies})}, not 200 alone"
                )
            if number:
                cost[name].append(spent / len(replies))
    for own in clients.values():
        own.close()
    return cost


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all; return pods by name, those with Poisson arrivals, and costs by server."""
    pods = {}
    for path, handler in (("/async", IN_LOOP), ("/def", IN_THREAD)):
        for edge in (SEAWALL, BARE):
            progress(f"{handler}, {edge}")
            pods[f"{handler}, {edge}"] = overload(edge, path, plan)
    progress("Poisson arrivals")
    poisson = at_capacity("/async", plan)
    costs = {}
    for name, server in SERVERS.items():
        progress(f"hello, {name}")
        with served(BARE, *server) as bare, served(SEAWALL, *server) as ours:
            ports = {BARE: bare, SEAWALL: ours}
            costs[f"hello, {name}"] = asyncio.run(hello_cost(ports, plan, WIDTH))
    return {"pods": pods, "poisson": poisson, "costs": costs}


if __name__ == "__main__":
    run_server(*sys.argv[1:])
