"""Events that go to real receivers: a NATS server, and HTTP over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.js.api import StreamConfig

from seawall import Breaker, Timeout
from seawall.clock import VirtualClock
from seawall.durable import (
    Database,
    Dispatcher,
    Idempotency,
    IdempotentRequests,
    JetStream,
    Outbox,
    OutboxEvent,
    Sqlite,
    Webhook,
    amigrate,
    migrate,
    verify_webhook,
)
from tests.durable.outbox.support import Seen, committed, dispatcher, numbered
from tests.redis.support import free_port
from tests.support import new_guard
from tests.support_nats import NatsServer
from tests.web.support import serve

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests
OTHER_SECRET = "whsec_" + "b3RoZXIg" * 4


@asynccontextmanager
async def outbox_in(folder: Path) -> AsyncIterator[Outbox]:
    """Open an outbox of this test's own; its database is not what is looked at here."""
    source = Sqlite(folder / "shop.db")
    database = Database(source, name=f"shop {folder.name}")
    try:
        await amigrate(database)
        yield Outbox(database)
    finally:
        database.close()
        source.close()


# NATS JetStream


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Return a server of this file's own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


@asynccontextmanager
async def stream_of(server: NatsServer, name: str) -> AsyncIterator[Any]:
    """Give a JetStream context with an empty stream of the subjects that begin with `name`."""

    async def quiet(_error: Exception) -> None:
        """Print nothing: the server is away on purpose."""

    client = await nats.connect(
        server.url,
        reconnect_time_wait=0.02,
        max_reconnect_attempts=2000,
        allow_reconnect=True,
        error_cb=quiet,
    )
    try:
        context = client.jetstream(timeout=2.0)
        await context.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        yield context
    finally:
        await client.close()


async def stored(context: Any, name: str) -> list[Any]:
    """Return all messages of a stream, in its order."""
    info = await context.stream_info(name)
    first, last = info.state.first_seq, info.state.last_seq
    return [await context.get_msg(name, seq) for seq in range(first, last + 1)]


def test_jetstream_drops_what_it_has_had(nats_server: NatsServer, tmp_path: Path):
    """Acknowledgements that are lost have events sent again: each is stored once, in order."""

    async def main() -> None:
        async with outbox_in(tmp_path) as outbox, stream_of(nats_server, "shop") as context:
            sink, lost = JetStream(context, "shop.{aggregate}.{type}"), set[str]()

            async def unlucky(event: OutboxEvent) -> None:
                await sink(event)
                if event.id not in lost:
                    lost.add(event.id)
                    raise ConnectionError("the acknowledgement is lost")

            ids = await committed(
                outbox,
                ("order", "7", "order.made", {"total": 30}),
                ("order", "7", "order.paid", b"\x00\xff"),
                ("büro *.>", "8", "it \r\nis", "text"),
            )
            worker = dispatcher(outbox, unlucky, backoff=0.0)
            assert await worker.drain() == 3
            assert worker.snapshot()["failed"] == 3
            messages = await stored(context, "shop")
            assert sorted(m.headers["Nats-Msg-Id"] for m in messages) == sorted(ids)
            told = {m.headers["Nats-Msg-Id"]: (m.subject, m.data) for m in messages}
            assert [told[one] for one in ids] == [
                ("shop.order.order_made", b'{"total":30}'),
                ("shop.order.order_paid", b"\x00\xff"),
                ("shop.büro____.it___is", b"text"),
            ]
            of_7 = [m.headers["Seawall-Sequence"] for m in messages if "order" in m.subject]
            assert of_7 == ["1", "2"]

    asyncio.run(main())


def test_without_the_id_jetstream_has_it_twice(nats_server: NatsServer):
    """Ablation: JetStream recognizes repeats by the header, and reports them."""
    event = OutboxEvent("abc", "order", "7", 1, "made", b"{}", {"Nats-Msg-Id": "of the user"}, 1.0)

    async def main() -> None:
        async with stream_of(nats_server, "twice") as context:
            sink = JetStream(context, "twice.{type}")
            await sink(event)
            await sink(event)
            assert len(await stored(context, "twice")) == 1
            ack = await context.publish("twice.made", b"{}", headers={"Nats-Msg-Id": "abc"})
            assert ack.duplicate
            await context.publish("twice.made", b"{}")
            await context.publish("twice.made", b"{}")
            assert len(await stored(context, "twice")) == 3

    asyncio.run(main())


def test_a_nats_server_that_is_killed_loses_nothing(nats_server: NatsServer, tmp_path: Path):
    """While it is away events fail and stay; when it is back they are stored, once, in order."""

    async def main() -> None:
        async with outbox_in(tmp_path) as outbox, stream_of(nats_server, "killed") as context:
            sink = JetStream(context, "killed.{aggregate_id}")
            worker = dispatcher(outbox, sink, backoff=0.0, attempts=1000)
            ids = await numbered(outbox, "1", 3)
            assert await worker.drain() == 3
            nats_server.kill()
            ids += await numbered(outbox, "1", 3)
            context._timeout = 0.2
            assert await worker.run_once() == 0
            assert worker.snapshot()["failed"] == 1
            nats_server.start()
            context._timeout = 2.0
            async with asyncio.timeout(30):
                while worker.snapshot()["delivered"] < 6:
                    await worker.run_once()
            messages = await stored(context, "killed")
            assert [m.headers["Nats-Msg-Id"] for m in messages] == ids

    asyncio.run(main())


def test_an_outage_behind_a_breaker_costs_no_attempts(nats_server: NatsServer, tmp_path: Path):
    """What fails opens the circuit; from then on events wait, and none is given up."""

    async def main() -> None:
        clock = VirtualClock()
        breaker = Breaker(failure_ratio=0.5, window=30, min_calls=1, break_for=15)
        guard = new_guard(breaker, clock=clock)
        async with outbox_in(tmp_path) as outbox, stream_of(nats_server, "outage") as context:
            sink = guard(JetStream(context, "outage.{aggregate_id}"))
            worker = dispatcher(outbox, sink, backoff=0.0, attempts=2)
            ids = await numbered(outbox, "1", 2)
            nats_server.kill()
            context._timeout = 0.2
            assert [await worker.run_once() for _ in range(5)] == [0] * 5
            told = worker.snapshot()
            assert (told["failed"], told["refused"], told["blocked"]) == (1, 4, 0)
            nats_server.start()
            context._timeout = 2.0
            async with asyncio.timeout(30):
                while not await answers(context, "outage"):
                    pass
            clock.advance(15)
            assert await worker.drain() == 2
            assert [m.headers["Nats-Msg-Id"] for m in await stored(context, "outage")] == ids

    asyncio.run(main())


async def answers(context: Any, name: str) -> bool:
    """Tell whether the server is back, with its streams."""
    try:
        await context.stream_info(name)
    except (nats.errors.Error, TimeoutError):
        await asyncio.sleep(0.02)  # noqa: TID251 - a real server
        return False
    return True


def test_a_subject_without_a_stream_is_a_failure(nats_server: NatsServer, tmp_path: Path):
    """An event that no stream stores is not delivered: its aggregate is blocked, with the cause."""

    async def main() -> None:
        async with outbox_in(tmp_path) as outbox, stream_of(nats_server, "other") as context:
            worker = dispatcher(outbox, JetStream(context, "nobody.{type}"), attempts=1)
            await numbered(outbox, "1", 2)
            assert await worker.drain() == 0
            (blocked,) = await outbox.ablocked()
            assert "NoStreamResponse" in blocked.error

    asyncio.run(main())


# Webhooks


class Receiver:
    """An app that takes events whose signature is good, and counts them."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self.more: Callable[[], Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part["body"]
            if not part.get("more_body"):
                break
        status = 200
        try:
            about = verify_webhook(SECRET, headers, body)
        except ValueError:
            status = 401
        else:
            assert headers["idempotency-key"] == f'"{about}"'  # the id is signed, too
            self.taken.append((headers["idempotency-key"], body))
            if self.more is not None:
                await self.more()
        answer = b"x" * 100
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def posting(
    folder: Path, url: str, secret: str = SECRET, seconds: float = 5.0
) -> AsyncIterator[tuple[Outbox, Webhook]]:
    """Give an outbox and a webhook to `url`, under a timeout alone."""
    guard = new_guard(Timeout(seconds))
    async with outbox_in(folder) as outbox, httpx.AsyncClient() as client:
        yield outbox, Webhook(f"{url}/events", client=client, secret=secret, guard=guard)


def test_a_webhook_is_taken_once_by_its_receiver(tmp_path: Path):
    """Sent twice, with another signature each time: the receiver's middleware knows it again."""
    receiver, source = Receiver(), Sqlite(tmp_path / "receiver.db")
    database = Database(source, name="receiver")
    migrate(database)
    app = IdempotentRequests(
        receiver, Idempotency(database), routes=["/events"], scope=lambda _incoming: "shop"
    )

    async def main(url: str) -> None:
        async with posting(tmp_path, url) as (outbox, hook):
            lost: set[str] = set()

            async def unlucky(event: OutboxEvent) -> None:
                await hook(event)
                if event.id not in lost:
                    lost.add(event.id)
                    raise ConnectionError("the answer is lost")

            ids = await numbered(outbox, "1", 3) + await numbered(outbox, "2", 2)
            worker = dispatcher(outbox, unlucky, backoff=0.0)
            assert await worker.drain() == 5
            assert sorted(receiver.taken) == sorted(
                (f'"{one}"', b"%d" % n) for one, n in zip(ids, (0, 1, 2, 0, 1), strict=True)
            )
            assert [key for key, _ in receiver.taken if key[1:-1] in ids[:3]] == [
                f'"{one}"' for one in ids[:3]
            ]
            assert (app.snapshot()["executed"], app.snapshot()["replays"]) == (5, 5)

    try:
        with serve(app) as url:
            asyncio.run(main(url))
    finally:
        database.close()
        source.close()


def test_a_receiver_that_is_at_it_says_409_until_it_is_done(tmp_path: Path):
    """A post that timed out goes on at the receiver; the next learns so, and then the answer."""
    receiver, source = Receiver(), Sqlite(tmp_path / "receiver.db")
    database = Database(source, name="receiver")
    migrate(database)
    app = IdempotentRequests(
        receiver, Idempotency(database), routes=["/events"], scope=lambda _incoming: "shop"
    )

    async def main(url: str) -> None:
        async with posting(tmp_path, url, seconds=0.3) as (outbox, hook):
            worker = dispatcher(outbox, hook, backoff=0.0, attempts=1000)
            await numbered(outbox, "1", 1)
            assert await worker.run_once() == 0  # it timed out
            hook.guard = new_guard(Timeout(5.0))
            assert await worker.run_once() == 0  # and is at work
            assert app.snapshot()["in_flight"] == 1
            goes_on.set()
            async with asyncio.timeout(20):
                while not await worker.run_once():
                    pass
            assert len(receiver.taken) == 1

    import threading

    goes_on = threading.Event()

    async def more() -> None:
        await asyncio.to_thread(goes_on.wait, 20)

    receiver.more = more
    try:
        with serve(app) as url:
            asyncio.run(main(url))
    finally:
        goes_on.set()
        database.close()
        source.close()


def test_a_receiver_refuses_who_has_another_secret(tmp_path: Path):
    """Its 401 is a failure, and nothing was taken."""
    receiver = Receiver()

    async def main(url: str) -> None:
        async with posting(tmp_path, url, OTHER_SECRET) as (outbox, hook):
            await numbered(outbox, "1", 1)
            assert await dispatcher(outbox, hook, attempts=1).drain() == 0
            (blocked,) = await outbox.ablocked()
            assert "401" in blocked.error

    with serve(receiver) as url:
        asyncio.run(main(url))
    assert receiver.taken == []


OK = b"HTTP/1.1 204 No Content\r\n\r\n"


@asynccontextmanager
async def scripted(*answers: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Give a receiver that writes these bytes, one for each request, and then hangs up.

    None is for a receiver that never answers.
    """
    got: list[bytes] = []
    said = iter(answers)
    closing: list[asyncio.StreamWriter] = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closing.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        got.append(head + await reader.readexactly(length))
        answer = next(said)
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", got
    finally:
        server.close()
        for writer in closing:
            writer.close()
        await server.wait_closed()


def key_of(request: bytes) -> bytes:
    """Return the Idempotency-Key of a request as it came."""
    (key,) = (
        line.split(b": ")[1]
        for line in request.split(b"\r\n")
        if line.lower().startswith(b"idempotency-key")
    )
    return key


FAILING = {
    "409": b"HTTP/1.1 409 Conflict\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    "422": b"HTTP/1.1 422 Unprocessable\r\nContent-Length: 0\r\n\r\n",
    "500": b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\noh",
    "503 without a word": b"HTTP/1.1 503 Oh\r\nContent-Length: 0\r\n\r\n",
    "no answer": None,
    "hung up": b"",
    "cut within the headers": b"HTTP/1.1 200 OK\r\nContent-Le",
    "cut within the body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nok",
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
}


@pytest.mark.parametrize("how", FAILING)
def test_a_failure_on_the_wire_is_tried_again_with_the_same_key(how: str, tmp_path: Path):
    """Whatever a receiver does, an attempt is counted, the order is kept, nothing is lost."""

    async def main() -> None:
        async with (
            scripted(FAILING[how], OK, OK) as (url, got),
            posting(tmp_path, url, seconds=0.3 if FAILING[how] is None else 10.0) as (outbox, hook),
        ):
            worker = dispatcher(outbox, hook, backoff=0.0)
            ids = await numbered(outbox, "1", 2)
            assert await worker.drain() == 2
            wanted = [ids[0], ids[0], ids[1]]
            assert [key_of(request) for request in got] == [b'"%s"' % i.encode() for i in wanted]
            assert [request[-1:] for request in got] == [b"0", b"0", b"1"]
            told = worker.snapshot()
            assert (told["failed"], told["refused"], told["delivered"]) == (1, 0, 2)

    asyncio.run(main())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_on_the_wire(status: int, tmp_path: Path):
    """A signed event is not redirected, not even by a client that follows redirects."""

    async def main() -> None:
        async with scripted(OK) as (elsewhere, stolen):
            there = elsewhere.encode()
            answer = b"HTTP/1.1 %d Go\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n"
            async with (
                scripted(answer % (status, there)) as (url, got),
                outbox_in(tmp_path) as outbox,
                httpx.AsyncClient(follow_redirects=True) as client,
            ):
                hook = Webhook(url, client=client, secret=SECRET, guard=new_guard(Timeout(10.0)))
                await numbered(outbox, "1", 1)
                assert await dispatcher(outbox, hook, attempts=1).drain() == 0
                assert (len(got), stolen) == (1, [])

    asyncio.run(main())


def test_a_receiver_that_asks_to_wait_pauses_the_dispatcher(tmp_path: Path):
    """429 or 503 with Retry-After costs no attempt: with one attempt the event still arrives."""
    busy = b"HTTP/1.1 %d Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"

    async def main() -> None:
        async with (
            scripted(busy % 429, busy % 503, OK) as (url, got),
            posting(tmp_path, url) as (outbox, hook),
        ):
            worker = dispatcher(outbox, hook, attempts=1)
            await numbered(outbox, "1", 1)
            assert [await worker.run_once() for _ in range(3)] == [0, 0, 1]
            assert worker.snapshot()["refused"] == 2
            assert len(got) == 3

    asyncio.run(main())


def test_nobody_there(tmp_path: Path):
    """A refused connection is a failure as any other; others' aggregates are delivered."""
    seen = Seen()

    async def main() -> None:
        async with posting(tmp_path, f"http://127.0.0.1:{free_port()}") as (outbox, hook):

            async def deliver(event: OutboxEvent) -> None:
                await (hook(event) if event.aggregate_id == "1" else seen.each(event))

            await numbered(outbox, "1", 1)
            await numbered(outbox, "2", 2)
            worker = Dispatcher(outbox, deliver, attempts=1)
            assert await worker.drain() == 2
            assert seen.of("2") == [1, 2]
            (blocked,) = await outbox.ablocked()
            assert "ConnectError" in blocked.error

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, 2, 60_000, 1_000_000])
def test_one_connection_serves_many_events(size: int, tmp_path: Path):
    """Answers are read, so that there is not a handshake for each event; unless one is large."""
    taken: list[tuple[Any, ...]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            taken.append(scope["client"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * size})

    async def main(url: str) -> None:
        async with posting(tmp_path, url) as (outbox, hook):
            await numbered(outbox, "1", 10)
            assert await dispatcher(outbox, hook).drain() == 10

    with serve(app) as url:
        asyncio.run(main(url))
    assert len(set(taken)) == (1 if size < 64 * 1024 else 10)
