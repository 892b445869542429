"""Requests with an Idempotency-Key, by the middleware, on every database."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from seawall import CircuitOpen
from seawall.durable.http.middleware import IdempotentRequests
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.models.idempotency import Fresh
from seawall.web import Edge
from seawall.web.asgi_types import Message
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import KEY, USER, Shop, edge_of, first, post, set_time, user


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


# What is promised, on every database


def test_a_repeat_is_answered_as_the_first(opening: Opening):
    """Status, headers and body come back byte for byte, marked, and nothing is done again."""
    headers = [(b"X-B", b"2"), (b"location", b"/orders/1"), (b"x-b", b"1"), (b"X-B", b"2")]
    shop = Shop(b"\x00\xff", b"two", headers=[*headers, (b"x-a", b" \xc3\xa9 "), (b"X-Empty", b"")])

    async def main() -> None:
        async with edge_of(opening, shop) as app:
            seen: list[list[Message]] = []
            for _ in range(3):
                messages: list[Message] = []
                await post(app, on_send=messages.append)
                seen.append(messages)
            start, body = seen[1]
            assert start["status"] == 201
            assert start["headers"] == [*shop.headers, (b"idempotent-replayed", b"true")]
            assert body["body"] == b"\x00\xfftwo" == b"".join(m["body"] for m in seen[0][1:])
            assert seen[0][0]["headers"] == shop.headers
            assert seen[1] == seen[2]
            assert shop.orders == [b"book"]
            assert (app.snapshot()["executed"], app.snapshot()["replays"]) == (1, 2)

    asyncio.run(main())


def test_many_at_once_are_one(opening: Opening):
    """Of 64 requests with one key one is carried out; the others are told so, or what it was."""
    gate = asyncio.Event()

    async def hold(_shop: Shop) -> None:
        await gate.wait()

    shop = Shop(more=hold)

    async def main() -> None:
        async with edge_of(opening, shop) as app:
            asked = [asyncio.create_task(post(app)) for _ in range(64)]
            await asyncio.wait(asked[1:], return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            answers = await asyncio.gather(*asked)
            assert len(shop.orders) == 1
            assert sum(answer.status == 201 and first(answer) for answer in answers) == 1
            others = [answer for answer in answers if answer.status != 201]
            assert others
            for answer in others:
                assert answer.status == 409
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["retry-after"] == "2"
                assert answer.json()["reason"] == "key_in_flight"

    asyncio.run(main())


def test_another_payload_is_refused(opening: Opening):
    """The same key with another body, query or path is 422, and nothing is done."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(opening, shop) as app:
            assert (await post(app)).status == 201
            for changed in ({"body": b"pen"}, {"query_string": b"a=1"}, {"root_path": "/v2"}):
                answer = await post(app, **changed)
                assert (answer.status, answer.json()["reason"]) == (422, "key_reused")
            assert (await post(app, "/orders/1/pay")).status == 201
            assert (await post(app, "/orders/2/pay")).status == 422
            assert len(shop.orders) == 2

    asyncio.run(main())


def test_a_crashed_worker_is_taken_over_and_its_word_refused(opening: Opening):
    """After the lease another runs; the late answer of the first is not sent, the record's is."""
    late = asyncio.Event()

    async def main() -> None:
        async with opening() as database:
            await set_time(database, 0)
            shop = Shop(b"first")

            async def slow(shop: Shop) -> None:
                if len(shop.orders) == 1:
                    shop.parts = (b"second",)
                    await late.wait()
                    shop.parts = (b"too late",)

            shop.more = slow
            app = IdempotentRequests(
                shop, Idempotency(database, lease=30), routes=["/orders"], scope=user
            )
            zombie = asyncio.create_task(post(app))
            await shop.busy.wait()
            assert (await post(app)).status == 409
            await set_time(database, 31)
            assert (await post(app)).body == b"second"
            late.set()
            answer = await zombie
            assert answer.body == b"second"
            assert not first(answer)
            assert (await post(app)).body == b"second"
            seen = app.snapshot()
            assert (seen["taken_over"], seen["refused_late"]) == (1, 1)

    asyncio.run(main())


# What is kept and what is not


@pytest.mark.parametrize("status", [200, 201, 202, 204, 302, 402, 500, 502, 504])
def test_what_was_done_is_kept(quick: Opening, status: int):
    """An answer is kept once the work began, a failure too."""
    shop = Shop(b"" if status == 204 else b"it", status=status)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            answers = [await post(app) for _ in range(2)]
            assert [answer.status for answer in answers] == [status] * 2
            assert len(shop.orders) == 1
            assert not first(answers[1])
            assert app.snapshot()["failed"] == (status >= 500)

    asyncio.run(main())


# What is compared


@pytest.mark.parametrize(
    ("kind", "body", "again", "status"),
    [
        ("application/json", b'{"a":1,"b":2}', b'{ "b": 2, "a": 1 }', 201),
        ("application/vnd.shop+json; charset=utf-8", b"[1]", b"[ 1 ]", 201),
        ("application/json", b'{"a":1}', b'{"a":1.0}', 422),
        ("application/json", b'{"a":1}', b'{"a":1,"a":2}', 422),
        ("application/json", b'{"a":2,"a":1}', b'{"a": 2, "a": 1}', 422),
        ("application/json", b'{"a":NaN}', b'{"a": NaN}', 422),
        ("application/json", b'{"a":1.50}', b'{"a":1.50}', 201),
        ("text/plain", b'{"a":1}', b'{"a": 1}', 422),
        ("text/plain", b'{"a":1}', b'{"a":1}', 201),
    ],
)
def test_json_is_compared_by_meaning(
    quick: Opening, kind: str, body: bytes, again: bytes, status: int
):
    """Another order of members and other spaces are the same payload; in doubt the bytes count."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            for each, expected in ((body, 201), (again, status)):
                answer = await post(app, "/orders", KEY, USER, ("content-type", kind), body=each)
                assert answer.status == expected
            assert shop.orders == [body]

    asyncio.run(main())


def test_a_function_says_what_is_compared(quick: Opening, caplog: pytest.LogCaptureFixture):
    """A part of the body as a value; path and query always count; where it raises, the bytes."""
    shop = Shop()

    def order_of(_incoming: Any, body: bytes) -> Any:
        said = json.loads(body)
        return {"items": said["items"], "by": UUID(int=said["by"])}

    async def main() -> None:
        async with edge_of(quick, shop, fingerprint=order_of) as app:
            bodies = [
                (b'{"sent": 1, "by": 7, "items": [1]}', 201),
                (b'{"items": [1], "by": 7, "sent": 2}', 201),
                (b'{"items": [2], "by": 7, "sent": 2}', 422),
                (b"a secret that is no JSON", 422),
            ]
            for body, status in bodies:
                assert (await post(app, body=body)).status == status
            assert (await post(app, query_string=b"x=1", body=bodies[0][0])).status == 422
            other = ("idempotency-key", "other"), USER
            assert (await post(app, "/orders", *other, body=b"{")).status == 201
            assert not first(await post(app, "/orders", *other, body=b"{"))
            assert (await post(app, "/orders", *other, body=b"[")).status == 422
            app._fingerprint = lambda _incoming, _body: None
            some = ("idempotency-key", "some"), USER
            assert (await post(app, "/orders", *some, body=b"1")).status == 201
            assert not first(await post(app, "/orders", *some, body=b"2"))

    asyncio.run(main())
    assert "raised JSONDecodeError" in caplog.text
    assert "secret" not in caplog.text


def test_no_body_and_no_header_fills_the_log(quick: Opening, caplog: pytest.LogCaptureFixture):
    """Where the function raises for what callers send, that is logged once a second at most."""

    async def main() -> None:
        async with edge_of(quick, Shop(), fingerprint=lambda _incoming, body: body[99]) as app:
            for number in range(20):
                key = ("idempotency-key", f"odd-{number}"), USER
                assert (await post(app, "/orders", *key, body=b"{")).status == 201
        assert 1 <= len(caplog.records) <= 3
        caplog.clear()
        async with edge_of(quick, Shop()) as app:
            twice = ("content-type", "application/json"), ("content-type", "text/plain")
            key = ("idempotency-key", "twice"), USER
            assert (await post(app, "/orders", *key, *twice, body=b"{}")).status == 201
            assert not first(await post(app, "/orders", *key, *twice, body=b"{}"))
        assert caplog.records == []

    asyncio.run(main())


@pytest.mark.parametrize("status", [307, 400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 503])
def test_what_was_not_done_is_not_kept(quick: Opening, status: int):
    """A status which says that nothing was done leaves the key free, also for another payload."""
    shop = Shop(status=status)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            answers = [await post(app, body=body) for body in (b"book", b"pen")]
            assert [answer.status for answer in answers] == [status] * 2
            assert all(first(answer) for answer in answers)
            assert shop.orders == [b"book", b"pen"]
            assert app.snapshot()["abandoned"] == 2

    asyncio.run(main())


def test_an_error_is_a_kept_failure(quick: Opening):
    """What the app raises is answered 500, kept, and raised for those outside to see."""

    async def break_down(_shop: Shop) -> None:
        raise RuntimeError("a secret")

    shop = Shop(more=break_down)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            messages: list[Message] = []
            with pytest.raises(RuntimeError, match="a secret"):
                await post(app, on_send=messages.append)
            assert messages[0]["status"] == 500
            assert b"secret" not in messages[1]["body"]
            again = await post(app)
            assert (again.status, again.body) == (500, messages[1]["body"])
            assert len(shop.orders) == 1

    asyncio.run(main())


def test_a_refusal_of_ours_is_not_kept(quick: Opening):
    """An open circuit inside the app becomes 503 at the edge, and the next request runs."""

    async def refuse(_shop: Shop) -> None:
        raise CircuitOpen("open", retry_after=3.0)

    shop = Shop(more=refuse)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            edge = Edge(app, name="shop")
            answer = await post(edge)
            assert (answer.status, answer.headers["retry-after"]) == (503, "3")
            shop.more = None
            assert (await post(edge)).status == 201

    asyncio.run(main())


# Keys, callers, routes


def test_a_key_is_required_and_well_formed(quick: Opening):
    """Without a key 400, with two, or one that is none, 400; without a caller 403."""
    shop = Shop()
    bad = ["", '"', "two words", "x" * 256, '"a"b', "\xe9"]

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            answer = await post(app, "/orders", USER)
            assert (answer.status, answer.json()["reason"]) == (400, "key_missing")
            twice = [KEY, KEY, USER]
            for headers in [twice, *([("idempotency-key", value), USER] for value in bad)]:
                answer = await post(app, "/orders", *headers)
                assert (answer.status, answer.json()["reason"]) == (400, "key_malformed")
            answer = await post(app, "/orders", KEY)
            assert (answer.status, answer.json()["reason"]) == (403, "scope_unknown")
            assert shop.orders == []
            assert (await post(app, "/orders", ("idempotency-key", "bare"), USER)).status == 201

    asyncio.run(main())


def test_without_require_a_key_is_optional_but_not_a_bad_one(quick: Opening):
    """Requests without a key pass; a key that is none is refused all the same."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, shop, required=False) as app:
            for _ in range(2):
                assert (await post(app, "/orders", USER)).status == 201
            assert len(shop.orders) == 2
            assert shop.names == [None, None]
            assert (await post(app, "/orders", ("idempotency-key", " "), USER)).status == 400
            await post(app)
            await post(app)
            assert len(shop.orders) == 3

    asyncio.run(main())


def test_other_routes_and_methods_pass(quick: Opening):
    """What is not told about is not touched."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            await post(app, "/carts", USER)
            await post(app, "/orders", USER, method="GET")
            await app({"type": "lifespan"}, _body, _nowhere)
            await app({"type": "websocket", "path": "/orders", "headers": []}, _body, _nowhere)
            assert len(shop.orders) == 4
            assert set(app.snapshot().values()) == {0}

    asyncio.run(main())


async def _body() -> Message:
    return {"type": "http.request", "body": b""}


async def _nowhere(_message: Message) -> None:
    pass


def test_large_requests_are_refused(quick: Opening):
    """A body over the limit is 413, at once where its length is declared; nothing is done."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, shop, max_request_body=10) as app:
            assert (await post(app, body=b"x" * 10)).status == 201
            answer = await post(app, body=b"x" * 11)
            assert (answer.status, answer.json()["reason"]) == (413, "body_too_large")
            declared = ("content-length", "11")
            assert (await post(app, "/orders", KEY, USER, declared)).status == 413
            assert len(shop.orders) == 1
            assert app.snapshot()["too_large"] == 2

    asyncio.run(main())


def test_a_body_in_parts_is_one_and_half_a_body_is_none(quick: Opening):
    """Parts are put together; a client that goes away in mid-body has asked for nothing."""
    shop = Shop()
    scope_headers = [(b"idempotency-key", b"parts"), (b"x-user", b"ann")]

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            for last in ("http.disconnect", "http.request"):
                parts = [
                    {"type": "http.request", "body": b"bo", "more_body": True},
                    {"type": last, "body": b"ok"},
                ]
                scope = {"type": "http", "method": "POST", "path": "/orders"}
                scope["headers"] = scope_headers  # type: ignore[assignment]

                async def receive(parts: list[Any] = parts) -> Any:
                    return parts.pop(0)

                await app(scope, receive, _nowhere)
            assert shop.orders == [b"book"]

    asyncio.run(main())


def test_handlers_know_the_key(quick: Opening):
    """The app finds how its request is keyed, and names its own effects after that."""
    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, shop, scope=lambda _: ("acme", "ann")) as app:
            await post(app)
            (name,) = shop.names
            assert (name.scope, name.operation) == ('["acme", "ann"]', "POST /orders")
            assert name.key == "8e03978e-40d5"
            part = name.part("charge")
            assert part["operation"] == "POST /orders > charge"
            assert isinstance(
                await app.idempotency.areserve(**part), Fresh
            )  # another record than the request's own

    asyncio.run(main())


def test_who_asks_for_what_is_under_way_may_wait(quick: Opening):
    """With `wait` the answer of the first is waited for, and given."""
    gate = asyncio.Event()

    async def hold(_shop: Shop) -> None:
        await gate.wait()

    shop = Shop(more=hold)

    async def main() -> None:
        async with edge_of(quick, shop, wait=20.0) as app:
            asked = [asyncio.create_task(post(app)) for _ in range(3)]
            await shop.busy.wait()
            gate.set()
            answers = await asyncio.gather(*asked)
            assert {answer.status for answer in answers} == {201}
            assert len(shop.orders) == 1

    asyncio.run(main())


def test_a_login_between_the_edge_and_here_counts(quick: Opening):
    """Whose a request is may be found out by a middleware that makes a scope of its own."""

    async def main() -> None:
        async with edge_of(quick, Shop(), scope=lambda seen: seen.scope.get("user")) as app:

            async def login(scope: Any, receive: Any, send: Any) -> None:
                await app({**scope, "user": "ann"}, receive, send)

            edge = Edge(login, name="shop")
            assert (await post(edge)).status == 201
            assert (await post(app)).status == 403

    asyncio.run(main())
