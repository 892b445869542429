from __future__ import annotations

from math import inf

import pytest

from seawall import Guard, Retry, Timeout
from seawall.sim import CONDITIONS, Estimate, Latency, World, compare, rehearse, run_seeds

LATENCY = Latency.lognormal(median=0.02, p99=0.2)


def patient() -> Guard:
    return Guard.standard("vendor", on=(ConnectionError, TimeoutError), timeout=3.0)


def hasty() -> Guard:
    return Guard("vendor", Timeout(0.05))


def storm() -> Guard:
    retry = Retry(on=(ConnectionError, TimeoutError), attempts=4, backoff=0.05, budget=None)
    return Guard("vendor", retry, Timeout(3.0))


def test_each_condition_gives_goodput_tail_and_load():
    """Down serves nothing and slow serves slowly; doubled load is twice the calls."""
    found = rehearse(patient, latency=LATENCY, rate=20, seconds=30, seeds=3)
    assert tuple(found) == CONDITIONS
    assert found["normal"].goodput.mean == pytest.approx(20, rel=0.1)
    assert found["normal"].tail.mean == pytest.approx(0.2, rel=0.5)
    assert found["slow"].tail.mean > 2 * found["normal"].tail.mean
    assert found["down"].during.mean == 0.0
    assert found["double"].load.mean == pytest.approx(2 * found["normal"].load.mean, rel=0.2)
    assert found["down"].goodput.low <= found["down"].goodput.mean <= found["down"].goodput.high


def test_settings_are_compared_by_seed():
    """A timeout below the median costs goodput; retries without a budget cost load when down."""
    settings = {"latency": LATENCY, "rate": 20, "seconds": 30, "seeds": 3}
    before = rehearse(patient, conditions=["normal", "down"], **settings)
    assert compare(before["normal"], before["normal"]).goodput == Estimate(0, 0, 0)
    worse = rehearse(hasty, conditions=["normal"], **settings)
    assert compare(before["normal"], worse["normal"]).goodput.high < -1
    stormy = rehearse(storm, conditions=["down"], **settings)
    assert compare(before["down"], stormy["down"]).load.low > 20


def test_settings_may_be_toml():
    """The same guard from TOML gives the same outcomes."""
    text = """
    [guards.vendor.standard]
    on = ["ConnectionError", "TimeoutError"]
    timeout = 3.0
    """
    settings = {"latency": LATENCY, "rate": 20, "seconds": 15, "seeds": 2, "conditions": ["slow"]}
    assert rehearse(text, **settings) == rehearse(patient, **settings)


def test_capacity_and_failures_are_those_that_were_measured():
    """A dependency for 20 calls a second does not serve 40; one that fails 10 % needs retries."""
    settings = {"latency": LATENCY, "rate": 18, "seconds": 30, "seeds": 2}
    tight = rehearse(patient, capacity=20, conditions=["double"], **settings)
    assert tight["double"].during.mean < 0.9
    failing = rehearse(patient, failing=0.1, conditions=["normal"], **settings)
    assert failing["normal"].load.mean > 1.05 * failing["normal"].goodput.mean


def test_seeds_on_several_processes_give_the_same_results():
    """Where a seed runs makes no difference."""
    alone = run_seeds(_calm, seeds=2)
    spread = run_seeds(_calm, seeds=2, processes=2)
    assert [one.summary() for one in alone.results] == [one.summary() for one in spread.results]
    assert alone.verdicts == {"unaffected": 2}


def _calm(world: World) -> None:
    world.seconds = 10
    world.clients("users", world.service("vendor", latency=0.01).acall, rate=10)


def test_a_function_that_other_processes_cannot_find_is_refused():
    """The error says so, before any process is started."""
    with pytest.raises(TypeError, match="processes=1"):
        run_seeds(lambda _world: None, seeds=2, processes=2)


@pytest.mark.parametrize(
    ("values", "estimate"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([1.0, 2.0, 3.0], (2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5)),
        ([1.0, inf], (inf, 1.0, inf)),
    ],
)
def test_intervals_are_students(values, estimate):
    """Three values 1, 2, 3 have the interval of two degrees of freedom."""
    assert Estimate.of(values) == pytest.approx(estimate)
