"""Proposals are tried in the simulator, and only those that help are kept."""

from __future__ import annotations

from typing import Any

import pytest

from seawall.sim import CONDITIONS
from seawall.tune import Measurement, Proof, Proposal, propose, prove
from seawall.tune.proof import simulated
from tests.tune.support import BREAKER, BULKHEAD, RETRY, TIMEOUT, measured, policy

SHORT: dict[str, Any] = {"seeds": 3, "seconds": 15.0}
SLOWLY = {"seconds": 1000.0}
"""Twenty calls a second."""


def proposal(place: int, policy_: str, before: dict[str, Any], after: dict[str, Any]) -> Proposal:
    """Return a proposal that the rules would not make."""
    return Proposal(
        "vendor", policy_, place, added=False, before=before, after=after, reason="", samples=1
    )


def proven(found: Measurement, *proposals: Proposal, **numbers: Any) -> Proof:
    """Return the proof of these proposals, or of those that the rules make."""
    return prove(found, proposals or propose(found).proposals, **SHORT | numbers)


def test_what_helps_is_kept_with_its_effect():
    """Eight attempts without a budget are a storm when it is down; both numbers are there."""
    storm = policy("retry", on=["ConnectionError", "TimeoutError"], attempts=8)
    found = measured(storm, BREAKER, BULKHEAD, TIMEOUT, failed=400.0, **SLOWLY)
    proof = proven(found)
    assert any(one.policy == "retry" for one in proof.kept)
    effect = proof.effects["down"]
    assert tuple(proof.effects) == CONDITIONS
    assert effect.before is not None
    assert effect.difference is not None
    assert effect.after.load.mean < effect.before.load.mean / 2
    assert effect.difference.load.high < 0
    assert "20.4 calls a second" in proof.world


def test_what_makes_something_worse_is_dropped():
    """A timeout below the median loses answers as usual."""
    found = measured(RETRY, BREAKER, BULKHEAD, TIMEOUT, **SLOWLY)
    proof = proven(found, proposal(3, "timeout", {"seconds": 0.5}, {"seconds": 0.01}))
    assert proof.kept == []
    ((_, why),) = proof.dropped
    assert why.startswith("worse under normal: goodput")
    assert proof.table == found.table


def test_what_has_no_effect_is_dropped():
    """A limit that nothing reaches helps under none of the conditions."""
    found = measured(RETRY, BREAKER, policy("bulkhead", limit=4000), TIMEOUT, **SLOWLY)
    proof = proven(found, proposal(2, "bulkhead", {"limit": 4000}, {"limit": 3000}))
    assert [why for _, why in proof.dropped] == ["it helps under none of the conditions"]


def test_more_load_on_a_dependency_that_is_down_is_dropped():
    """Nothing makes up for it: not even answers that retries save as usual."""
    one = policy("retry", on=["ConnectionError"], attempts=1)
    found = measured(one, BULKHEAD, TIMEOUT, failed=2000.0, **SLOWLY)
    proof = proven(found, proposal(0, "retry", {"attempts": 1}, {"attempts": 6}))
    assert proof.kept == []
    assert "worse under down: load" in proof.dropped[0][1]


def test_a_timeout_that_is_too_short_when_it_is_slow_is_made_longer():
    """The simulator goes half as far, and again, until nothing is worse than today."""
    found = measured(BREAKER, BULKHEAD, policy("timeout", seconds=30.0), **SLOWLY)
    short = proposal(2, "timeout", {"seconds": 30.0}, {"seconds": 0.2})
    (kept,) = proven(found, short).kept
    assert 0.2 < kept.after["seconds"] <= 6.4
    assert kept.reason.endswith("shorter ones lose answers when it is slow")


def test_without_settings_there_is_no_today():
    """The proposed stack is simulated, and not compared."""
    proof = proven(measured(known=False, **SLOWLY))
    assert {effect.before for effect in proof.effects.values()} == {None}
    assert proof.effects["normal"].after.goodput.mean == pytest.approx(20, rel=0.1)
    assert proof.table is not None
    kinds = [one["policy"] for one in proof.table["policies"]]
    assert kinds == [one.policy for one in proof.kept]


def test_a_pool_is_simulated_as_its_slots():
    """Borrowers wait for the checkout timeout, and then get nothing."""
    table = {"max_size": 1, "checkout_timeout": 0.1}
    found = measured(kind="pool", policies=(), table=table, rejected=5000.0, **SLOWLY)
    proof = proven(found)
    (kept,) = proof.kept
    assert kept.after["max_size"] > 1
    difference = proof.effects["normal"].difference
    assert difference is not None
    assert difference.goodput.low > 1


def test_only_what_a_simulation_knows_is_simulated():
    """Errors of the user become failures; functions, stores and answers in their place go."""
    table = {
        "max_wait": 1.0,
        "policies": [
            policy("fallback", levels=["cached"]),
            policy("retry", on=["VendorError", "TimeoutError"], retry_after="asked"),
            policy("rate_limit", limits=["10/s"], key="by_user"),
            policy("breaker", shared="redis", name="vendor", is_failure="is_bad"),
            policy("timeout", seconds=1.0, sync="thread"),
        ],
    }
    assert simulated(table) == {
        "max_wait": 1.0,
        "policies": [
            policy("retry", on=["ConnectionError", "TimeoutError"]),
            policy("breaker"),
            policy("timeout", seconds=1.0),
        ],
    }
