"""How long a suspicion lasts and what the score of local health does, by the published formulas."""

from math import log, log10

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.detection.gossip import LocalHealth, Suspicion
from seawall.models.detection.settings import SwimSettings

multipliers = st.integers(2, 10)
sizes = st.integers(1, 1000)


def suspicion(
    multiplier: int, members: int, interval: float = 1.0, *, lifeguard: bool = True
) -> Suspicion:
    """Return one that begins at 0, by the account of a0."""
    settings = SwimSettings(
        suspicion_multiplier=multiplier,
        interval=interval,
        timeout=interval / 2,
        lifeguard=lifeguard,
    )
    return Suspicion("a0", 0.0, members, settings)


@given(multipliers, sizes, st.floats(0.1, 10.0), st.integers(0, 12))
def test_a_suspicion_lasts_as_long_as_the_formula_says(multiplier, members, interval, others):
    """The largest of the least time and what distinct confirmations leave of the longest."""
    one = suspicion(multiplier, members, interval)
    accepted = sum(one.add_accuser(f"a{number}") for number in range(1, others + 1))
    least = multiplier * max(1.0, log10(members)) * interval
    needed = multiplier - 2
    if needed < 1 or members - 2 < needed:
        wanted, needed = least, 0
    else:
        count = min(others, needed)
        wanted = max(least, 6 * least - 5 * least * log(count + 1) / log(needed + 1))
    assert accepted == min(others, needed)
    assert one.ends_at == pytest.approx(wanted)


@given(multipliers, sizes)
def test_each_further_accuser_brings_the_end_nearer_but_not_below_the_least(multiplier, members):
    """The first accuser and those that are known confirm nothing."""
    one = suspicion(multiplier, members)
    least = multiplier * max(1.0, log10(members))
    ends = [one.ends_at]
    for number in range(12):
        known = one.ends_at
        assert not one.add_accuser("a0")
        assert one.ends_at == known
        one.add_accuser(f"a{number + 1}")
        ends.append(one.ends_at)
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] == pytest.approx(least)


@given(multipliers, sizes)
def test_without_lifeguard_a_suspicion_lasts_the_least_time(multiplier, members):
    """Whichever members share it."""
    one = suspicion(multiplier, members, lifeguard=False)
    assert not one.add_accuser("a1")
    assert one.ends_at == pytest.approx(multiplier * max(1.0, log10(members)))


@given(st.lists(st.integers(-3, 5), max_size=50))
def test_the_score_of_health_stays_within_0_and_8_and_scales_time(changes):
    """By the score and one."""
    health, wanted = LocalHealth(), 0
    for change in changes:
        health.change(change)
        wanted = min(8, max(0, wanted + change))
        assert health.score == wanted
        assert health.scale(2.0) == 2.0 * (wanted + 1)
