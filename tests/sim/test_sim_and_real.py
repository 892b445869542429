"""A simulated service against the same service in real processes; examples/sim_and_real."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "sim_and_real"
SCENARIOS: Final = ("calm", "outage", "surge")
NEAR: Final = 0.15
REAL: Final = {"calm": (6.017, 1.614), "outage": (4.383, 1.609), "surge": (8.367, 1.925)}
"""Goodput and p99 of a run in real processes."""
OVERHEAD: Final = (0.005, 0.007, 0.012)
"""Seconds that a request took in that run if the vendor did nothing; a few of the samples."""


@pytest.fixture(scope="module")
def compare() -> Iterator[Any]:
    """Return the program, whose modules are imported by their plain names."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("compare")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("compare", "service", "vendor"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_simulation_gives_what_was_measured(compare: Any, name: str):
    """Goodput and p99 are within 15 % of a real run."""
    simulated = compare.simulate(compare.SCENARIOS[name], OVERHEAD)
    assert tuple(simulated) == pytest.approx(REAL[name], rel=NEAR)


def test_each_scenario_has_an_effect(compare: Any):
    """An outage costs goodput; a surge brings more than the calm, and waits."""
    calm, outage, surge = (
        compare.simulate(compare.SCENARIOS[name], OVERHEAD) for name in SCENARIOS
    )
    assert outage.goodput < 0.8 * calm.goodput
    assert surge.goodput > 1.2 * calm.goodput
    assert surge.p99 > 1.1 * calm.p99


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_simulation_gives_what_happens_for_real(compare: Any, name: str):
    """A minute under uvicorn, with the vendor and the clients in processes of their own."""
    scenario = compare.SCENARIOS[name]
    real, overhead = compare.run_for_real(scenario)
    assert tuple(compare.simulate(scenario, overhead)) == pytest.approx(real, rel=NEAR)
