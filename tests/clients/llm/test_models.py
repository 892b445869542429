"""Other models and vendors stand in for one that cannot answer, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    DeadlineExceeded,
    Guard,
    RateLimit,
    RateLimited,
    Retry,
    Timeout,
    deadline,
    subscribe,
    transient,
)
from seawall.clients.llm import (
    Model,
    Models,
    TokenLimits,
    async_http_client,
    http_client,
    should_fall_back,
)
from seawall.clients.llm import models as module
from seawall.events import CallDegraded
from seawall.testing import run_virtual, virtual_time
from tests.clients.llm.support import Vendor, breaks, refuses, streams_error
from tests.support import falsified, let_pass, new_guard


class StatusError(Exception):
    """An answer that an SDK raises."""

    def __init__(self, status: int) -> None:
        """Be of that status."""
        super().__init__(status)
        self.status_code = status


def answers(what: object) -> Any:
    """Return a function that answers, or raises what is an error."""

    def ask(*_args: Any) -> object:
        if isinstance(what, Exception):
            raise what
        return what

    return ask


def models_of(*whats: object) -> Models:
    """Return models that end so."""
    return Models(*(Model(f"model {n}", answers(what)) for n, what in enumerate(whats)))


PASSING = [
    RateLimited("no"),
    TimeoutError(),
    ConnectionError(),
    httpx2.ReadError("no"),
    *map(StatusError, (408, 429, 500, 503, 529)),
]
LASTING = [ValueError("no"), DeadlineExceeded("no"), *map(StatusError, (400, 401, 404, 409, 422))]
WHATS = st.lists(st.sampled_from([*PASSING, *LASTING, "an answer"]), min_size=1, max_size=4)


def only_where_it_helps(whats: list[object]) -> None:
    """Check which model serves, and which error is raised."""
    models = models_of(*whats)
    result = models.attempt("hello")
    for level, what in enumerate(whats):
        if not isinstance(what, Exception):
            assert (result.value, result.level, result.error) == (what, level, None)
            assert models.snapshot()["served"][models.names[level]] == 1
            assert result.attempts == level + 1
            return
        if any(what is lasting for lasting in LASTING):
            expected = whats[0] if isinstance(what, DeadlineExceeded) else what
            assert result.error is expected
            assert result.attempts == level + 1
            return
    assert result.error is whats[0]
    assert models.snapshot()["failed"] == 1


@given(WHATS)
def test_the_next_is_asked_where_that_may_help(whats: list[object]) -> None:
    """The first that answers serves; a request that is bad is bad everywhere."""
    only_where_it_helps(whats)


def test_without_telling_errors_apart_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if every error is taken for a passing one."""
    monkeypatch.setattr(Models.__init__, "__kwdefaults__", {"name": "x", "fall_back_on": Exception})
    assert falsified(only_where_it_helps, WHATS)


def test_what_an_sdk_makes_of_it() -> None:
    """An SDK wraps what stopped a call; the reason is looked at."""
    request = httpx2.Request("POST", "http://v")

    def wrapped(cause: Exception) -> Exception:
        error = openai.APIConnectionError(request=request)
        error.__cause__ = cause
        return error

    assert should_fall_back(wrapped(RateLimited("no")))
    assert should_fall_back(wrapped(httpx2.ConnectError("no")))
    assert not should_fall_back(wrapped(DeadlineExceeded("no")))
    inner: Exception = ValueError("deep")
    for _ in range(20):
        outer = ValueError("no")
        outer.__cause__ = inner
        inner = outer
    assert not should_fall_back(inner)


def test_who_served_is_told() -> None:
    """The result names the level that served, an event reports it, the snapshot counts it."""
    models = Models(
        Model("large", answers(StatusError(529))), Model("small", answers("hi")), name="c"
    )
    seen: list[CallDegraded] = []
    stop = subscribe(seen.append, CallDegraded)
    try:
        result = models.attempt("?")
    finally:
        stop()
    assert (models.names[result.level], result.reason) == ("small", "StatusError")
    assert [(e.guard, e.level, e.reason) for e in seen] == [("c", 1, "StatusError")]
    assert models.snapshot() == {"name": "c", "served": {"large": 0, "small": 1}, "failed": 0}
    assert repr(models) == "Models(large, small)"


def test_all_fail() -> None:
    """The error of the preferred model is raised, and mentions the last one."""
    first = StatusError(529)
    with pytest.raises(StatusError) as raised:
        models_of(first, ConnectionError("down")).call("?")
    assert raised.value is first
    assert "the other models failed too: ConnectionError('down')" in raised.value.__notes__[0]


def test_a_model_that_does_not_admit_is_passed_by() -> None:
    """With an open breaker, or its limit used up, a model is not asked at all."""
    with virtual_time() as clock:
        asked: list[str] = []
        large = new_guard(RateLimit("1/min"))
        broken = new_guard(Breaker(min_calls=1, break_for=60.0))

        def ask_large(_prompt: str) -> str:
            asked.append("large")
            return "large"

        def ask_broken(_prompt: str) -> str:
            asked.append("broken")
            raise ConnectionError

        models = Models(
            Model("large", ask_large, guard=large),
            Model("broken", ask_broken, guard=broken),
            Model("small", answers("small")),
        )
        assert [models.attempt("?").level for _ in range(3)] == [0, 2, 2]
        assert asked == ["large", "broken"]
        clock.advance(60.0)
        assert models.call("?") == "large"
        large.close()
        broken.close()


def test_never_after_the_deadline() -> None:
    """After the deadline no other model is asked."""

    async def main() -> None:
        asked: list[int] = []

        def hangs(number: int) -> Any:
            async def hang() -> None:
                asked.append(number)
                await asyncio.get_running_loop().create_future()

            return hang

        guards = [new_guard(Timeout(2.0)), new_guard(Timeout(5.0)), new_guard(Timeout(5.0))]
        models = Models(*(Model(str(n), hangs(n), guard=g) for n, g in enumerate(guards)))
        with deadline(4.0), pytest.raises(TimeoutError):
            await models.acall()
        assert asked == [0, 1]
        assert guards[0].clock.now() == pytest.approx(4.0)

    run_virtual(main())


def test_streams_change_over_before_the_first_item_only() -> None:
    """A model that fails before its first item is replaced; after it, its error is raised."""
    closed: list[str] = []

    def broken(items: int) -> Any:
        def ask() -> Iterator[int]:
            try:
                yield from range(items)
                raise ConnectionError("broken off")
            finally:
                closed.append("sync")

        async def aask() -> AsyncIterator[int]:
            try:
                for item in range(items):
                    yield item
                raise ConnectionError("broken off")
            finally:
                closed.append("async")

        return ask, aask

    def whole() -> Iterator[str]:
        yield from "ab"

    async def awhole() -> AsyncIterator[str]:
        for letter in "ab":
            yield letter

    async def collect(models: Models) -> list[Any]:
        return [item async for item in models.astream()]

    async def main() -> None:
        assert await collect(Models(Model("1", broken(0)[1]), Model("2", awhole))) == ["a", "b"]
        later = Models(Model("1", broken(2)[1]), Model("2", awhole))
        items = later.astream()
        assert [await anext(items), await anext(items)] == [0, 1]
        with pytest.raises(ConnectionError):
            await anext(items)
        early = Models(Model("1", broken(2)[1]), Model("2", awhole)).astream()
        await anext(early)
        await early.aclose()  # type: ignore[attr-defined]

    assert list(Models(Model("1", broken(0)[0]), Model("2", whole)).stream()) == ["a", "b"]
    with pytest.raises(ConnectionError, match="broken off"):
        list(Models(Model("1", broken(2)[0]), Model("2", whole)).stream())
    with pytest.raises(ConnectionError):
        list(Models(Model("1", broken(0)[0])).stream())
    assert list(Models(Model("1", lambda: (item for item in ()))).stream()) == []
    run_virtual(main())
    assert closed == ["sync"] * 3 + ["async"] * 3


STREAMS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
"""After so many items each model breaks off."""


def begun_once(counts: list[int]) -> None:
    """Check that all items are those of the first model that gave one."""

    def breaks_after(level: int, items: int) -> Any:
        def ask() -> Iterator[tuple[int, int]]:
            for item in range(items):
                yield level, item
            raise ConnectionError

        return ask

    models = Models(*(Model(str(n), breaks_after(n, c)) for n, c in enumerate(counts)))
    seen: list[Any] = []
    with pytest.raises(ConnectionError):
        seen.extend(models.stream())  # what comes before it breaks off is there
    serving = next((n for n, items in enumerate(counts) if items), 0)
    assert seen == [(serving, item) for item in range(counts[serving])]


@given(STREAMS)
def test_a_stream_is_never_begun_twice(counts: list[int]) -> None:
    """After its first item a stream is not begun again by another model."""
    begun_once(counts)


def test_without_looking_at_items_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if another model may take over at any time."""

    def stream(self: Models) -> Iterator[Any]:
        calls = module._ModelCalls(self)
        for ask in calls:
            with calls:
                yield from ask()
        calls.result().unwrap()

    monkeypatch.setattr(Models, "stream", stream)
    assert falsified(begun_once, STREAMS)


HELLO: Any = [{"role": "user", "content": "hello"}]


def askers(first: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> tuple[Models, Models]:
    """Return the two vendors as models, whole and streamed."""

    async def ask_first() -> str:
        answer = await first.chat.completions.create(model="m", messages=HELLO)
        return answer.choices[0].message.content or ""

    async def ask_other() -> str:
        answer = await other.messages.create(model="m", messages=HELLO, max_tokens=9)
        return answer.content[0].text  # type: ignore[union-attr]

    async def stream_first() -> AsyncIterator[str]:
        stream = await first.chat.completions.create(model="m", messages=HELLO, stream=True)
        async with stream:
            async for item in stream:
                yield item.choices[0].delta.content or ""

    async def stream_other() -> AsyncIterator[str]:
        async with other.messages.stream(model="m", messages=HELLO, max_tokens=9) as stream:
            async for text in stream.text_stream:
                yield text

    return (
        Models(Model("first", ask_first), Model("other", ask_other)),
        Models(Model("first", stream_first), Model("other", stream_other)),
    )


@pytest.mark.parametrize("kind", ["whole", "streamed"])
def test_another_vendor_takes_over(kind: str) -> None:
    """While one vendor is out, by its own SDK, the other one serves; then the first again."""

    async def main() -> None:
        out = [refuses(529), breaks(httpx2.ConnectError), refuses(429, retry_after="2")]
        one, two = Vendor(*out * 2), Vendor()
        if kind == "streamed":
            one.steps.append(streams_error("overloaded_error"))
        guards = [
            new_guard(
                Retry(on=transient, attempts=2),
                Breaker(min_calls=3, window=30.0, break_for=10.0),
                TokenLimits(requests="100/s", tokens="1M/min"),
            )
            for _ in range(2)
        ]
        keys: dict[str, Any] = {"max_retries": 0, "api_key": "k"}
        async with (
            async_http_client(guards[0], one.transport()) as http,
            async_http_client(guards[1], two.transport()) as other,
        ):
            whole, streamed = askers(
                openai.AsyncOpenAI(http_client=http, base_url="http://v/v1", **keys),
                anthropic.AsyncAnthropic(http_client=other, base_url="http://v", **keys),
            )
            models = streamed if kind == "streamed" else whole
            for _ in range(30):
                if kind == "streamed":
                    text = "".join([item async for item in models.astream()])
                else:
                    text = await models.acall()
                assert text == "one two three"
                await let_pass(4.0)
        served = models.snapshot()["served"]
        assert served["other"] >= 4
        assert served["first"] >= 10
        assert (one.opened, two.opened) == (one.closed, two.closed)

    run_virtual(main())


def sdks(library: Any, kind: str, *vendors: Vendor) -> list[Any]:
    """Return functions that return what an SDK returns for a stream, of each vendor."""
    guards = [new_guard(TokenLimits(tokens="1M/min")) for _ in vendors]
    made = []
    for guard, vendor in zip(guards, vendors, strict=True):
        keys = {"max_retries": 0, "api_key": "k", "base_url": "http://v/v1"}
        make_http = http_client if kind == "sync" else async_http_client
        name = {"openai": "OpenAI", "anthropic": "Anthropic"}[library.__name__]
        make = getattr(library, name if kind == "sync" else f"Async{name}")
        sdk = make(http_client=make_http(guard, vendor.transport()), **keys)
        create = sdk.chat.completions.create if library is openai else sdk.messages.create
        made.append(partial(create, model="m", messages=HELLO, max_tokens=9, stream=True))
    return made


@pytest.mark.parametrize("library", [openai, anthropic])
def test_the_sdks_own_streams(library: Any) -> None:
    """What an SDK returns for a stream is one, sync or async, and is closed by who stops early."""

    async def main() -> None:
        bad, good = Vendor(refuses(529)), Vendor()
        asks = sdks(library, "async", bad, good)
        models = Models(*(Model(str(n), ask) for n, ask in enumerate(asks)))
        whole = [item async for item in models.astream()]
        early = models.astream()
        assert type(await anext(early)) is type(whole[0])
        await early.aclose()  # type: ignore[attr-defined]
        assert models.snapshot()["served"] == {"0": 1, "1": 1}
        assert (bad.opened, good.opened) == (bad.closed, good.closed)

    run_virtual(main())
    with virtual_time():
        bad, good = Vendor(refuses(529)), Vendor()
        asks = sdks(library, "sync", bad, good)
        models = Models(*(Model(str(n), ask) for n, ask in enumerate(asks)))
        assert len(list(models.stream())) >= 3
        early = models.stream()
        next(early)
        early.close()  # type: ignore[attr-defined]
        assert models.snapshot()["served"] == {"0": 1, "1": 1}
        assert (bad.opened, good.opened) == (bad.closed, good.closed)


def test_async_models_are_asked_by_async_methods() -> None:
    """Asked as plain ones they raise, with advice; nothing is left that was never awaited."""

    async def ask() -> str:
        return "hello"

    models = Models(Model("x", ask))
    with pytest.raises(TypeError, match=r"write models\.acall"):
        models.call()
    with pytest.raises(TypeError, match=r"write models\.astream"):
        list(models.stream())


def test_arguments() -> None:
    """What makes no sense is refused with advice."""
    for wrong, advice in (
        (Models, "give it a Model"),
        (lambda: Models(print), "is no Model"),  # type: ignore[arg-type]
        (lambda: Model("", print), "the first argument is a name"),
        (lambda: Model("x", 3), "pass a function"),  # type: ignore[arg-type]
        (lambda: Model("x", print, guard=3), "pass a Guard"),  # type: ignore[arg-type]
        (lambda: Models(Model("x", print), name=""), "write text"),
    ):
        with pytest.raises(TypeError, match=advice):
            wrong()
    with pytest.raises(ValueError, match="the same name"):
        Models(Model("x", print), Model("x", print))
    guard = Guard("named", Timeout(1.0, sync="cooperative"))
    assert repr(Model("x", print, guard=guard)) == "Model('x', guard='named')"
    assert module.should_fall_back is should_fall_back
