from __future__ import annotations

import pytest

from seawall.sim import simulate
from seawall.sim.scenarios import SCENARIOS
from tests.support import QUICK

BETTER = {
    "outage": ("recovers", "recovers"),
    "slow-dependency": ("recovers", "recovers"),
    "retry-storm": ("stays down", "recovers"),
    "metastable": ("stays down", "recovers"),
    "thundering-herd": ("collapses", "unaffected"),
    "bad-shard": ("recovers", "recovers"),
    "hot-key": ("degraded", "unaffected"),
    "store-loss": ("recovers", "unaffected"),
    "rolling-restart": ("recovers", "unaffected"),
    "surge": ("collapses", "holds"),
}
LONG = {"retry-storm", "metastable", "surge"} if QUICK else set()


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in LONG])
def test_each_scenario_hurts_and_its_protection_helps(name: str):
    """The verdicts without and with protection; protection never serves fewer calls."""
    variants = SCENARIOS[name].variants.values()
    bare, guarded = (simulate(build, seed=1) for build in variants)
    assert (bare.verdict.kind, guarded.verdict.kind) == BETTER[name]
    assert guarded.share() > bare.share() - 0.02


def test_the_recommended_guard_spares_a_vendor_that_is_down():
    """Three retries without a budget ask four times as often; the breaker hardly asks at all."""
    bare, guarded = (simulate(build, seed=1) for build in SCENARIOS["outage"].variants.values())
    assert bare.load("vendor", 30, 60) > 3.5 * bare.load("vendor", 0, 30)
    assert guarded.load("vendor", 50, 60) < 0.1 * guarded.load("vendor", 0, 30)


def test_a_slow_vendor_does_not_stop_pages_that_do_not_need_it():
    """Without a bulkhead all workers wait for the vendor, and pages are lost too."""
    scenario = SCENARIOS["slow-dependency"].variants.values()
    bare, guarded = (simulate(build, seed=1) for build in scenario)
    assert bare.share(40, 60, of="pages") < 0.1
    assert guarded.share(40, 60, of="pages") > 0.99
