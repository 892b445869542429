from __future__ import annotations

import re

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    static,
)
from seawall.backoff import constant
from seawall.policies.timeout import adaptive_timeout
from seawall.rules import dangers
from seawall.runtime.policy import bindings_of
from seawall.shedding import by_fraction
from seawall.testing import ScriptedService, fail


def _retry(attempts=3, backoff=0.1):
    on = (ConnectionError, TimeoutError)
    return Retry(on=on, attempts=attempts, backoff=backoff, budget=RetryBudget())


def _dangers(*policies, idempotent=True):
    return dangers("vendor", policies, idempotent=idempotent)


def test_explain_prints_the_stack_outermost_first():
    """The stack is printed as it nests, one policy a line."""
    guard = Guard("vendor", _retry(), Breaker(), Timeout(2.0))
    lines = guard.explain().splitlines()
    assert lines[0] == "guard 'vendor', outermost first:"
    assert lines[1].startswith("  Retry(on=(ConnectionError, TimeoutError), attempts=3")
    assert lines[2].startswith("    Breaker(")
    assert lines[3] == "      Timeout(2.0)"


def test_the_recommended_order_has_no_dangers():
    """Nothing is said against the stack that the documentation recommends."""
    assert not _dangers(
        Fallback(static("later")),
        Cache(60),
        Shed(by_fraction(0.1)),
        Timeout(10.0),
        _retry(),
        Hedge(1.0),
        Breaker(),
        Throttle(),
        RateLimit("60/s", max_wait=0.5),
        Bulkhead(20, max_wait=0.5),
        AdaptiveLimit(max_wait=0.5),
        Timeout(2.0),
        Chaos(0.1, error=OSError),
    )


@pytest.mark.parametrize(
    ("policies", "danger"),
    [
        (
            lambda: (Bulkhead(5), _retry(), Timeout(2.0)),
            "Bulkhead stands around Retry: its slot is held during the pauses",
        ),
        (
            lambda: (ThreadBulkhead(5), _retry(), Timeout(2.0, sync="cooperative")),
            "ThreadBulkhead stands around Retry: its slot is held during the pauses",
        ),
        (
            lambda: (Breaker(), _retry(), Timeout(2.0)),
            "Breaker stands around Retry: after it opens, calls go on for up to 3 attempts",
        ),
        (
            lambda: (_retry(), Timeout(2.0), _retry(2)),
            "Retry inside Retry: up to 4 attempts",
        ),
        (
            lambda: (Timeout(2.0), Timeout(2.0)),
            r"the inner Timeout \(2 s\) is not below the outer one \(2 s\): it never acts",
        ),
        (
            lambda: (Timeout(2.0), _retry(), Timeout(5.0)),
            r"the inner Timeout \(5 s\) is not below the outer one \(2 s\)",
        ),
        (
            lambda: (Timeout(2.0), Timeout(adaptive_timeout(floor=0.1, cap=3.0))),
            r"the inner Timeout \(3 s\) is not below",
        ),
        (
            lambda: (Timeout(1.0), Bulkhead(5, max_wait=1.0)),
            "Bulkhead waits up to 1 s inside a Timeout of 1 s",
        ),
        (
            lambda: (Timeout(1.0), _retry(3, constant(0.5)), Timeout(0.5)),
            r"total Timeout of 1 s can be over before the pauses of Retry are \(up to 1 s\)",
        ),
        (
            lambda: (Bulkhead(5), Breaker()),
            "Bulkhead stands around Breaker: calls queue for a slot only to be refused",
        ),
        (
            lambda: (AdaptiveLimit(), _retry(), Timeout(2.0)),
            "AdaptiveLimit stands around Retry: its slot is held during the pauses",
        ),
        (lambda: (AdaptiveLimit(), Breaker()), "AdaptiveLimit stands around Breaker"),
        (
            lambda: (Timeout(1.0), RateLimit("1/s", max_wait=2.0)),
            "RateLimit waits up to 2 s inside a Timeout of 1 s",
        ),
        (
            lambda: (RateLimit("60/s"), _retry(), Timeout(2.0)),
            "RateLimit stands around Retry: one token for 3 attempts",
        ),
        (lambda: (Throttle(), _retry(), Timeout(2.0)), "Throttle stands around Retry: it counts"),
        (lambda: (Hedge(1.0), _retry(), Timeout(2.0)), "each copy makes up to 3 attempts"),
        (lambda: (Bulkhead(1), Hedge(1.0)), "Bulkhead stands around Hedge: all copies share one"),
        (lambda: (RateLimit("1/s"), Hedge(1.0)), "one token for all copies"),
        (lambda: (Breaker(), Hedge(1.0)), "it sees only the copy that won"),
        (lambda: (Hedge(1.0), Cache(60)), "Cache stands inside Hedge"),
        (
            lambda: (Bulkhead(1), RateLimit("1/s", max_wait=2.0)),
            "Bulkhead stands around a RateLimit that waits",
        ),
        (lambda: (Chaos(0.1, error=OSError), Breaker()), "Chaos stands around Breaker, which"),
        (lambda: (Chaos(0.1, error=OSError, enabled=True),), "Chaos is switched on"),
        (lambda: (Bulkhead(1), Shed(by_fraction(0.1))), "Shed stands inside Bulkhead"),
        (lambda: (_retry(), Cache(60), Timeout(2.0)), "Cache stands inside Retry"),
        (lambda: (Breaker(), Cache(60)), "Cache stands inside Breaker"),
        (lambda: (Bulkhead(1), Cache(60)), "Cache stands inside Bulkhead"),
        (lambda: (_retry(),), "Retry without Timeout: one attempt that hangs is never retried"),
        (
            lambda: (Retry(on=ConnectionError, attempts=4), Timeout(2.0)),
            r"Retry without a budget: .* adds 3 calls for each one; give it budget=RetryBudget\(\)",
        ),
        (lambda: (Breaker(),), "Breaker without Timeout: it never learns of a call that hangs"),
        (lambda: (Bulkhead(5),), "Bulkhead without Timeout: a call that hangs keeps its slot"),
        (lambda: (AdaptiveLimit(),), "AdaptiveLimit without Timeout: a call that hangs keeps"),
        (lambda: (Timeout(9.0), _retry()), "Timeout stands only around Retry"),
        (lambda: (_retry(3, constant(0.2)), Timeout(2.0)), "has no jitter: callers that failed"),
        (lambda: (_retry(3, [0.1, 0.5]), Timeout(2.0)), "has no jitter: callers that failed"),
        (
            lambda: (Retry(on=Exception, budget=RetryBudget()), Timeout(2.0)),
            "on=Exception retries mistakes in the code too",
        ),
        (
            lambda: (Timeout(5.0), _retry(3), Timeout(2.0)),
            "the total Timeout of 5 s is below 3 attempts of 2 s",
        ),
        (lambda: (Breaker(min_calls=1), Timeout(2.0)), "Breaker with min_calls=1: one failure"),
    ],
)
def test_each_danger_is_explained(policies, danger):
    """Each danger is told once, in words that say what to do."""
    guard = Guard("vendor", *policies())
    text = guard.explain()
    assert "take care:" in text
    assert "recommended order: Fallback > Cache > Shed > total Timeout > Retry" in text
    found = [line for line in text.splitlines() if line.startswith("  - ")]
    assert len([line for line in found if re.search(danger, line)]) == 1, found


@pytest.mark.parametrize(
    "policies",
    [
        lambda: (Breaker(slow_after=1.0, slow_ratio=0.5),),
        lambda: (_retry(3, constant(0.2, jitter="equal")), Timeout(2.0)),
        lambda: (_retry(3, lambda attempt: 0.1 * attempt), Timeout(2.0)),
        lambda: (_retry(3, 0.0), Timeout(2.0)),
        lambda: (Retry(on=Exception, attempts=1), Timeout(2.0)),
        lambda: (Timeout(6.5), _retry(3, 0.1), Timeout(2.0)),
    ],
)
def test_nothing_is_said_against_what_is_safe(policies):
    """Settings that are close to a danger, and are none, are not warned of."""
    assert _dangers(*policies()) == []


def test_retrying_what_is_not_idempotent_is_explained():
    """A guard marked idempotent=False says when it retries at all."""
    found = _dangers(_retry(), Timeout(2.0), idempotent=False)
    assert found == [
        "calls are marked idempotent=False: they are retried only with an idempotency key"
    ]


def test_hedging_what_is_not_idempotent_is_explained():
    """A guard marked idempotent=False says when it hedges at all."""
    assert _dangers(Hedge(1.0), idempotent=False) == [
        "calls are marked idempotent=False: they are hedged only with an idempotency key"
    ]


def test_a_bulkhead_shared_by_two_guards_is_explained():
    """Two guards that can wait for each other's slot are named to each other."""
    shared = Bulkhead(5, max_wait=1.0)
    first, second = Guard("first", shared), Guard("second", shared)
    assert "is shared with second" in first.explain()
    assert "is shared with first" in second.explain()
    assert "nested calls need two bulkheads" in first.explain()


def test_a_shared_bulkhead_that_never_waits_cannot_deadlock():
    """Without waiting there is no deadlock, and so no warning."""
    shared = Bulkhead(5)
    first, second = Guard("first", shared), Guard("second", shared)
    assert "is shared with" not in first.explain() + second.explain()


def test_a_shared_thread_bulkhead_is_explained():
    """Threads are slots too: a queue for them can wait for itself."""
    shared = ThreadBulkhead(2)
    guards = Guard("first", shared), Guard("second", shared)
    assert "is shared with second" in guards[0].explain()


def test_nested_retries_make_as_many_attempts_as_told():
    """The number of attempts in the warning is the number that is made."""
    with_pauses_of_zero = {"on": ConnectionError, "backoff": 0.0}
    guard = Guard(
        "vendor",
        Retry(attempts=3, **with_pauses_of_zero),
        Retry(attempts=2, **with_pauses_of_zero),
    )
    assert "up to 4 attempts" in guard.explain()
    service = ScriptedService(fail(ConnectionError))
    guard.attempt(service.call)
    assert service.calls == 4


# --- What is refused at once ---


@pytest.mark.parametrize("outer", [_retry, Breaker])
def test_a_fallback_that_hides_every_error_is_refused(outer):
    """Fallback inside Retry or Breaker would keep every error from it: it raises."""
    with pytest.raises(ValueError, match=r"put Fallback before \w+, or give it on="):
        Guard("vendor", outer(), Fallback(static("later")))


@pytest.mark.parametrize("outer", [_retry, Breaker])
def test_a_fallback_for_some_errors_may_stand_inside(outer):
    """With on=..., other errors still get through, and the stack is allowed."""
    Guard("vendor", outer(), Fallback(static("later"), on=LookupError))


def test_an_empty_stack_is_refused():
    """A guard without policies raises, and shows one with."""
    with pytest.raises(ValueError, match=r"Guard\('vendor', Timeout\(2.0\)\)"):
        Guard("vendor")


def test_the_same_policy_twice_is_refused():
    """One object twice in a stack raises; two equal ones do not."""
    once = Timeout(2.0)
    with pytest.raises(ValueError, match=r"twice.*make a second one"):
        Guard("vendor", once, Bulkhead(1), once)
    Guard("vendor", Timeout(3.0), Timeout(2.0))


def test_a_refused_stack_takes_no_name():
    """What raises at construction is not registered, and binds nothing."""
    policy = Timeout(2.0)
    with pytest.raises(ValueError, match="twice"):
        Guard("vendor", policy, policy)
    Guard("vendor", policy)
    assert len(bindings_of(policy)) == 1


def test_an_attempt_that_times_out_and_is_not_retried_is_explained():
    """A timeout inside a retry that does not name it ends the call at the first attempt."""
    retry = Retry(on=ConnectionError, budget=RetryBudget())
    assert _dangers(retry, Timeout(2.0)) == [
        "an attempt that times out is not retried: add TimeoutError to on=, if it may be"
    ]
    assert not [line for line in _dangers(Timeout(20.0), retry) if "times out" in line]
