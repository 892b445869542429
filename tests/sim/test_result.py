from __future__ import annotations

from math import inf

import pytest

from seawall.sim import SimulationResult
from seawall.sim.records import ClientRecord, Disturbance, ServiceRecord, Steps


def result(
    served: list[int], *, at: float | None = 10, until: float = 20, came: int = 100
) -> SimulationResult:
    """Make the result of a run in which 100 calls a second came and some of them were served."""
    came, until = 100, 20.0
    steps = Steps(1.0, len(served))
    clients = ClientRecord("users", steps)
    for index, good in enumerate(served):
        clients.came[index] = came
        clients.ended["ok"][index] = good
        clients.ended["failed"][index] = came - good
    disturbances = [] if at is None else [Disturbance(at, until, "trouble")]
    return SimulationResult(
        "world",
        1,
        1.0,
        clients=[clients],
        services=[],
        guards=[],
        disturbances=disturbances,
        steps=len(served),
    )


WELL, OUT = [100] * 10, [0] * 10


@pytest.mark.parametrize(
    ("after", "kind", "recovery"),
    [
        ([100] * 40, "recovers", 0),
        ([0] * 7 + [100] * 33, "recovers", 7),
        ([100] * 10 + [0] * 30, "stays down", inf),
        ([100, 0] * 20, "degraded", inf),
        ([0] * 40, "stays down", inf),
        ([0] * 3 + [100] * 17 + [90] + [100] * 19, "recovers", 3),
    ],
)
def test_recovery_is_when_it_is_well_and_stays_so(after, kind, recovery):
    """A dip of a second does not undo it; to be well for a while and fall again is no recovery."""
    found = result(WELL + OUT + after)
    assert found.recovery() == recovery
    assert found.verdict.kind == kind
    assert found.verdict.recovery == recovery


def test_trouble_to_the_end_has_a_verdict_too():
    """There is no time left to recover in."""
    assert result(WELL + OUT).verdict.kind == "stays down"


def test_what_nobody_feels_is_no_outage():
    """97 % during the trouble is within 5 % of the usual."""
    assert result(WELL + [97] * 10 + [100] * 20).verdict.kind == "unaffected"


def test_recovery_is_measured_against_the_usual_share():
    """A world that served 80 % before has recovered when it serves 80 % again."""
    found = result([80] * 10 + OUT + [80] * 20)
    assert found.recovery() == 0
    assert found.recovery(0.95) == inf


def test_a_calm_run_is_judged_as_a_whole():
    """Without a disturbance the verdict is the share that was served."""
    assert result([100] * 20, at=None).verdict.text == "serves 100.0 % of the calls"
    assert result([60] * 20, at=None).verdict.kind == "degraded"
    assert result([0] * 20, at=None).verdict.kind == "stays down"


def overloaded(offered: list[int], served: list[int]) -> SimulationResult:
    found = result(served, at=None)
    found.clients["users"].came[: len(offered)] = offered
    found.services["server"] = ServiceRecord("server", 100.0, Steps(1.0, len(served)))
    found.services["server"].calls[: len(offered)] = offered
    return found


def test_collapse_is_told_with_the_load_at_which_it_begins():
    """At twice the capacity a quarter of it is served."""
    found = overloaded([50] * 10 + [200] * 10 + [50] * 10, [50] * 10 + [25] * 10 + [50] * 10)
    assert found.verdict.kind == "collapses"
    assert "to 25 % of it" in found.verdict.text


def test_a_server_that_keeps_its_goodput_holds():
    """At three times the capacity nearly all of it is served."""
    found = overloaded([50] * 10 + [300] * 10 + [50] * 10, [50] * 10 + [95] * 10 + [50] * 10)
    assert found.verdict.kind == "holds"
    assert "3.0 times capacity" in found.verdict.text


def test_a_span_outside_of_the_run_is_refused():
    """An empty share would be a share of nothing."""
    with pytest.raises(ValueError, match="within the 20 s"):
        result(WELL + OUT).share(15, 15)
