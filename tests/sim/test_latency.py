from __future__ import annotations

from random import Random

import pytest

from seawall.models.histogram import Tally
from seawall.sim import Latency


def mean(latency: Latency, calls: int = 1) -> float:
    rng = Random(7)
    return sum(latency.draw(rng, calls) for _ in range(20_000)) / 20_000


@pytest.mark.parametrize(
    "latency",
    [
        Latency.constant(0.05),
        Latency.exponential(0.05),
        Latency.normal(0.01, 0.002),
        Latency.lognormal(median=0.02, p99=0.3),
        Latency.measured([0.01, 0.02, 0.06]),
    ],
    ids=repr,
)
def test_drawn_times_have_the_stated_mean(latency: Latency):
    """20 000 draws are within 5 % of the mean that the latency states."""
    assert latency.mean == pytest.approx(mean(latency), rel=0.05)


def test_lognormal_has_the_quantiles_it_was_made_from():
    """The median and the 99 % quantile come out as they were put in."""
    latency = Latency.lognormal(median=0.02, p99=0.3)
    rng = Random(0)
    drawn = sorted(latency.draw(rng, 1) for _ in range(10_000))
    assert drawn[5_000] == pytest.approx(0.02, rel=0.05)
    assert drawn[9_900] == pytest.approx(0.3, rel=0.1)


def test_a_tally_is_drawn_from_its_buckets():
    """Times from a histogram stay in its buckets, in the right shares."""
    tally = Tally((0.1, 0.2, 0.4))
    for value in [0.05] * 70 + [0.3] * 30:
        tally.add(value)
    rng = Random(1)
    drawn = [Latency.measured(tally).draw(rng, 1) for _ in range(10_000)]
    assert not [one for one in drawn if 0.1 < one <= 0.2 or one > 0.4]
    assert sum(one <= 0.1 for one in drawn) == pytest.approx(7000, rel=0.05)


def test_latency_by_concurrency_is_the_users_function():
    """A call takes what the function says for the calls in progress."""
    latency = Latency.by_concurrency(lambda calls: 1 + 0.01 * calls)
    assert latency.draw(Random(1), 50) == 1.5
    assert latency.mean is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Latency.measured([]), "at least one sample"),
        (lambda: Latency.measured(Tally()), "it is empty"),
        (lambda: Latency.lognormal(median=1, p99=0.5), "the other way round"),
        (lambda: Latency.exponential(0), "more than 0"),
    ],
)
def test_impossible_latencies_are_refused(make, said):
    """The error says what to write instead."""
    with pytest.raises(ValueError, match=said):
        make()


def test_what_is_no_latency_is_refused():
    """A text is not a number of seconds."""
    with pytest.raises(TypeError, match=r"Latency\.exponential"):
        Latency.of("fast")  # type: ignore[arg-type]
