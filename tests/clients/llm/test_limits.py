"""Requests and tokens are limited together, settled once, and lowered by what a vendor says."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import Breaker, Guard, RateLimited, subscribe
from seawall.clients.llm import TokenLimits, Usage
from seawall.clients.llm import limits as module
from seawall.events import ImplausibleReport
from seawall.testing import run_virtual, virtual_time
from tests.support import examples, falsified, let_pass, new_guard

CALLS = st.lists(
    st.tuples(
        st.integers(0, 60),  # letters of the prompt
        st.integers(0, 90),  # the most it may answer
        st.integers(0, 40),  # what went in
        st.integers(0, 120),  # what came out
        st.sampled_from(
            ["ok", "unknown", "unsent", "elsewhere", "refused", "busy", "broken", "raised"]
        ),
    ),
    max_size=12,
)


class StatusError(Exception):
    """An answer that an SDK raises."""

    def __init__(self, status: int) -> None:
        """Be of that status."""
        super().__init__(status)
        self.status_code = status


def ends(how: str, went_in: int, came_out: int, guard: str) -> Any:
    """End a call under that guard in that way."""
    if how == "ok":
        return {"usage": {"input_tokens": went_in, "output_tokens": came_out}}
    if how == "unknown":
        return {"text": "hello"}
    raise {
        "unsent": RateLimited("no", guard=guard),
        "elsewhere": RateLimited("no", guard="another"),
        "refused": StatusError(400),
        "busy": StatusError(429),
        "broken": StatusError(500),
        "raised": httpx2.ReadError("no"),
    }[how]


def left_of(guard: Guard) -> dict[str, int]:
    """Return what is left of each limit."""
    limits = next(p for p in guard.snapshot()["policies"] if p["policy"] == "rate_limit")["limits"]
    return {name: limit["left"] for name, limit in limits.items()}


def settles_exactly(calls: list[tuple[int, int, int, int, str]]) -> None:
    """Check that the charge equals the usage, or the estimate where usage is unknown."""
    with virtual_time():
        limits = TokenLimits(
            requests="1000/min", tokens="90k/min", input_tokens="80k/min", output_tokens="70k/min"
        )
        guard = new_guard(limits)
        spent = [0, 0, 0]
        for letters, most, went_in, came_out, how in calls:
            guard.attempt(
                lambda how, a, b, **_: ends(how, a, b, guard.name),
                how,
                went_in,
                came_out,
                prompt="x" * letters,
                max_tokens=most,
            )
            if how == "ok":
                used = [1, went_in, came_out]
            elif how in ("refused", "busy"):
                used = [1, 0, 0]
            elif how == "unsent":
                used = [0, 0, 0]
            else:
                used = [1, -(-letters // 4), most]
            spent = [a + b for a, b in zip(spent, used, strict=True)]
        assert left_of(guard) == {
            "requests": 1000 - spent[0],
            "tokens": 90_000 - spent[1] - spent[2],
            "input_tokens": 80_000 - spent[1],
            "output_tokens": 70_000 - spent[2],
        }
        guard.close()


@examples(50)
@given(CALLS)
def test_what_is_charged_is_what_was_used(calls: list[tuple[int, int, int, int, str]]) -> None:
    """Whatever becomes of calls, their charges add up to what they used."""
    settles_exactly(calls)


def test_without_settling_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sum is wrong if estimates are never settled."""
    monkeypatch.setattr(module, "_settles", lambda *_: False)
    assert falsified(settles_exactly, CALLS)


def test_without_looking_at_what_was_sent_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sum is wrong if a call that was never sent keeps what it took."""
    monkeypatch.setattr(module, "nothing_sent", lambda *_: False)
    assert falsified(settles_exactly, CALLS)


def test_without_looking_at_whose_refusal_it_is_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sum is wrong if the refusal of another guard is taken for "never sent"."""
    monkeypatch.setattr(module, "nothing_sent", lambda error, _: isinstance(error, RateLimited))
    assert falsified(settles_exactly, CALLS)


def test_a_refusal_names_the_limit_and_opens_no_breaker() -> None:
    """Over the limit of tokens a call is refused before it is sent: no failure of the vendor."""
    with virtual_time() as clock:
        guard = new_guard(Breaker(min_calls=1), TokenLimits(requests="60/min", tokens="600/min"))

        @guard
        def ask(**body: Any) -> dict[str, Any]:
            return {"usage": {"input_tokens": 0, "output_tokens": body["max_tokens"]}}

        ask(prompt="", max_tokens=600)
        with pytest.raises(RateLimited, match="over the limit 'tokens'") as refused:
            ask(prompt="", max_tokens=100)
        assert refused.value.limit == "tokens"
        assert refused.value.retry_after == pytest.approx(10.0)
        assert left_of(guard)["requests"] == 59
        clock.advance(10.0)
        ask(prompt="", max_tokens=100)
        with pytest.raises(RateLimited, match="never fits") as never:
            ask(prompt="", max_tokens=601)
        assert never.value.retry_after is None
        guard.close()


def test_waiting_for_tokens() -> None:
    """With max_wait calls wait for their tokens, in order, and settle what they did not use."""

    async def main() -> None:
        guard = new_guard(TokenLimits(tokens="60/min", max_wait=30.0))
        began = guard.clock.now()
        done: list[tuple[int, float]] = []

        @guard
        async def ask(number: int, **body: Any) -> dict[str, Any]:
            done.append((number, guard.clock.now() - began))
            return {"usage": {"input_tokens": 0, "output_tokens": body["max_tokens"]}}

        await ask(0, prompt="", max_tokens=60)
        await asyncio.gather(*(ask(n, prompt="", max_tokens=10) for n in (1, 2, 3)))
        assert done == [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0)]

    run_virtual(main())


def test_cancelled_while_waiting_and_while_running() -> None:
    """Who is cancelled in the line takes nothing; on the way, the estimate stays."""

    async def main() -> None:
        guard = new_guard(TokenLimits(tokens="60/min", max_wait=30.0))
        on_the_way = asyncio.Event()

        @guard
        async def ask(**_body: Any) -> None:
            on_the_way.set()
            await asyncio.get_running_loop().create_future()

        running = asyncio.create_task(ask(prompt="", max_tokens=60))
        await on_the_way.wait()
        waiting = asyncio.create_task(ask(prompt="", max_tokens=20))
        await let_pass(1.0)
        assert guard.policies[0].waiting == 1  # type: ignore[attr-defined]
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert guard.policies[0].waiting == 0  # type: ignore[attr-defined]
        await let_pass(14.0)
        assert left_of(guard) == {"tokens": 15}

    run_virtual(main())


def test_each_model_has_its_own() -> None:
    """With per_model the limits of one model are not those of another, a vendor's word included."""
    with virtual_time():
        limits = TokenLimits(requests="2/min", tokens="100/min", per_model=True)
        guard = new_guard(limits)

        def ask(model: str) -> bool:
            return guard.attempt(lambda **_: None, prompt="", model=model, max_tokens=1).ok

        assert [ask("a"), ask("a"), ask("a"), ask("b")] == [True, True, False, True]
        told = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "30s"}
        limits.apply_headers(told, 200, prompt="", model="b")
        assert [ask("b"), ask("c")] == [False, True]
        limits.lower(0, 30.0, limit="requests", prompt="", model="c")
        assert [ask("c"), ask("d")] == [False, True]
        guard.close()


def test_by_hand() -> None:
    """A reservation is settled by an answer, once; what the answer does not tell stays."""
    with virtual_time():
        limits = TokenLimits(tokens="1000/min", input_tokens="500/min")
        taken = limits.reserve(prompt="x" * 40, max_tokens=100)
        assert limits.peek(prompt="", max_tokens=0).left == 490
        limits.settle(taken, {"usage": {"input_tokens": 4, "output_tokens": 6}})
        limits.settle(taken, Usage(400, 400))  # does nothing any more
        assert limits.peek(prompt="", max_tokens=0).left == 496
        again = limits.reserve(prompt="x" * 40, max_tokens=100)
        limits.settle(again, Usage(7, None))
        assert limits.peek(prompt="", max_tokens=0).left == 489
        last = limits.reserve(prompt="x" * 40, max_tokens=100)
        last.cancel()
        assert limits.peek(prompt="", max_tokens=0).left == 489


@pytest.mark.parametrize(("options", "left"), [({}, 985), ({"cached": True}, 885)])
def test_tokens_from_a_cache(options: dict[str, bool], left: int) -> None:
    """Cached tokens that are reported apart count only if the limit includes them."""
    with virtual_time():
        limits = TokenLimits(tokens="1000/min", **options)  # type: ignore[arg-type]
        usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 10}
        limits.settle(limits.reserve(prompt="x", max_tokens=500), {"usage": usage})
        assert limits.peek(prompt="", max_tokens=1).left == left


WORDS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 600), st.integers(0, 30)), min_size=1, max_size=5
)
"""What is left of 60, in how many tenths of a second it is full, the pause before."""


def never_over_the_vendors_level(words: list[tuple[int, int, int]]) -> None:
    """Check that no more is taken than a vendor that refills steadily has, by what it said.

    It may have rounded: by one, and a thirty-second part.
    """
    with virtual_time() as clock:
        limits = TokenLimits(requests="240/min")
        guard = new_guard(limits)
        for left, tenths, before in words:
            clock.advance(before)
            lefts = left_of(guard)["requests"]
            limits.apply_headers(
                {
                    "x-ratelimit-limit-requests": "60",
                    "x-ratelimit-remaining-requests": str(left),
                    "x-ratelimit-reset-requests": f"{tenths * 100}ms",
                }
            )
            assert left_of(guard)["requests"] <= min(lefts, left + 1)
            said = clock.now()
            taken = 0
            for _ in range(15):
                while guard.attempt(lambda: None).ok:
                    taken += 1
                passed = clock.now() - said
                grown = (60 - left) * passed / (tenths / 10)
                assert taken <= left + 1 + grown * (1 + module._AHEAD) + 1e-6
                clock.advance(tenths / 10 / 16)
        guard.close()


@settings(max_examples=25)
@given(WORDS)
def test_a_vendors_word_lowers_and_never_raises(words: list[tuple[int, int, int]]) -> None:
    """By what it said, a vendor that refills steadily never has to refuse."""
    never_over_the_vendors_level(words)


def test_with_other_steps_it_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if the budget grows sooner than the vendor's own."""
    monkeypatch.setattr(module, "_STEPS", (0.01, 0.02))
    assert falsified(never_over_the_vendors_level, WORDS)


def longest_pause() -> float:
    """Ask more than a vendor of 10 a second allows, by a limit as wide as its own."""
    with virtual_time() as clock:
        limits = TokenLimits(requests="600/min")
        guard = new_guard(limits)
        level, asked, words = 0.0, [0.0], []
        limits.reserve(cost=600)
        for tick in range(1, 1200):
            clock.advance(1 / 15)
            level = min(600.0, level + 10 / 15)
            if guard.attempt(lambda: None).ok:
                level = max(0.0, level - 1)
                asked.append(tick / 15)
                words.append((tick + 8 + tick % 20, int(level), (600 - level) / 10))
            for due, left, reset in words:  # answers come when they come
                if due == tick:
                    limits.apply_headers(
                        {
                            "x-ratelimit-limit-requests": "600",
                            "x-ratelimit-remaining-requests": str(left),
                            "x-ratelimit-reset-requests": f"{reset:.3f}s",
                        }
                    )
        guard.close()
        return max(after - before for before, after in pairwise(asked))


def test_no_pauses_where_the_limit_is_the_vendors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used to the full, a limit that is as wide as the vendor's flows; not if all is said."""
    assert longest_pause() < 0.5
    monkeypatch.setattr(module, "_AHEAD", float("-inf"))
    assert longest_pause() > 5.0


def test_a_vendor_that_refills_at_once() -> None:
    """If configured so, or if the limit is unknown, the vendor's report holds to the end."""
    told = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m0s"}
    for refill, more in (("at_once", {"x-ratelimit-limit-tokens": "100"}), ("steady", {})):
        with virtual_time() as clock:
            limits = TokenLimits(tokens="100/min", refill=refill)  # type: ignore[arg-type]
            limits.apply_headers({**told, **more})
            clock.advance(59.0)
            assert limits.peek(prompt="x", max_tokens=1).left == 0
            clock.advance(1.0)
            assert limits.peek(prompt="x", max_tokens=1).left == 100


def test_all_wait_after_a_429() -> None:
    """A 429 with a pause delays all calls, up to a maximum; no other answer does."""
    with virtual_time() as clock:
        limits = TokenLimits(tokens="100/min", max_pushback=20.0)
        limits.apply_headers({"retry-after": "3600"}, 503)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == 0
        limits.apply_headers([(b"Retry-After", b"3600")], 429)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == pytest.approx(20.0)
        clock.advance(20.0)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == 0
        limits = TokenLimits(tokens="100/min", max_pushback=1e9)  # as long as the vendor likes
        limits.apply_headers([(b"Retry-After", b"3600")], 429)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == pytest.approx(3600.0)


NUMBERS = st.sampled_from(
    ["0", "1", "-1", "999999999999", "9" * 15, "9" * 400, "1e12", "nan", "inf", "-inf", "0x10", ""]
)
RESETS = NUMBERS | st.sampled_from(
    ["364d", "8759h", "-5s", "999999999s", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z",
     "2026-03-01T13:00:07Z", "2027-02-01T00:00:00Z", "2026-02-01T00:00:00+23:59"]
)  # fmt: skip
"""Resets that no vendor can mean, or of one whose clock (or ours) is an hour or a year off."""
PAUSES = NUMBERS | st.sampled_from(
    ["Fri, 31 Dec 9999 23:59:59 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
)
WRONG = st.tuples(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *(f"x-ratelimit-{what}-{{}}" for what in ("limit", "remaining")),
                    *(f"anthropic-ratelimit-{{}}-{what}" for what in ("limit", "remaining")),
                ]
            ),
            NUMBERS,
        )
        | st.tuples(
            st.sampled_from(["x-ratelimit-reset-{}", "anthropic-ratelimit-{}-reset"]), RESETS
        )
        | st.tuples(st.sampled_from(["retry-after", "retry-after-ms"]), PAUSES),
        max_size=8,
    ),
    st.sampled_from([200, 429, 529]),
    st.sampled_from(["steady", "at_once"]),
    st.sampled_from([5.0, 60.0]),
)


def blocks_for_a_period_at_most(
    case: tuple[list[tuple[str, str]], int, Any, float],
) -> None:
    """Check that calls are admitted one period, or one longest pushback, after a wrong word."""
    said, status, refill, max_pushback = case
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    with virtual_time() as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wall_time", lambda: noon + clock.now())
        limits = TokenLimits(
            requests="6/30s", tokens="600/30s", refill=refill, max_pushback=max_pushback
        )
        for kind in ("requests", "tokens"):
            limits.apply_headers([(name.format(kind), value) for name, value in said], status)
        longest = max(30.0, max_pushback)
        assert limits.peek(prompt="x", max_tokens=1).retry_after <= longest
        clock.advance(longest)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == 0


@given(WRONG)
def test_no_word_of_a_vendor_blocks_longer_than_a_period(
    case: tuple[list[tuple[str, str]], int, Any, float],
) -> None:
    """Resets in the far future, numbers beyond measure and a clock that is wrong are bounded."""
    blocks_for_a_period_at_most(case)


@pytest.mark.parametrize("refill", ["steady", "at_once"])
@pytest.mark.parametrize("reset", ["364d", "2026-03-01T13:00:07Z", "30000000"])
@pytest.mark.parametrize("whole", [{}, {"x-ratelimit-limit-requests": "6"}], ids=["left", "limit"])
def test_a_reset_in_a_year_holds_for_one_period(whole: Any, reset: str, refill: Any) -> None:
    """With nothing left until far away, the limit is asked again after one period of its own."""
    said = [
        *whole.items(),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", reset),
    ]
    blocks_for_a_period_at_most((said, 200, refill, 0.0))


@pytest.mark.parametrize("used", [2**40, 2**41, -5, 10**30, float("nan"), True])
def test_no_usage_that_a_vendor_tells_blocks_longer_than_a_period(used: Any) -> None:
    """A count beyond measure costs one period at most; what is no count is not believed."""
    with virtual_time() as clock:
        limits = TokenLimits(tokens="600/30s")
        for _ in range(3):
            taken = limits.reserve(prompt="x" * 40, max_tokens=10)
            limits.settle(taken, {"usage": {"input_tokens": used, "output_tokens": used}})
            assert limits.peek(prompt="x", max_tokens=1).retry_after <= 30.1
            clock.advance(31.0)


def test_an_absurd_usage_closes_the_limits_for_one_period() -> None:
    """A reported usage of a trillion tokens is not believed, and emits an event."""
    heard: list[ImplausibleReport] = []
    stop = subscribe(heard.append, ImplausibleReport)
    with virtual_time() as clock:
        limits = TokenLimits(tokens="6000/min", requests="60/min")
        taken = limits.reserve(prompt="x", max_tokens=100)
        limits.settle(taken, {"usage": {"input_tokens": 10, "output_tokens": 10**12}})
        assert limits.peek(prompt="x", max_tokens=1).left == 0
        clock.advance(60.0 + 1.0)
        assert limits.peek(prompt="x", max_tokens=1).retry_after == 0
    stop()
    assert [(one.limit, one.reported) for one in heard] == [("tokens", 10**12 + 10)]


def test_words_that_say_nothing_new_are_not_kept() -> None:
    """A vendor with more left than the limit could give leaves no trace."""
    with virtual_time():
        limits = TokenLimits(requests="60/min")
        limits.apply_headers(
            {
                "x-ratelimit-limit-requests": "600",
                "x-ratelimit-remaining-requests": "599",
                "x-ratelimit-reset-requests": "100ms",
            }
        )
        assert not limits._meters.all[0].caps


def test_settings() -> None:
    """Rates can change at run time; what makes no sense is refused with advice."""
    limits = TokenLimits(requests="60/min", tokens="200k/min")
    assert repr(limits) == "TokenLimits(requests='60/min', tokens='200k/min', max_wait=0)"
    limits.update(tokens="100k/min", max_wait=2.0)
    assert repr(limits) == "TokenLimits(requests='60/min', tokens='100k/min', max_wait=2)"
    with pytest.raises(ValueError, match="there is no such limit"):
        limits.update(input_tokens="1/s")
    with pytest.raises(TypeError, match="it takes requests"):
        limits.update(burst=3)
    with pytest.raises(TypeError, match="give it a rate"):
        TokenLimits()
    with pytest.raises(TypeError, match="pass a function"):
        TokenLimits(tokens="1/s", count=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write one of 'steady', 'at_once'"):
        TokenLimits(tokens="1/s", refill="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write 0 or more"):
        TokenLimits(tokens="1/s", output=-1)
