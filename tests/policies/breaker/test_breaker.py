"""What a breaker counts (calls, not attempts), what it says, and what can be done by hand."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    CircuitOpen,
    Fallback,
    Hedge,
    RateLimit,
    Retry,
    ThreadBulkhead,
    Timeout,
    static,
    subscribe,
)
from seawall.events import BreakerChanged
from seawall.policies.breaker import n_of_m, single_probe
from seawall.policies.breaker.gate import BreakerGate
from seawall.testing import ScriptedService, answer, fail, run_virtual, slow, virtual_time
from tests.support import falsified, let_pass, new_guard

ATTEMPTS = 3


class Bad(Exception):
    """What a bad key leads to."""


def _retry(attempts: int = ATTEMPTS) -> Retry:
    return Retry(on=(Bad, TimeoutError), attempts=attempts, backoff=[0.1] * 10)


def _counted(guard: Any) -> tuple[int, int]:
    """Return how many calls the breaker has counted, and how many of them as failed."""
    seen = next(one for one in guard.snapshot()["policies"] if one["policy"] == "breaker")
    return seen["calls"], seen["failures"]


def _lookup(key: int) -> int:
    if key < 0:
        raise Bad
    return key


# Calls, not attempts


def test_one_poisoned_call_does_not_open_the_breaker_for_everybody():
    """Five attempts of one call are one failure, not five in a row."""
    with virtual_time():
        breaker = Breaker(consecutive=5)
        guard = new_guard(_retry(5), breaker)
        guard.attempt(_lookup, -1)
        assert breaker.state == "closed"
        assert guard.snapshot()["policies"][1]["consecutive_failures"] == 1


def test_five_poisoned_calls_in_a_row_do_open_it():
    """What is counted once is still counted: a breaker that counts calls opens by calls."""
    with virtual_time():
        breaker = Breaker(consecutive=5)
        guard = new_guard(_retry(), breaker)
        for _ in range(5):
            guard.attempt(_lookup, -1)
        assert breaker.state == "open"


def test_bad_keys_count_by_their_share_of_the_calls():
    """30 % of bad keys are 30 % failures, though they make 56 % of the attempts."""
    with virtual_time():
        breaker = Breaker(failure_ratio=0.5, window=1000, min_calls=20)
        guard = new_guard(_retry(), breaker)
        served = [guard.attempt(_lookup, -1 if n % 10 < 3 else n).ok for n in range(200)]
        assert _counted(guard) == (200, 60)
    assert sum(served) == 140
    assert breaker.state == "closed"


def test_by_attempts_the_same_bad_keys_open_it():
    """With counts="attempts" each attempt counts, as it did not have to."""
    with virtual_time():
        breaker = Breaker(failure_ratio=0.5, window=1000, min_calls=20, counts="attempts")
        guard = new_guard(_retry(), breaker)
        served = [guard.attempt(_lookup, -1 if n % 10 < 3 else n).ok for n in range(200)]
    assert breaker.state == "open"
    assert sum(served) < 50
    assert "counts='attempts'" in repr(breaker)


def test_a_call_that_succeeds_in_the_end_is_a_success():
    """A failure that a retry made good says nothing against the dependency any more."""
    with virtual_time():
        breaker = Breaker(consecutive=2, failure_ratio=1.0, window=100, min_calls=2)
        guard = new_guard(_retry(), breaker)
        for calls in range(1, 5):
            service = ScriptedService(fail(Bad, times=2), answer("late"))
            assert guard.call(service.call) == "late"
            assert _counted(guard) == (calls, 0)
    assert breaker.state == "closed"


@pytest.mark.parametrize(
    "rules",
    [
        {"failure_ratio": 0.5, "window": 30.0, "min_calls": 20},
        {"failure_ratio": 0.5, "window_calls": 40, "min_calls": 20},
        {"consecutive": 20},
        {"failure_ratio": 0.5, "window": 30.0, "min_calls": 20, "key": lambda: "vendor"},
    ],
)
def test_an_outage_opens_the_breaker_by_first_attempts_not_by_the_ends_of_calls(rules):
    """A call that fails counts at its first attempt: it opens while all of them still pause."""
    breaker = Breaker(**rules)
    retry = Retry(on=Bad, attempts=4, backoff=[0.1] * 3, retry_after=lambda _error: 5.0)

    async def main() -> float:
        guard = new_guard(retry, breaker)
        loop = asyncio.get_running_loop()
        tasks = []
        for _ in range(40):
            tasks.append(loop.create_task(guard.aattempt(_fails)))
            await let_pass(0.025)
            if breaker.state == "open":
                break
        opened = loop.time()
        await asyncio.gather(*tasks)
        return opened

    assert run_virtual(main()) == pytest.approx(0.5)


@pytest.mark.parametrize(("pause", "meanwhile"), [(0.1, (0, 0)), (2.0, (1, 1))])
def test_a_failure_is_withdrawn_when_a_later_attempt_succeeds(pause, meanwhile):
    """A call that pauses for long counts as failed; after its retry it counts as a success."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=9)
        guard = new_guard(Retry(on=Bad, attempts=ATTEMPTS, backoff=[pause] * 4), breaker)
        seen = []
        for attempt in guard.attempts():
            with attempt:
                seen.append(_counted(guard))
                if attempt.number < ATTEMPTS:
                    raise Bad
        assert seen == [(0, 0), meanwhile, meanwhile]
        assert _counted(guard) == (1, 0)


def test_a_call_that_takes_long_counts_as_failed_from_its_first_attempt_on():
    """However short its pauses are: others should not wait for the end of its retries."""
    breaker = Breaker(failure_ratio=1.0, window=100, min_calls=9)

    async def main() -> list[tuple[int, int]]:
        guard = new_guard(Retry(on=Bad, attempts=3, backoff=[0.1] * 2), breaker)
        seen = []

        async def slow() -> None:
            seen.append(_counted(guard))
            await let_pass(0.95)
            raise Bad

        await guard.aattempt(slow)
        return [*seen, _counted(guard)]

    assert run_virtual(main()) == [(0, 0), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("pause", "meanwhile"), [(0.1, (0, 0)), (2.0, (1, 0))])
def test_a_stream_that_begins_after_a_failed_attempt_is_no_failure(pause, meanwhile):
    """A stream may take long: what came before its first item does not count meanwhile."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=9)
        guard = new_guard(Retry(on=Bad, attempts=ATTEMPTS, backoff=[pause] * 4), breaker)
        failures = iter([True, False])

        @guard
        def items() -> Iterator[int]:
            if next(failures):
                raise Bad
            yield 1
            raise Bad

        stream = items()
        assert next(stream) == 1
        assert _counted(guard) == meanwhile
        with pytest.raises(Bad):
            next(stream)
        assert _counted(guard) == (1, 1)


def test_each_attempt_still_asks_the_breaker():
    """A retry stops the moment the breaker is open, whoever opened it."""
    with virtual_time():
        breaker = Breaker(consecutive=1)
        guard = new_guard(_retry(), breaker)
        tried = []

        def work() -> None:
            tried.append(1)
            breaker.isolate()
            raise Bad

        with pytest.raises(Bad) as caught:
            guard.call(work)
    assert len(tried) == 1
    assert "the next was refused" in caught.value.__notes__[0]


def test_a_call_that_is_cancelled_while_it_waits_to_retry_has_failed():
    """Else callers who give up during the pauses would hide an outage from the breaker."""
    breaker = Breaker(consecutive=1)

    async def main() -> None:
        guard = new_guard(Retry(on=Bad, backoff=[60.0] * 3), breaker)
        task = asyncio.ensure_future(guard.acall(_fails))
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert breaker.state == "open"


def test_a_call_that_runs_out_of_time_while_it_waits_to_retry_has_failed():
    """The same, where a total timeout gives up."""
    breaker = Breaker(consecutive=1)

    async def main() -> None:
        guard = new_guard(Timeout(1.0), Retry(on=Bad, backoff=[0.9] * 3), breaker)
        with pytest.raises((TimeoutError, Bad)):
            await guard.acall(_fails)

    run_virtual(main())
    assert breaker.state == "open"


def test_a_retry_that_is_refused_further_in_leaves_the_verdict_of_the_attempt_before_it():
    """A refusal is no verdict, but the attempt that was made is one."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=2)
        guard = new_guard(_retry(), breaker, RateLimit("1/min", burst=1))
        guard.attempt(_lookup, -1)
        assert _counted(guard) == (1, 1)


def test_a_fallback_outside_of_the_retry_answers_after_the_verdict():
    """The verdict is counted when the retry gives up, not when the call has its lesser answer."""
    with virtual_time():
        breaker = Breaker(consecutive=1)
        states = []

        def lesser(_key: int) -> str:
            states.append(breaker.state)
            return "lesser"

        guard = new_guard(Fallback(lesser, static("least")), _retry(), breaker)
        assert guard.call(_lookup, -1) == "lesser"
    assert states == ["open"]


def test_a_call_with_two_retries_around_the_breaker_counts_once():
    """The outermost retry says when the call is over."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3)
        guard = new_guard(_retry(), _retry(), breaker)
        guard.attempt(_lookup, -1)
        assert _counted(guard) == (1, 1)


def test_a_stream_that_was_retried_counts_once():
    """The attempt that gave the first item is the call's verdict, at the end of the stream."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3)
        guard = new_guard(_retry(), breaker)
        failures = iter([True, False])

        @guard
        def items() -> Iterator[int]:
            if next(failures):
                raise Bad
            yield 1
            yield 2

        assert list(items()) == [1, 2]
        assert _counted(guard) == (1, 0)


def test_a_block_that_is_retried_counts_once():
    """`guard.attempts()` makes attempts of one call too."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=9)
        guard = new_guard(_retry(), breaker)
        made = 0
        for attempt in guard.attempts():
            with attempt:
                made += 1
                if made < ATTEMPTS:
                    raise Bad

        def fails() -> None:
            for attempt in guard.attempts():
                with attempt:
                    raise Bad

        with pytest.raises(Bad):
            fails()
        assert _counted(guard) == (2, 1)


def test_keys_count_their_own_calls_once():
    """A keyed breaker counts the calls of each key."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3, key=abs)
        guard = new_guard(_retry(), breaker)
        for key in (-1, -1, 2):
            guard.attempt(_lookup, key)
        keys = guard.snapshot()["policies"][1]["keys"]
    assert {key: (one["calls"], one["failures"]) for key, one in keys.items()} == {
        "1": (2, 2),
        "2": (1, 0),
    }


def test_a_call_is_slow_once():
    """Three attempts that are slow are one slow call, counted while the first still runs."""
    with virtual_time() as clock:
        breaker = Breaker(slow_after=1.0, slow_ratio=1.0, window=1000, min_calls=5)
        guard = new_guard(_retry(), breaker)
        service = ScriptedService(slow(2.0, times=None), clock=clock)

        def work() -> None:
            service.call()
            raise Bad

        guard.attempt(work)
        seen = guard.snapshot()["policies"][1]
    assert (seen["calls"], seen["failures"], seen["slow"]) == (1, 1, 1)
    assert service.calls == ATTEMPTS


def test_hedged_attempts_of_one_call_count_once():
    """Copies and retries of one call, however they end, are one call to the breaker."""
    breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3)

    async def work() -> None:
        await let_pass(1.0)
        raise Bad

    async def main() -> tuple[int, int]:
        guard = new_guard(_retry(), Hedge(0.1), breaker)
        with pytest.raises(Bad):
            await guard.acall(work)
        assert guard.snapshot()["failed"] == 2 * ATTEMPTS
        return _counted(guard)

    assert run_virtual(main()) == (1, 1)


def test_a_hedge_that_won_is_a_success():
    """The copy that failed says nothing: its call was served."""
    breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3)
    ends = iter([True, False])

    async def work() -> str:
        failing = next(ends)
        await let_pass(0.5)
        if failing:
            raise Bad
        return "won"

    async def main() -> tuple[int, int]:
        guard = new_guard(_retry(), Hedge(0.1), breaker)
        assert await guard.acall(work) == "won"
        return _counted(guard)

    assert run_virtual(main()) == (1, 0)


def test_attempts_in_worker_threads_count_once():
    """A driver between the retry and the breaker does not hide that they are one call."""
    breaker = Breaker(failure_ratio=1.0, window=100, min_calls=9)
    guard = new_guard(Retry(on=Bad, backoff=[0.0] * 3), ThreadBulkhead(2), breaker)
    for key in (-1, 1, -1):
        guard.attempt(_lookup, key)
    assert _counted(guard) == (3, 2)


def test_half_open_each_attempt_is_a_probe():
    """A probe's permit is wanted by others: its verdict does not wait for the retries."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0)
        guard = new_guard(_retry(), breaker)
        guard.attempt(_lookup, -1)
        clock.advance(5.0)
        service = ScriptedService(fail(Bad, times=None))
        guard.attempt(service.call)
        assert service.calls == 1
        assert breaker.state == "open"


def test_hold_blocks_count_as_calls():
    """A block is one call: nothing retries it."""
    with virtual_time():
        breaker = Breaker(failure_ratio=1.0, window=100, min_calls=3)
        guard = new_guard(_retry(), breaker)
        with pytest.raises(Bad), guard.hold():
            raise Bad
        assert _counted(guard) == (1, 1)


async def _fails() -> None:
    raise Bad


class Traffic(NamedTuple):
    """Calls of one guard: how each attempt of each call ends, and what stands around."""

    attempts: int
    calls: list[list[str]]
    kind: str


TRAFFIC = st.builds(
    Traffic,
    st.integers(1, 4),
    st.lists(
        st.lists(st.sampled_from(["ok", "bad", "other", "ignored"]), min_size=4, max_size=4),
        max_size=8,
    ),
    st.sampled_from(["sync", "async", "hedged", "overlapping"]),
)


def counts_each_call_once(case: Traffic) -> None:
    """Compare what the breaker has counted with how each call's last verdict was."""
    breaker = Breaker(
        failure_ratio=1.0,
        window=1e6,
        min_calls=10_000,
        is_failure=lambda error, _value: None if isinstance(error, KeyError) else error is not None,
    )
    stack: list[Any] = [Retry(on=(Bad, KeyError), attempts=case.attempts, backoff=[0.1] * 4)]
    stack += [Hedge(50.0)] if case.kind == "hedged" else []
    errors = {"bad": Bad, "other": RuntimeError, "ignored": KeyError}
    verdicts = (_last_verdict(call, case.attempts) for call in case.calls)
    expected = [said for said in verdicts if said is not None]

    def work(script: Iterator[str]) -> str:
        how = next(script)
        if how in errors:
            raise errors[how]
        return how

    async def awork(script: Iterator[str]) -> str:
        await let_pass(0.25)
        calls, failures = _counted(guard)
        assert failures <= calls <= len(case.calls)
        return work(script)

    async def run() -> None:
        overlapping = []
        for call in case.calls:
            if case.kind == "sync":
                guard.attempt(work, iter(call))
            elif case.kind == "overlapping":
                overlapping.append(asyncio.ensure_future(guard.aattempt(awork, iter(call))))
                await let_pass(0.05)
            else:
                await guard.aattempt(awork, iter(call))
        await asyncio.gather(*overlapping)
        assert _counted(guard) == (len(expected), sum(expected))

    guard = new_guard(*stack, breaker)

    run_virtual(run())


def _last_verdict(call: list[str], attempts: int) -> bool | None:
    """Return whether the call failed by its last attempt that says anything; None if none does."""
    said = None
    for how in call[:attempts]:
        if how != "ignored":
            said = how in ("bad", "other")
        if how not in ("bad", "ignored"):
            break
    return said


@given(TRAFFIC)
def test_verdicts_counted_are_calls_that_reached_the_breaker(case: Traffic):
    """Each call that reached it is counted once, by its last attempt that has a verdict."""
    counts_each_call_once(case)


def test_counting_attempts_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The property fails where a failed attempt is counted at once."""
    monkeypatch.setattr(BreakerGate, "attempted", None)
    assert falsified(counts_each_call_once, TRAFFIC)


# No verdict


def _ignores_keys(error: Exception | None, _value: object) -> bool | None:
    return None if isinstance(error, KeyError) else error is not None


@pytest.mark.parametrize("around", [list, lambda: [_retry()]], ids=["alone", "retried"])
def test_none_from_is_failure_is_no_verdict(around: Callable[[], list[Any]]):
    """An ignored exception neither adds a failure nor ends a streak of them."""
    with virtual_time():
        breaker = Breaker(consecutive=2, is_failure=_ignores_keys)
        guard = new_guard(*around(), breaker)
        guard.attempt(_lookup, -1)
        guard.attempt({}.__getitem__, "missing")
        assert guard.snapshot()["policies"][-1]["consecutive_failures"] == 1
        guard.attempt(_lookup, -1)
    assert breaker.state == "open"


def test_a_probe_without_a_verdict_gives_its_permit_back():
    """An ignored exception neither closes nor opens a half-open breaker: the next call probes."""
    with virtual_time() as clock:
        breaker = Breaker(
            consecutive=1, break_for=5.0, is_failure=_ignores_keys, probes=n_of_m(1, 1)
        )
        guard = new_guard(breaker)
        guard.attempt(_lookup, -1)
        clock.advance(5.0)
        for _ in range(3):
            assert isinstance(guard.attempt({}.__getitem__, "missing").error, KeyError)
            assert breaker.state == "half_open"
        guard.call(_lookup, 1)
        assert breaker.state == "closed"


def test_a_value_without_a_verdict_counts_for_nothing():
    """None also ignores what was returned."""
    with virtual_time():
        breaker = Breaker(failure_ratio=0.5, is_failure=lambda _error, value: value)
        guard = new_guard(breaker)
        guard.call(lambda: None)
        assert _counted(guard) == (0, 0)
        guard.call(lambda: False)
        assert _counted(guard) == (1, 0)
    assert not isinstance(guard.attempt(lambda: None).error, CircuitOpen)


# What opened it


def test_a_refusal_says_what_opened_the_breaker():
    """Type and message of the last failure, since when, and when the next probe is due."""
    with virtual_time() as clock:
        guard = new_guard(Breaker(consecutive=2, break_for=15.0))
        guard.attempt(ScriptedService(fail(KeyError("first"))).call)
        guard.attempt(ScriptedService(fail(ConnectionError("db-1 refused"))).call)
        clock.advance(5.0)
        refused = guard.attempt(_lookup, 1).error
        assert isinstance(refused, CircuitOpen)
        assert (refused.failure, refused.open_for) == ("ConnectionError: db-1 refused", 5.0)
        assert refused.retry_after == 10.0
        assert str(refused).endswith(
            "the circuit is open, for another 10.000 s; not closed for 5.000 s;"
            " the last failure: ConnectionError: db-1 refused"
        )
        seen = guard.snapshot()["policies"][0]
        assert (seen["failure"], seen["open_for"]) == ("ConnectionError: db-1 refused", 5.0)


def test_a_probe_that_fails_is_the_last_failure_of_an_outage_that_began_earlier():
    """`open_for` is about the whole outage; the failure is the latest. Closed, both are gone."""
    with virtual_time() as clock:
        guard = new_guard(Breaker(consecutive=1, break_for=5.0, probes=single_probe()))
        guard.attempt(ScriptedService(fail(ConnectionError("refused"))).call)
        clock.advance(5.0)
        guard.attempt(ScriptedService(fail(TimeoutError("late"))).call)
        clock.advance(1.0)
        refused = guard.attempt(_lookup, 1).error
        assert isinstance(refused, CircuitOpen)
        assert (refused.failure, refused.open_for) == ("TimeoutError: late", 6.0)
        clock.advance(5.0)
        assert guard.call(_lookup, 1) == 1
        seen = guard.snapshot()["policies"][0]
        assert (seen["failure"], seen["open_for"]) == (None, None)


def test_the_event_says_what_opened_the_breaker():
    """Whoever subscribes learns the type and message too."""
    heard: list[BreakerChanged] = []
    stop = subscribe(heard.append, BreakerChanged)
    try:
        with virtual_time() as clock:
            guard = new_guard(
                _retry(), Breaker(consecutive=1, break_for=5.0, probes=single_probe())
            )
            guard.attempt(ScriptedService(fail(Bad("poisoned"), times=None)).call)
            clock.advance(5.0)
            guard.call(_lookup, 1)
    finally:
        stop()
    assert [(event.after, event.failure) for event in heard] == [
        ("open", "Bad: poisoned"),
        ("half_open", ""),
        ("closed", ""),
    ]


def test_what_opened_it_is_told_without_secrets_and_short():
    """The message of an error may hold a password, or a page of text."""
    with virtual_time():
        guard = new_guard(Breaker(consecutive=1))
        error = ConnectionError(f"postgres://app:hunter2@db-1/orders {'x' * 500}\nparameters")
        guard.attempt(ScriptedService(fail(error)).call)
        refused = guard.attempt(_lookup, 1).error
    assert isinstance(refused, CircuitOpen)
    assert "hunter2" not in str(refused)
    assert len(refused.failure) <= 200
    assert "\n" not in str(refused)


def test_an_error_that_cannot_say_anything_still_opens_the_breaker():
    """A message that raises is left out."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with virtual_time():
        breaker = Breaker(consecutive=1)
        guard = new_guard(breaker)
        guard.attempt(ScriptedService(fail(Mute())).call)
        refused = guard.attempt(_lookup, 1).error
    assert isinstance(refused, CircuitOpen)
    assert refused.failure == "Mute"


def test_a_value_that_counts_as_a_failure_is_not_quoted():
    """What was returned is data."""
    with virtual_time():
        guard = new_guard(
            Breaker(consecutive=1, is_failure=lambda _error, value: value == "secret")
        )
        guard.call(lambda: "secret")
        refused = guard.attempt(_lookup, 1).error
    assert isinstance(refused, CircuitOpen)
    assert refused.failure == "a value that counts as a failure"


def test_the_failure_that_opened_it_is_not_kept_alive():
    """Only words are kept: no error, no traceback, none of its frames."""

    class Heavy(Exception):
        pass

    def work() -> None:
        raise Heavy

    guard = new_guard(_retry(), Breaker(consecutive=1))
    error = guard.attempt(work).error
    kept = ref(error)
    del error
    gc.collect()
    assert kept() is None


# By hand


def test_trip_opens_as_failures_do():
    """Calls are refused for the break; then a probe decides."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=3, break_for=5.0, probes=single_probe())
        guard = new_guard(breaker)
        breaker.trip()
        refused = guard.attempt(_lookup, 1).error
        assert isinstance(refused, CircuitOpen)
        assert (refused.retry_after, refused.failure) == (5.0, "")
        clock.advance(5.0)
        assert guard.call(_lookup, 1) == 1
        assert breaker.state == "closed"


def test_trip_changes_nothing_of_an_open_or_isolated_breaker():
    """An open one keeps its break, an isolated one stays so until `close()`."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=3, break_for=5.0)
        guard = new_guard(breaker)
        breaker.trip()
        clock.advance(4.0)
        breaker.trip()
        assert guard.snapshot()["policies"][0]["retry_after"] == 1.0
        breaker.isolate()
        breaker.trip()
        assert breaker.state == "isolated"


def test_trip_ends_a_trial():
    """Half-open it opens again, and the probe that is out decides nothing."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0)
        guard = new_guard(breaker)
        guard.attempt(_lookup, -1)
        clock.advance(5.0)
        with guard.hold():
            assert breaker.state == "half_open"
            breaker.trip()
        assert breaker.state == "open"


def test_trip_takes_the_key_of_a_keyed_breaker():
    """As `isolate` and `close` do."""
    with virtual_time():
        breaker = Breaker(consecutive=3, key=abs)
        guard = new_guard(breaker)
        breaker.trip(1)
        assert isinstance(guard.attempt(_lookup, 1).error, CircuitOpen)
        assert guard.call(_lookup, 2) == 2
        with pytest.raises(TypeError, match="keyed"):
            breaker.trip()


def test_close_of_a_closed_breaker_forgets_the_counts():
    """Neither the window nor a streak, nor calls that began before it, count any more."""
    with virtual_time():
        breaker = Breaker(consecutive=2, failure_ratio=0.9, min_calls=3)
        guard = new_guard(breaker)
        guard.attempt(_lookup, -1)
        breaker.close()
        assert _counted(guard) == (0, 0)

        def work() -> None:
            breaker.close()
            raise Bad

        guard.attempt(work)
        guard.attempt(_lookup, -1)
        assert breaker.state == "closed"
        assert _counted(guard) == (1, 1)
