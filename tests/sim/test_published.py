"""Short versions of the published results in examples/published, through the real policies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from seawall.sim import simulate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "published"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"published_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


backoff = load("backoff_and_jitter")
retries = load("retries")
collapse = load("collapse")
mm1 = load("mm1_outage")
metastable = load("metastable_retries")
tail = load("tail_at_scale")


@pytest.mark.parametrize("name", backoff.STRATEGIES)
def test_backoff_and_jitter_as_published(name: str):
    """Fifty contenders: time and writes are within 10 % (15 % for the few runs that are made)."""
    row = backoff.mean(name, 50, runs=6)
    milliseconds, writes = backoff.PUBLISHED[name][1]
    assert row.milliseconds == pytest.approx(milliseconds, rel=0.15)
    assert row.writes == pytest.approx(writes, rel=0.1)


@pytest.mark.parametrize("name", retries.PUBLISHED)
@pytest.mark.parametrize("failing", [0.2, 0.5, 1.0])
def test_load_and_success_of_retries_as_published(name: str, failing: float):
    """Twenty clients: load and success are within 10 %."""
    row = retries.run(retries.STRATEGIES[name], failing, clients=20)
    load, success = retries.PUBLISHED[name][retries.FAILING.index(failing)]
    assert row.load == pytest.approx(load, rel=0.1)
    assert row.success == pytest.approx(success, rel=0.1)


def test_the_open_system_collapses_without_backoff_only():
    """Seed 2 stays down without backoff; with it, or with a budget, it recovers."""
    down = {
        name: collapse.stays_down(collapse.run(make, seed=2))
        for name, make in collapse.RETRIES.items()
    }
    assert down == {
        "no backoff": True,
        "backoff and jitter": False,
        "success-deposit budget": False,
    }


@pytest.mark.parametrize("name", metastable.CASES)
def test_metastable_failures_are_those_of_the_paper(name: str):
    """Only the larger trigger at full load and for its whole time stays down."""
    case = metastable.CASES[name]
    found = metastable.run(case, seed=1)
    assert (found.verdict.kind == "stays down") == case.stays_down


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("3 retries, jitter", "stays down"),
        ("request-ratio budget", "stays down"),
        ("expired work dropped", "degraded"),
        ("deposits and dropping", "recovers"),
    ],
)
def test_only_deposits_and_dropping_together_end_the_outage(name: str, kind: str):
    """Twenty seconds after it, each alone has not recovered."""

    def build(world):
        mm1.outage(world, **mm1.VARIANTS[name])

    assert simulate(build, seed=1, seconds=50).verdict.kind == kind


def test_fan_out_makes_slow_calls_common():
    """One slow call in a hundred makes 63 % of the requests of a hundred calls slow."""
    assert tail.slow_requests(0.01, 100, requests=400) == pytest.approx(0.63, rel=0.1)


def test_hedging_cuts_the_tail_for_two_percent_more_calls():
    """The quantile falls by an order of magnitude."""
    plain, hedged = tail.reads(hedged=False, count=300), tail.reads(hedged=True, count=300)
    assert plain.p999 > 8 * hedged.p999
    assert 1.01 < hedged.load < 1.03
