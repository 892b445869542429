"""What becomes of an answer: recorded before its end is sent, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import CircuitOpen
from seawall.durable.http.request import RecordedExchange
from seawall.errors import LeaseLost
from seawall.models.idempotency import Answer as Stored
from seawall.testing import run_virtual
from seawall.web.asgi_types import Message
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import Shop, edge_of, post
from tests.support import falsified, let_pass


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


# The end of an answer


class Book:
    """What keeps records, for tests: in memory."""

    def __init__(self) -> None:
        self.kept: Stored | None = None
        self.refuses: Callable[[], Awaitable[None]] | None = None

    async def settle(self, answer: Stored, outcome: Any) -> Any:
        """Keep it."""
        del outcome
        await let_pass(1.0)
        if self.refuses is None:
            self.kept = answer
        return self.refuses

    async def abandon(self) -> Any:
        """Keep nothing."""
        return self.refuses


Parts = tuple[list[bytes], bool, bool, str]
PARTS: st.SearchStrategy[Parts] = st.tuples(
    st.lists(st.binary(max_size=3), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["1.0", "1.1", "2"]),
)
"""The parts of a body, whether its length is declared, whether an empty part ends it; of HTTP."""


def check_recorded_first(case: Parts) -> None:
    """When the client has all of the answer, the record has it, too."""
    parts, declared, empty_end, version = case
    book, whole = Book(), b"".join(parts)
    seen: list[Message] = []

    async def to(message: Message) -> None:
        seen.append(message)
        got = b"".join(m.get("body", b"") for m in seen)
        ended = message["type"] == "http.response.body" and not message.get("more_body")
        closes = version == "1.0" and not declared  # whatever came may be all, to the client
        if ended or closes or (declared and whole and got == whole):
            assert book.kept is not None, "the client has it all, and it is not recorded"

    headers = [(b"content-length", str(len(whole)).encode())] if declared else []
    shop = Shop(*parts, *([b""] if empty_end else []), headers=headers)
    exchange = RecordedExchange(b"book", to, book, 100, frozenset())
    run_virtual(exchange.run(shop, {"http_version": version}))
    assert book.kept is not None
    assert book.kept.body == whole == b"".join(m.get("body", b"") for m in seen)
    assert seen[0]["headers"] == headers
    assert [m["type"] for m in seen].count("http.response.start") == 1
    assert not seen[-1].get("more_body")


@given(PARTS)
def test_the_end_comes_after_the_record(case: Parts):
    """However an answer is cut into parts, its client has not all of it before it is recorded."""
    check_recorded_first(case)


def test_without_holding_back_it_would_not(monkeypatch: pytest.MonkeyPatch):
    """Ablation: a part that is sent as it comes may be the last one of a declared length."""
    monkeypatch.setattr(RecordedExchange, "_take_part", _more_at_once)
    assert falsified(check_recorded_first, PARTS)


async def _more_at_once(self: RecordedExchange, part: bytes) -> None:
    await self._release({"type": "http.response.body", "body": part, "more_body": True})


def test_a_stream_passes_as_it_comes():
    """What has no declared length is not kept waiting, but for its end."""
    book = Book()
    times: list[tuple[float, bytes]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def to(message: Message) -> None:
            times.append((loop.time() - began, message.get("body", b"start")))

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"a", b"b"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await let_pass(10.0)
            await send({"type": "http.response.body", "body": b""})

        began = loop.time()
        await RecordedExchange(b"", to, book, 100, frozenset()).run(app, {})

    run_virtual(main())
    assert times == [(0.0, b"start"), (0.0, b"a"), (10.0, b"b"), (21.0, b"")]


def test_a_stream_that_is_refused_has_no_end():
    """Where a stream could not be recorded its client must not take it for complete."""
    book, seen = Book(), []

    async def refused() -> None:
        raise AssertionError("the answer has begun already")

    async def to(message: Message) -> None:
        seen.append(message)

    book.refuses = refused
    exchange = RecordedExchange(b"", to, book, 100, frozenset())
    with pytest.raises(LeaseLost):
        run_virtual(exchange.run(Shop(b"a", b"b"), {}))
    assert [m.get("body") for m in seen] == [None, b"a"]


def test_who_listens_for_the_end_hears_of_it():
    """An app that catches the error, and waits for its client to go, does not wait for ever."""
    book = Book()

    async def refused() -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(LeaseLost):
            await Shop(b"a", b"b")(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    book.refuses = refused
    run_virtual(RecordedExchange(b"", _nowhere, book, 100, frozenset()).run(app, {}))


async def _nowhere(_message: Message) -> None:
    pass


# Apps that answer in a way of their own


def test_headers_that_can_be_read_once(quick: Opening):
    """Any iterable will do, of any kind of bytes: the client and the record have them all."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = (pair for pair in [[bytearray(b"x-a"), memoryview(b"1")], (b"x-a", b"2")])
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with edge_of(quick, app) as middleware:
            seen: list[list[Any]] = []
            for _ in range(2):
                messages: list[Message] = []
                await post(middleware, on_send=messages.append)
                seen.append(messages[0]["headers"])
            assert seen[0] == [(b"x-a", b"1"), (b"x-a", b"2")]
            assert seen[1] == [*seen[0], (b"idempotent-replayed", b"true")]

    asyncio.run(main())


@pytest.mark.parametrize(
    "changed", [{"headers": [("x-a", "text")]}, {"headers": [7]}, {"status": "many"}]
)
def test_an_answer_that_is_none_has_failed(quick: Opening, changed: dict[str, Any]):
    """What no server could send is an error of the app's: kept as one, not left in flight."""
    runs = 0

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": [], **changed})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with edge_of(quick, app) as middleware:
            with pytest.raises((TypeError, ValueError)):
                await post(middleware)
            assert (await post(middleware)).status == 500
            assert runs == 1

    asyncio.run(main())


class NotThere(Exception):
    """What an SDK raises where its service answered 404."""

    status_code = 404


def test_a_status_of_somebody_elses_is_no_refusal(quick: Opening):
    """A handler that fails after its effect has failed: it is not done again."""

    async def fail(_shop: Shop) -> None:
        raise NotThere

    shop = Shop(more=fail)

    async def main() -> None:
        async with edge_of(quick, shop) as middleware:
            with pytest.raises(NotThere):
                await post(middleware)
            assert (await post(middleware)).status == 500
            assert len(shop.orders) == 1

    asyncio.run(main())


def test_what_is_final_does_not_say_to_come_again():
    """A refusal in mid-answer is kept as a failure, and has no Retry-After to hope for."""
    book = Book()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise CircuitOpen("open", retry_after=3.0)

    with pytest.raises(CircuitOpen):
        run_virtual(RecordedExchange(b"", _nowhere, book, 100, frozenset()).run(app, {}))
    assert book.kept is not None
    assert book.kept.status == 500
    assert b"retry-after" not in dict(book.kept.headers)


# Clients that go away


@given(st.integers(0, 4), st.booleans())
def test_a_client_that_goes_away_changes_nothing(at: int, declared: bool):  # noqa: FBT001 - drawn
    """The app is not told, works to its end, and all of its answer is recorded."""
    book, sent = Book(), 0

    async def to(_message: Message) -> None:
        nonlocal sent
        sent += 1
        if sent > at:
            raise ConnectionResetError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        watching = asyncio.ensure_future(shop(scope, receive, send))
        await let_pass(1.0)
        gone = asyncio.ensure_future(receive())
        await let_pass(1.0)
        assert gone.done() == (book.kept is not None)
        await watching
        assert (await gone)["type"] == "http.disconnect"

    async def slow(_shop: Shop) -> None:
        await let_pass(5.0)

    headers = [(b"content-length", b"3")] if declared else []
    shop = Shop(b"a", b"b", b"c", headers=headers, more=slow)
    run_virtual(RecordedExchange(b"", to, book, 100, frozenset()).run(app, {}))
    assert book.kept == (201, headers, b"abc", True)


def test_what_the_server_raises_is_raised_when_all_is_recorded():
    """An error that is no goodbye of the client's is not lost."""
    book = Book()

    async def to(_message: Message) -> None:
        raise RuntimeError("no server")

    with pytest.raises(RuntimeError, match="no server"):
        run_virtual(RecordedExchange(b"", to, book, 100, frozenset()).run(Shop(), {}))
    assert book.kept is not None


def test_an_app_that_does_not_answer_has_failed():
    """No answer, or half of one, is recorded as a failure: the work had begun."""

    async def nothing(_scope: Any, _receive: Any, _send: Any) -> None:
        pass

    async def half(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    for app, told in ((nothing, 500), (half, 200)):
        book, seen = Book(), []

        async def to(message: Message, seen: list[Message] = seen) -> None:
            seen.append(message)

        exchange = RecordedExchange(b"", to, book, 100, frozenset())
        run_virtual(exchange.run(app, {}))
        assert book.kept is not None
        assert book.kept.status == 500
        assert seen[0]["status"] == told


def test_a_recording_is_bounded_while_it_passes(quick: Opening):
    """What is too large to be kept is not collected in memory either."""
    most = 0

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal most
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x" * 60, "more_body": True})
            most = max(most, len(send.__self__._recording))
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with edge_of(quick, app, idempotency={"max_body": 100}) as middleware:
            assert len((await post(middleware)).body) == 3000
            assert most <= 100

    asyncio.run(main())


# What the app is offered


def test_the_app_is_not_offered_what_would_not_be_seen(quick: Opening):
    """Files sent by the server and trailers cannot be recorded; those outside see no change."""
    offered = {"http.response.pathsend": {}, "http.response.early_hint": {}}
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["extensions"])
        await send({"type": "http.response.early_hint", "links": []})
        await Shop()(scope, receive, send)

    async def main() -> None:
        async with edge_of(quick, app) as middleware:
            answer = await post(middleware, extensions=offered)
            assert answer.status == 201
            assert answer.messages[0]["type"] == "http.response.early_hint"
            assert seen == [{"http.response.early_hint": {}}]
            assert len(offered) == 2

    asyncio.run(main())


def test_what_comes_after_the_answer_is_the_apps_own(quick: Opening):
    """A background task that fails changes no record; a second answer is refused."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError, match="before"):
            await send({"type": "http.response.body", "body": b""})
        await shop(scope, receive, send)
        with pytest.raises(RuntimeError, match="already"):
            await send({"type": "http.response.start", "status": 200})
        with pytest.raises(RuntimeError, match="after"):
            await send({"type": "http.response.body", "body": b""})
        raise RuntimeError("in the background")

    shop = Shop()

    async def main() -> None:
        async with edge_of(quick, app) as middleware:
            with pytest.raises(RuntimeError, match="in the background"):
                await post(middleware)
            assert (await post(middleware)).status == 201
            assert len(shop.orders) == 1

    asyncio.run(main())
