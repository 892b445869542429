from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from seawall.models import outbox as model
from seawall.models.backoff import as_backoff, full_jitter
from seawall.models.outbox import OutboxSettings, after_failure, first_failure, next_pause
from tests.support import falsified

HISTORIES = st.tuples(
    st.integers(1, 8), st.sampled_from(["block", "skip"]), st.lists(st.booleans(), max_size=30)
)


def bounded(case: tuple[int, Any, list[bool]]) -> None:
    """No event is tried more often than it may, and the last failure is the policy's."""
    attempts, poison, progress = case
    settings = OutboxSettings(attempts, full_jitter(0.5, cap=4.0), poison)
    failed = 0
    for progressed in progress:
        verdict = after_failure(settings, failed, progressed=progressed, rng=lambda: 1.0)
        failed = verdict.attempts
        assert failed <= attempts
        assert (verdict.action == "again") == (failed < attempts)
        if verdict.action != "again":
            assert verdict.action == poison
            return
        assert 0 <= verdict.delay <= 4_000_000


@given(HISTORIES)
def test_attempts_are_bounded(case: tuple[int, Any, list[bool]]):
    """Whatever fails how often, an event is tried so many times and then is the policy's."""
    bounded(case)


def test_unbounded_attempts_would_be_noticed(monkeypatch: Any):
    """Ablation: if a failure never counts as the last, the property fails."""

    def lenient(settings: OutboxSettings, *args: Any, **options: Any) -> Any:
        return model.after_failure(settings._replace(attempts=1_000), *args, **options)

    monkeypatch.setitem(bounded.__globals__, "after_failure", lenient)
    assert falsified(bounded, HISTORIES)


def test_pauses_grow_with_the_failures_of_one_event():
    """The backoff goes on where it was, and begins anew for another event."""
    settings = OutboxSettings(10, as_backoff([1.0, 5.0, 25.0]), "block")
    delays, failed = [], 0
    for progressed in (False, False, False, False, True, False):
        verdict = after_failure(settings, failed, progressed=progressed, rng=lambda: 1.0)
        failed = verdict.attempts
        delays.append(verdict.delay / 1e6)
    assert delays == [1.0, 5.0, 25.0, 25.0, 1.0, 5.0]


BATCHES = st.lists(st.integers(0, 9).map(str), unique=True).flatmap(
    lambda ids: st.tuples(st.just(ids), st.sets(st.sampled_from(ids or ["none"])))
)


def in_order(case: tuple[list[str], set[str]]) -> None:
    """Nothing counts as delivered from the first failure on, and everything before it does."""
    ids, failed = case
    delivered = first_failure(ids, frozenset(failed))
    assert not failed & set(ids[:delivered])
    assert delivered == len(ids) or ids[delivered] in failed


@given(BATCHES)
def test_delivered_is_what_comes_before_the_first_failure(case: tuple[list[str], set[str]]):
    """An event behind a failed one is delivered again, after it."""
    in_order(case)


def test_counting_past_a_failure_would_be_noticed(monkeypatch: Any):
    """Ablation: if what the sink took behind a failure counted, an event would be lost."""
    monkeypatch.setitem(in_order.__globals__, "first_failure", lambda ids, _failed: len(ids))
    assert falsified(in_order, BATCHES)


@given(st.floats(0.05, 100.0), st.booleans(), st.floats(0.05, 10.0))
def test_looks_are_never_too_rare_nor_too_often(pause: float, found: object, longest: float):
    """The pause stays in its bounds, and is short after something was found."""
    after = next_pause(pause, found=bool(found), shortest=0.05, longest=longest)
    assert 0.05 <= after <= longest
    assert after == 0.05 or not found
