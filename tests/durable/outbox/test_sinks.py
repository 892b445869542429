from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio

from seawall import Breaker, Guard
from seawall.durable.outbox import sinks
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.sinks import JetStream, RedisStream, Webhook
from seawall.durable.webhooks import verify_webhook
from seawall.errors import CircuitOpen, NotDelivered, Overloaded, StoreUnavailable
from tests.redis.conftest import redis_url

__all__ = ["redis_url"]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests
EVENT = OutboxEvent(
    "abc123",
    "order",
    "7 ü",
    3,
    "order.made",
    b'{"a":1}',
    {"tenant": "acme", "Authorization": "x", "bad name": "y", "Webhook-Id": "z"},
    1.0,
)

# Webhooks


def posting(
    *answers: httpx.Response, guard: Guard | None = None
) -> tuple[Any, list[httpx.Request]]:
    """Return a webhook to a receiver that gives these answers, and what that receives."""
    got: list[httpx.Request] = []
    said = iter(answers)

    def receive(request: httpx.Request) -> httpx.Response:
        got.append(request)
        return next(said)

    async def post() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(receive)) as client:
            hook = Webhook(
                "http://receiver/events?token=1", client=client, secret=SECRET, guard=guard
            )
            try:
                await hook(EVENT)
            finally:
                hook.close()
            assert "token" not in repr(hook)

    return post, got


def test_a_webhook_is_signed_and_has_the_id_as_its_key():
    """The receiver can tell who sent it, that it is whole, and whether it has had it."""
    post, got = posting(httpx.Response(204))
    asyncio.run(post())
    (request,) = got
    assert request.content == EVENT.payload
    assert request.headers["idempotency-key"] == '"abc123"'
    assert request.headers["content-type"] == "application/json"
    assert request.headers["seawall-aggregate"] == "order/7 ?"
    assert request.headers["seawall-sequence"] == "3"
    assert request.headers["tenant"] == "acme"
    assert "authorization" not in request.headers
    assert "bad name" not in request.headers
    assert request.headers.get_list("webhook-id") == ["abc123"]
    assert verify_webhook(SECRET, request.headers, request.content) == "abc123"


@pytest.mark.parametrize("status", [301, 400, 404, 410, 500, 503])
def test_whatever_is_no_success_is_a_failure(status: int):
    """A redirect is a failure: a signed event is sent to no other address."""
    post, got = posting(httpx.Response(status, headers={"location": "http://elsewhere/"}))
    with pytest.raises(NotDelivered):
        asyncio.run(post())
    assert len(got) == 1


def test_a_receiver_that_asks_to_wait_is_waited_for():
    """429 or 503 with Retry-After costs no attempt; the pause is bounded."""
    for asked, waited in (("7", 7.0), ("999999", sinks.LONGEST_PAUSE)):
        post, _ = posting(httpx.Response(429, headers={"retry-after": asked}))
        with pytest.raises(Overloaded) as raised:
            asyncio.run(post())
        assert raised.value.retry_after == waited


def test_a_webhook_goes_through_its_guard():
    """When the guard's breaker is open nothing is posted."""
    breaker = Breaker(failure_ratio=0.5, window=30, min_calls=1, break_for=15)
    guard = Guard("test webhook", breaker)
    try:
        post, got = posting(httpx.Response(500), guard=guard)
        with pytest.raises(NotDelivered):
            asyncio.run(post())
        with pytest.raises(CircuitOpen):
            asyncio.run(post())
        assert len(got) == 1
    finally:
        guard.close()


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "5"}])
def test_a_replayed_failure_of_a_receiver_opens_no_circuit(headers: dict[str, str]):
    """It is the answer to an earlier delivery: the event is not delivered, the receiver is well."""

    def receiver(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, headers={"Idempotent-Replayed": "true", **headers})

    async def main() -> None:
        breaker = Breaker(consecutive=1)
        guard = Guard("replaying webhook", breaker)
        async with httpx.AsyncClient(transport=httpx.MockTransport(receiver)) as client:
            hook = Webhook("http://receiver/", client=client, secret=None, guard=guard)
            for _ in range(3):
                with pytest.raises(NotDelivered, match="503"):
                    await hook(EVENT)
        assert breaker.state == "closed"
        guard.close()

    asyncio.run(main())


def test_an_event_that_is_not_wanted_opens_no_circuit():
    """However often a receiver answers 400 to one event, the next one is posted."""

    async def main() -> None:
        answers = iter([*[400] * 40, 204])

        def receive(_request: httpx.Request) -> httpx.Response:
            return httpx.Response(next(answers))

        async with httpx.AsyncClient(transport=httpx.MockTransport(receive)) as client:
            hook = Webhook("http://receiver/poison", client=client, secret=None)
            try:
                for _ in range(40):
                    with pytest.raises(NotDelivered):
                        await hook(EVENT)
                await hook(EVENT)
            finally:
                hook.close()

    asyncio.run(main())


# Streams


def test_a_redis_stream_has_all_of_an_event(redis_url: str):
    """Events are appended in order with their id; the stream stays about as long as it may."""

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.delete("test outbox", "test wrong")
            sink = RedisStream(client, "test outbox", max_length=100)
            events = [EVENT._replace(id=str(n), sequence=n) for n in range(1_000)]
            before = await scripts(client)
            assert await sink(events) == []
            assert await scripts(client) == before + 1  # all or none: nothing is overtaken
            rows = await client.xrange("test outbox")
            assert 100 <= len(rows) < 500
            last = rows[-1][1]
            assert last[b"id"] == b"999"
            assert last[b"payload"] == EVENT.payload
            assert last[b"type"] == b"order.made"
            assert [row[1][b"id"] for row in rows] == [
                str(n).encode() for n in range(1000 - len(rows), 1000)
            ]
            await client.set("test wrong", "no stream")
            wrong = RedisStream(client, "test wrong")
            with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
                await wrong(events[:2])
            await sink.close()
            await wrong.close()
            await client.delete("test outbox", "test wrong")

    asyncio.run(main())


def test_an_aggregate_goes_to_one_partition(redis_url: str):
    """Those of a partition that fails are not taken; others are, and keep their order."""

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            names = [f"test parts.{number}" for number in range(4)]
            await client.delete(*names)
            sink = RedisStream(redis_url, "test parts", partitions=4)
            events = [
                EVENT._replace(id=f"{aggregate}-{n}", aggregate_id=str(aggregate), sequence=n)
                for n in range(3)
                for aggregate in range(20)
            ]
            assert await sink(events) == []
            found: dict[bytes, set[str]] = {}
            for name in names:
                rows = await client.xrange(name)
                for _, fields in rows:
                    found.setdefault(fields[b"aggregate_id"], set()).add(name)
                ids = [fields[b"id"].decode() for _, fields in rows]
                assert ids == [event.id for event in events if event.id in ids]
            assert len(found) == 20
            assert all(len(places) == 1 for places in found.values())
            await client.delete(*names)
            await client.set(names[0], "no stream")
            failed = await sink(events)
            assert {found[one.partition("-")[0].encode()].copy().pop() for one in failed} == {
                names[0]
            }
            assert 0 < len(failed) < 60
            await client.delete(*names)
            await sink.close()

    asyncio.run(main())


async def scripts(client: Any) -> int:
    """Return how many the server has run."""
    told: dict[str, dict[str, int]] = await client.info("commandstats")
    return told.get("cmdstat_evalsha", {}).get("calls", 0)


class FakeContext:
    """The publishing of a JetStream context; test_sink_peers.py has a real server."""

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes, dict[str, str]]] = []

    async def publish(self, subject: str, payload: bytes, *, headers: dict[str, str]) -> None:
        self.published.append((subject, payload, headers))


def test_jetstream_is_told_the_id():
    """The event's id is the Nats-Msg-Id; what an event is called cannot choose another subject."""
    context = FakeContext()
    asyncio.run(JetStream(context, "shop.{aggregate}.{type}")(EVENT._replace(aggregate="a.>*")))
    ((subject, payload, headers),) = context.published
    assert subject == "shop.a___.order_made"
    assert payload == EVENT.payload
    assert headers == {
        "tenant": "acme",
        "Nats-Msg-Id": "abc123",
        "Seawall-Event": "order.made",
        "Seawall-Aggregate": "a.>*/7 ?",
        "Seawall-Sequence": "3",
    }


def test_wrong_sinks_are_refused_at_once():
    """What cannot work raises when it is made."""
    with pytest.raises(TypeError):
        JetStream(object())
    with pytest.raises(ValueError, match="subject"):
        JetStream(FakeContext(), "orders.>")
    with pytest.raises(TypeError):
        RedisStream(object(), "x")
    with pytest.raises(TypeError):
        Webhook("http://x/", client=object(), secret=None)
    with pytest.raises(ValueError, match="url"):
        Webhook("x", client=httpx, secret=None)
