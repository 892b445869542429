"""Throttle: what counts as refused, who is rejected, and what changes at run time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Criticality,
    Fallback,
    Guard,
    Overloaded,
    RateLimited,
    Throttle,
    TimedOut,
    Timeout,
    criticality,
    static,
    subscribe,
)
from seawall.events import CallRejected
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow, virtual_time
from tests.support import let_pass, new_guard


class Always:
    """Draws the same number each time."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.draws = 0

    def random(self) -> float:
        self.draws += 1
        return self.number


def shown(guard: Guard) -> dict[str, float]:
    return guard.snapshot()["policies"][0]


def counts(guard: Guard) -> tuple[float, float]:
    return shown(guard)["requests"], shown(guard)["accepts"]


def refuse(guard: Guard, times: int, error: type[Exception] = ConnectionError) -> None:
    service = ScriptedService(fail(error))
    for _ in range(times):
        guard.attempt(service.call)


# Who is rejected


def test_nothing_is_drawn_while_all_is_accepted():
    """A server that takes everything costs no chance and no rejection."""
    chance = Always(0.0)
    with virtual_time() as clock:
        guard = new_guard(Throttle(), rng=chance)
        for _ in range(1000):
            guard.call(int)
            clock.advance(1.0)
    assert chance.draws == 0
    assert shown(guard)["rejected"] == 0


def test_a_call_is_rejected_at_the_formula_s_probability():
    """A draw just below the share is rejected, one at the share is sent."""
    with virtual_time():
        chance = Always(1.0)
        guard = new_guard(Throttle(probe_every=None), rng=chance)
        for _ in range(4):
            guard.call(int)
        refuse(guard, 12)
        assert counts(guard) == (16, 4)
        assert shown(guard)["reject_share"] == pytest.approx((16 - 2 * 4) / 17)
        chance.number = 8 / 17
        guard.call(int)
        assert counts(guard) == (17, 5)
        chance.number = (17 - 10) / 18 - 1e-9
        with pytest.raises(Overloaded) as caught:
            guard.call(int)
    error = caught.value
    assert (error.guard, error.policy, error.retry_after) == (guard.name, "throttle", None)
    assert "of the last 17 calls the server took 5" in str(error)
    assert counts(guard) == (18, 5)  # what is rejected here is a request too


def test_a_rejected_call_is_never_made():
    """Neither the function nor a policy further in sees it, and a fallback can answer."""
    with virtual_time():
        guard = new_guard(Fallback(static("later")), Throttle(probe_every=None), rng=Always(0.0))
        refuse(guard, 3)
        service = ScriptedService(answer("now"))
        result = guard.attempt(service.call)
        assert (result.value, result.reason, service.calls) == ("later", "overloaded", 0)


def test_a_slow_server_is_no_refusing_one():
    """Many calls under way at once are not taken for refused ones."""

    async def main() -> None:
        guard = new_guard(Throttle(), rng=Always(0.0))
        service = ScriptedService(slow(5.0))
        await asyncio.gather(*(guard.acall(service.acall) for _ in range(100)))
        assert service.peak == 100

    run_virtual(main())


def test_one_call_goes_through_in_each_interval():
    """Also where every draw says no, so that a recovery is noticed."""
    with virtual_time() as clock:
        guard = new_guard(Throttle(probe_every=10.0), rng=Always(0.0))
        refuse(guard, 5)
        service = ScriptedService(fail(ConnectionError))
        for _ in range(100):
            guard.attempt(service.call)
            clock.advance(1.0)
        assert service.calls == 9  # at 10, 20, ... 90 s


def test_a_probe_that_is_refused_further_in_was_none():
    """The server has not seen it, so the next call is the probe."""
    with virtual_time() as clock:
        circuit = Breaker(consecutive=10**6)
        guard = new_guard(Throttle(window=1000.0, probe_every=10.0), circuit, rng=Always(0.0))
        refuse(guard, 5)
        clock.advance(10.0)
        circuit.isolate()
        assert guard.attempt(int).reason == "circuit_open"
        circuit.close()
        clock.advance(1.0)
        assert guard.attempt(int).ok
        assert guard.attempt(int).reason == "overloaded"


def test_it_forgets_after_the_window():
    """What is older than the window is not held against the server."""
    with virtual_time() as clock:
        guard = new_guard(Throttle(window=20.0), rng=Always(0.0))
        refuse(guard, 10)
        with pytest.raises(Overloaded):
            guard.call(int)
        clock.advance(20.0)
        assert guard.call(int) == 0
        assert shown(guard)["reject_share"] == 0.0


# What counts as refused


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError, ConnectionResetError, TimeoutError, TimedOut, RateLimited]
)
def test_signs_of_overload_count_as_refused(error):
    """Connections refused or lost, time run out, and refusals by another guard."""
    with virtual_time():
        guard = new_guard(Throttle())
        refuse(guard, 1, error)
        assert counts(guard) == (1, 0)


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, PermissionError])
def test_other_errors_count_as_accepted(error):
    """A server that answers with an error has taken the request."""
    with virtual_time():
        guard = new_guard(Throttle())
        refuse(guard, 1, error)
        assert counts(guard) == (1, 1)


def test_the_caller_may_say_what_a_refusal_is():
    """By types, by a predicate over error and value, or both."""

    def busy(error: Exception | None, value: object) -> bool:
        return value == 503 or (error is not None and "busy" in str(error))

    with virtual_time():
        guard = new_guard(Throttle(on=(KeyError, busy)), rng=Always(1.0))
        guard.call(lambda: 200)
        guard.call(lambda: 503)
        refuse(guard, 1, KeyError)
        refuse(guard, 1, lambda: ValueError("busy"))
        refuse(guard, 1, ConnectionError)
        assert counts(guard) == (5, 2)


def test_a_predicate_that_fails_counts_as_refused(caplog):
    """It is logged, and the call itself does not suffer."""

    def broken(_error: Exception | None, _value: object) -> bool:
        raise ZeroDivisionError

    with virtual_time(), caplog.at_level(logging.ERROR, "seawall"):
        guard = new_guard(Throttle(on=broken))
        assert guard.call(int) == 0
        assert counts(guard) == (1, 0)
    assert "the call counts as refused" in caplog.text


def test_groups_count_if_all_their_leaves_do():
    """Some leaf that is no refusal means that the server took it."""
    with virtual_time():
        guard = new_guard(Throttle(), rng=Always(1.0))
        refuse(guard, 1, lambda: ExceptionGroup("all", [TimeoutError(), ConnectionError()]))
        refuse(guard, 1, lambda: ExceptionGroup("some", [TimeoutError(), ValueError()]))
        assert counts(guard) == (2, 1)


@pytest.mark.parametrize("outside", [False, True])
def test_running_out_of_time_counts_as_refused(outside):
    """Whether the timeout stands inside the throttle or around it."""

    async def main() -> None:
        throttle = Throttle()
        stack = (Timeout(1.0), throttle) if outside else (throttle, Timeout(1.0))
        guard = new_guard(*stack)
        with pytest.raises(TimedOut):
            await guard.acall(ScriptedService(hang()).acall)
        assert throttle._model.recent(1.0) == (1, 0)

    run_virtual(main())


def test_cancelled_and_unused_calls_are_given_back():
    """A cancelled call is no verdict, and one refused further in was never sent."""

    async def main() -> None:
        bulkhead = Bulkhead(1)
        guard = new_guard(Throttle(), bulkhead)
        task = asyncio.get_running_loop().create_task(guard.acall(ScriptedService(hang()).acall))
        await let_pass(1.0)
        assert counts(guard) == (1, 1)
        with pytest.raises(BulkheadFull):
            await guard.acall(ScriptedService(answer()).acall)
        assert counts(guard) == (1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counts(guard) == (0, 0)

    run_virtual(main())


def test_generators_and_blocks_count_once():
    """A stream that fails later counts where it began; one that is closed early was accepted."""
    with virtual_time():
        guard = new_guard(Throttle(on=[ConnectionError, lambda _e, v: v is not None]))

        @guard
        def numbers(stop: int):
            for number in range(3):
                if number == stop:
                    raise ConnectionError
                yield number

        assert next(numbers(5)) == 0
        with pytest.raises(ConnectionError):
            list(numbers(2))
        with guard.hold():
            pass
        assert counts(guard) == (3, 2)


# Classes of calls, modes, settings


def test_what_matters_more_is_rejected_less():
    """A class with a higher k is sent where others are not."""
    with virtual_time():
        k = {Criticality.CRITICAL_PLUS: 4.0, Criticality.SHEDDABLE: 1.0}
        guard = new_guard(Throttle(k=k, probe_every=None), rng=Always(0.0))
        for _ in range(4):
            guard.call(int)
        with criticality(Criticality.CRITICAL_PLUS):
            refuse(guard, 3)
        sent = {}
        for level in Criticality:
            with criticality(level):
                sent[level.name] = guard.attempt(int).error is None
    # 7 requests, 4 accepted: with k = 2 enough, with k = 1 not.
    assert sent == {
        "SHEDDABLE": False,
        "SHEDDABLE_PLUS": True,
        "CRITICAL": True,
        "CRITICAL_PLUS": True,
    }


def test_in_shadow_it_only_tells():
    """Calls it would have rejected are made, and count by how they end."""
    heard = []
    end = subscribe(heard.append, CallRejected)
    try:
        with virtual_time():
            guard = new_guard(Throttle(mode="shadow", probe_every=None), rng=Always(0.0))
            refuse(guard, 4)
            assert guard.call(int) == 0
    finally:
        end()
    assert counts(guard) == (5, 1)
    assert (shown(guard)["rejected"], shown(guard)["would_reject"]) == (0, 4)
    assert {(event.policy, event.reason, event.enforced) for event in heard} == {
        ("throttle", "overloaded", False)
    }


def test_switched_off_it_counts_and_draws_nothing():
    """So that it knows how things stand when it is switched on."""
    chance = Always(0.0)
    with virtual_time():
        throttle = Throttle(mode="off", probe_every=None)
        guard = new_guard(throttle, rng=chance)
        refuse(guard, 4)
        assert chance.draws == 0
        throttle.update(mode="enforce")
        with pytest.raises(Overloaded):
            guard.call(int)


def test_settings_change_at_run_time():
    """What was counted is kept, unless the window itself changes."""
    with virtual_time():
        throttle = Throttle(probe_every=None)
        guard = new_guard(throttle, rng=Always(0.0))
        for _ in range(2):
            guard.call(int)
        refuse(guard, 2)
        throttle.update(k=1.0)
        with pytest.raises(Overloaded):
            guard.call(int)
        throttle.update(k=3.0)
        assert guard.call(int) == 0
        assert counts(guard) == (6, 3)
        throttle.update(window=60.0, probe_every=1.0)
        assert counts(guard) == (0, 0)
        assert (throttle.window, throttle._model.probe_every) == (60.0, 1.0)
        with pytest.raises(ValueError, match="write a finite number of at least 1"):
            throttle.update(k=0.5, mode="off")
        assert (throttle.k, throttle.mode) == (3.0, "enforce")
        with pytest.raises(TypeError, match="k, window, probe_every, mode"):
            throttle.update(on=ValueError)


def test_two_guards_share_what_they_know():
    """The same throttle in two guards: refusals of one are known to the other."""
    with virtual_time():
        throttle = Throttle(probe_every=None)
        one, other = (new_guard(throttle, rng=Always(draw)) for draw in (1.0, 0.0))
        refuse(one, 5)
        with pytest.raises(Overloaded):
            other.call(int)
        assert (shown(one)["rejected"], shown(other)["rejected"]) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0.9}, "at least 1"),
        ({"k": float("nan")}, "k="),
        ({"k": "2"}, "k="),
        ({"k": {2: 3.0}}, "write a Criticality"),
        ({"k": {}}, "k={}: write a number, or one for some class"),
        ({"k": {Criticality.CRITICAL: 0.0}}, "CRITICAL"),
        ({"window": 0}, "window"),
        ({"probe_every": -1.0}, "probe_every"),
        ({"on": ()}, "on="),
        ({"on": "ConnectionError"}, "on="),
        ({"on": KeyboardInterrupt}, "KeyboardInterrupt"),
        ({"mode": "dry"}, "'enforce', 'shadow', 'off'"),
    ],
)
def test_bad_arguments_are_told(options, message):
    """Each message names the argument and what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        Throttle(**options)


def test_it_shows_its_settings():
    """The representation is the call that makes it."""
    assert repr(Throttle()) == (
        "Throttle(k=2.0, window=120, on=(ConnectionError, TimeoutError, Rejected))"
    )


def test_it_works_in_a_child_of_a_fork():
    """A lock held by a thread that is gone is not waited for."""
    throttle = Throttle()
    throttle._mutex.acquire()
    throttle._after_fork()
    guard = new_guard(throttle, rng=Always(1.0))
    refuse(guard, 2)
    assert counts(guard) == (2, 0)
