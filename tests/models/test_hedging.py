"""The cap on hedges: what calls earn, what hedges spend, and that no history breaks the bound."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.budget import WHOLE, HedgeCap
from tests.support import falsified


class History(NamedTuple):
    """Calls that begin (the number of them) and hedges that are asked for (None), in order."""

    cap: float
    burst: int
    events: list[int | None]


HISTORIES = st.builds(
    History,
    cap=st.sampled_from([0.0, 0.01, 0.05, 0.07, 0.1, 1 / 3, 0.5, 1.0]),
    burst=st.integers(1, 5),
    events=st.lists(st.none() | st.integers(1, 40), max_size=60),
)


def verdicts(history: History) -> list[tuple[int, bool | None]]:
    """Return what each event was: the calls of a begin, or whether a hedge was permitted."""
    rule = HedgeCap(history.cap, history.burst)
    calls = 0
    seen: list[tuple[int, bool | None]] = []
    for event in history.events:
        if event is None:
            seen.append((0, rule.try_hedge(calls)))
        else:
            calls += event
            seen.append((event, None))
    return seen


def bounded_in_every_stretch(history: History) -> None:
    """From any event to any later one: hedges <= cap * calls + burst."""
    seen = verdicts(history)
    for start in range(len(seen)):
        calls = hedges = 0
        for begun, permitted in seen[start:]:
            calls += begun
            hedges += bool(permitted)
            assert hedges <= Fraction(history.cap) * calls + history.burst


@given(HISTORIES)
def test_hedges_are_a_share_of_calls_in_every_stretch(history: History) -> None:
    """No prefix, and no other stretch of any history, has more hedges than cap and burst allow."""
    bounded_in_every_stretch(history)


@given(HISTORIES)
def test_what_is_earned_can_be_spent(history: History) -> None:
    """A hedge is refused only if the share since the last full purse is really used up."""
    full = HedgeCap(history.cap, history.burst)
    credit = Fraction(history.burst)
    calls = 0
    for event in history.events:
        if event is not None:
            calls += event
            credit = min(Fraction(history.burst), credit + event * Fraction(history.cap))
            continue
        permitted = full.try_hedge(calls)
        if permitted:
            credit -= 1
        else:
            # Millionths of a call are rounded down, for each of the calls so far.
            assert credit < 1 + Fraction(calls, WHOLE)


def test_savings_are_limited_to_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that limit a long calm would pay for a storm: then some stretch breaks the bound."""

    def hoard(self: HedgeCap, calls: int) -> None:
        self._credit += (calls - self._seen) * self._earned
        self._seen = calls

    monkeypatch.setattr(HedgeCap, "_earn", hoard)
    assert falsified(bounded_in_every_stretch, HISTORIES)


def test_hedges_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the payment there is no bound."""
    monkeypatch.setattr(HedgeCap, "try_hedge", lambda self, calls: self.available(calls) >= 1)
    assert falsified(bounded_in_every_stretch, HISTORIES)


def test_a_lagging_count_of_calls_allows_less() -> None:
    """A number that goes back, as a counter without a lock may, neither earns nor costs."""
    rule = HedgeCap(0.5, 1)
    assert rule.try_hedge(10)
    assert not rule.try_hedge(10)
    assert not rule.try_hedge(5)
    assert rule.available(11) == 0.5
    assert rule.try_hedge(12)


def test_a_hedge_that_was_not_made_is_given_back_once_and_not_beyond_the_burst() -> None:
    """What is given back can be spent again; the purse holds no more than the burst."""
    rule = HedgeCap(0.0, 2)
    assert rule.try_hedge(0)
    rule.give_back()
    rule.give_back()
    assert rule.available(0) == 2


def test_other_settings_keep_what_was_saved() -> None:
    """A change earns nothing by itself; a smaller burst takes away what no longer fits."""
    rule = HedgeCap(0.1, 5)
    assert rule.try_hedge(0)
    rule.change(0.5, 9, 0)
    assert rule.available(0) == 4
    assert rule.available(2) == 5
    rule.change(0.5, 1, 2)
    assert rule.available(2) == 1


@pytest.mark.parametrize(("cap", "burst"), [(-0.1, 1), (1.5, 1), (float("nan"), 1), (0.1, 0)])
def test_bad_settings_are_refused(cap: float, burst: int) -> None:
    """A share is a share, and without a burst no hedge could ever be made."""
    with pytest.raises(ValueError, match="write"):
        HedgeCap(cap, burst)
