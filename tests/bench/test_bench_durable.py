"""The cases on real databases: whether they work, not how fast. So it runs beside other tests."""

from __future__ import annotations

from bench import durable
from tests.bench.found import written


def test_durable_cases_run_on_real_databases():
    """Each makes its writes, and the outbox is drained."""
    plan = durable.Plan(rounds=1, seconds=0.02, events=2000)
    rates = durable.measure(plan, lambda _text: None)
    assert rates.keys() == written().keys()
    for table, cases in rates.items():
        assert cases.keys() == written()[table].keys()
        assert all(rate > 0.0 for own in cases.values() for rate in own)
