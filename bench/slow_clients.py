"""Clients that send or read slowly, 500 of them from one address, and what others notice.

    python -m bench.slow_clients

serves an app with uvicorn, bare and with `protect(app)`, lets one address attack it, and measures
the answers that a client at another address gets meanwhile. The attacks:

- slow senders: each sends a byte of its body every second;
- unread streams: each asks for a long stream, and reads nothing of it;
- pipelined: each asks for 1 MB and for a second answer behind it, and reads nothing.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from fastapi import Body, FastAPI
from fastapi.responses import Response, StreamingResponse

from bench.web import BARE, SEAWALL, quantile

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTACKERS = 500
ATTACKS = ("slow senders", "unread streams", "pipelined")
ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
"""Two clients, by their addresses on the loopback."""

PART = bytes(64 * 1024)
BIG = bytes(1024 * 1024)
BUFFER = 64 * 1024
"""What the kernel holds for a client that does not read: little, for 500 of them to fit."""

HEAD = b"%s HTTP/1.1\r\nhost: localhost\r\n"
SLOW_POST = HEAD % b"POST /body" + b"content-length: 1000\r\ncontent-type: application/json\r\n\r\n"
GET_STREAM = HEAD % b"GET /stream" + b"\r\n"
GET_BIG = HEAD % b"GET /big" + b"\r\n"
GET_HELLO = HEAD % b"GET /hello" + b"\r\n"
GET_BEGUN = HEAD % b"GET /begun" + b"\r\n"


# The server


def make_app(edge: str) -> Any:
    """Return the app; `edge` is BARE or SEAWALL. `/begun` tells how many requests have begun."""
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> dict[str, str]:
        return {"hello": "world"}

    @app.post("/body")
    async def body(said: Annotated[Any, Body()]) -> Any:
        return said

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> Any:
            for _ in range(1000):
                yield PART

        return StreamingResponse(parts())

    @app.get("/big")
    async def big() -> Response:
        return Response(BIG)

    if edge == SEAWALL:
        from seawall.web.fastapi import protect

        protect(app)
    begun = 0

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        if scope.get("path") == "/begun":
            told = str(begun).encode()
            headers = [(b"content-length", str(len(told)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": told})
            return
        begun += scope["type"] == "http"
        await app(scope, receive, send)

    return counting


def run_server(edge: str, http: str, descriptor: str) -> None:
    """Serve until the process is ended."""
    import uvicorn

    listener = socket.socket(fileno=int(descriptor))
    config = uvicorn.Config(make_app(edge), http=http, access_log=False, log_level="critical")
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def served(edge: str, http: str = "httptools") -> Iterator[int]:
    """Serve the app in a process of its own; gives the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        port = listener.getsockname()[1]
        listener.set_inheritable(True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        with _process("serve", edge, http, listener.fileno(), pass_fds=[listener.fileno()]):
            yield port


@contextmanager
def attacked(kind: str, port: int, count: int = ATTACKERS) -> Iterator[None]:
    """Attack from another process, once all connections are open."""
    with _process("attack", kind, port, count, stdout=subprocess.PIPE) as process:
        if process.stdout.readline() != b"open\n":
            raise RuntimeError("the attack did not begin")
        yield


@contextmanager
def _process(*arguments: Any, **options: Any) -> Iterator[Any]:
    command = [sys.executable, "-m", "bench.slow_clients", *map(str, arguments)]
    process = subprocess.Popen(command, **options)  # noqa: S603 - ourselves
    try:
        yield process
    finally:
        process.kill()  # nobody is served by a process that ends in peace
        process.communicate()


# The attackers


def attack(kind: str, port: str, count: str) -> None:
    """Attack until the process is ended; a connection that was closed is opened again."""
    need_descriptors(int(count) + 100)
    greeting = {
        "slow senders": SLOW_POST,
        "unread streams": GET_STREAM,
        "pipelined": GET_BIG + GET_HELLO,
    }[kind]
    sockets = [_open(int(port), greeting) for _ in range(int(count))]
    print("open", flush=True)
    while True:
        for number, one in enumerate(sockets):
            time.sleep(1.0 / len(sockets))
            if kind == "slow senders" and not _sent(one, b" "):
                one.close()
                sockets[number] = _open(int(port), greeting)


def _open(port: int, greeting: bytes) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.bind((ATTACKER, 0))
    opened.connect(("127.0.0.1", port))
    opened.sendall(greeting)
    return opened


def _sent(one: socket.socket, data: bytes) -> bool:
    try:
        one.sendall(data)
    except OSError:
        return False
    return True


def need_descriptors(count: int) -> bool:
    """Allow so many files to be open, if the system does; tell whether it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return count <= hard


# The other client


class Answers(NamedTuple):
    """What the other client got: how many answers of each status, and the times of the good."""

    statuses: dict[int, int]
    seconds: list[float]


async def ask(port: int, count: int) -> Answers:
    """Ask for `/hello`, one after the other, on connections that are kept while they are."""
    statuses: dict[int, int] = {}
    seconds = []
    pair = None
    for _ in range(count):
        began = time.perf_counter()
        status = 0
        try:
            async with asyncio.timeout(10.0):
                pair = pair or await _connect(port)
                status, _ = await _exchange(*pair, GET_HELLO)
        except (OSError, TimeoutError, EOFError):
            pair = None
        statuses[status] = statuses.get(status, 0) + 1
        if status == 200:
            seconds.append(time.perf_counter() - began)
    if pair is not None:
        pair[1].close()
    return Answers(statuses, seconds)


async def begun(port: int) -> int:
    """Return how many requests the server has begun to serve."""
    reader, writer = await _connect(port)
    _, body = await _exchange(reader, writer, GET_BEGUN)
    writer.close()
    return int(body)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(OTHER, 0))


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
    return int(head[9:12]), await reader.readexactly(length)


def main() -> None:
    """Print a table: each attack on each app, and both unattacked just before."""
    print("| app | attack | answered 200 | p50 | p99 | p99 before |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for edge in (BARE, SEAWALL):
        for kind in ATTACKS:
            with served(edge) as port:
                asyncio.run(ask(port, 500))
                _, _, before = asyncio.run(rounds(port))
                with attacked(kind, port):
                    time.sleep(2.0)  # all of them have begun to wait
                    good, p50, p99 = asyncio.run(rounds(port))
            times = " | ".join(f"{seconds * 1000:.2f} ms" for seconds in (p50, p99, before))
            print(f"| {edge} | {kind} | {good:.1%} | {times} |")


async def rounds(port: int) -> tuple[float, float, float]:
    """Return the share of good answers, and the medians over rounds of their p50 and p99."""
    every = [await ask(port, 300) for _ in range(15)]
    good = sum(answers.statuses.get(200, 0) for answers in every) / (15 * 300)
    return good, *(
        quantile([quantile(answers.seconds, share) for answers in every], 0.5)
        for share in (0.5, 0.99)
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        {"serve": run_server, "attack": attack}[sys.argv[1]](*sys.argv[2:])
