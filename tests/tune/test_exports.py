"""Prometheus exports give the same measurements as the process that made them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from seawall import Breaker, Guard, Timeout, registry
from seawall.models.histogram import BOUNDS
from seawall.resources import Pool
from seawall.sim.services import pause
from seawall.telemetry.prometheus import SeawallCollector
from seawall.testing import run_virtual
from seawall.tune import measurements_of, read_export, tuning_snapshot


async def fail() -> None:
    """Fail."""
    raise ConnectionError


def test_an_export_is_read_as_what_was_measured():
    """Counts, latencies and refusals are those of the snapshot; settings are not in it."""

    async def main() -> None:
        with registry.emptied():
            guard = Guard('my "vendor"\\n', Breaker(), Timeout(0.3))
            pool = Pool(object, name="database", max_size=5)
            for tenth in range(1, 5):
                try:
                    await guard.acall(pause, tenth / 10 + 0.01)
                except TimeoutError:
                    pass
            for _ in range(2):
                with pytest.raises(ConnectionError):
                    await guard.acall(fail)
            with pool.borrow():
                pass
            collector = CollectorRegistry()
            collector.register(SeawallCollector(100))
            text = generate_latest(collector).decode()
            known = {one.name: one for one in measurements_of(tuning_snapshot())}
            settings = tuning_snapshot()["settings"]
            read = read_export(text, seconds=60.0)
            found = {one.name: one for one in measurements_of(read)}
            assert set(found) == set(known)
            mine, theirs = found[guard.name], known[guard.name]
            assert theirs.timed_out == 2
            for name in ("succeeded", "failed", "timed_out", "rejected", "retries", "error_rate"):
                assert getattr(mine, name) == getattr(theirs, name)
            assert mine.tally.counts == theirs.tally.counts
            assert mine.tally.sum == pytest.approx(theirs.tally.sum)
            assert mine.seconds == 60
            assert mine.table is None
            assert found["database"].table == known["database"].table
            assert found["database"].samples == 1
            with_settings = {
                one.name: one for one in measurements_of(read | {"settings": settings})
            }
            assert with_settings[guard.name].table == theirs.table

    run_virtual(main())


def test_refusals_belong_to_their_policy():
    """With settings, what an export counts by kind of policy is found at its place."""
    text = """
    seawall_rejected_total{guard="vendor",policy="bulkhead",pod="a"} 3
    seawall_rejected_total{guard="vendor",policy="bulkhead",pod="b"} 4
    seawall_breaker_transitions_total{guard="vendor",to="open"} 5
    seawall_breaker_state{guard="vendor",state="closed"} 0
    seawall_breaker_state{guard="vendor",state="open"} 1
    other_metric{guard="vendor"} 7
    """
    settings = (
        '[[guards.vendor.policies]]\npolicy = "breaker"\n'
        '[[guards.vendor.policies]]\npolicy = "bulkhead"\nlimit = 3\n'
    )
    lines = "\n".join(line.strip() for line in text.splitlines())
    (vendor,) = measurements_of(read_export(lines) | {"settings": settings})
    assert vendor.policies[0]["transitions"] == {"open": 5}
    assert vendor.policies[0]["state"] == "open"
    assert vendor.is_failing
    assert vendor.policies[1]["rejected"] == 7


def test_other_texts_are_refused():
    """What is no export of Seawall says so."""
    with pytest.raises(ValueError, match="no metrics of Seawall"):
        read_export("up 1\n")
    with pytest.raises(ValueError, match="a line that is none"):
        read_export('seawall_retries_total{guard="a"} many\n')


def test_an_incomplete_histogram_is_refused():
    """The missing buckets may be those of the slowest calls."""
    lines = [
        f'seawall_attempt_duration_seconds_bucket{{guard="a",le="{bound}"}} 20000'
        for bound in (*BOUNDS, "+Inf")
    ]
    (whole,) = measurements_of(read_export("\n".join(lines)))
    assert whole.samples == 20_000
    for text in ("\n".join(lines[:20]), "\n".join(lines[:9] + lines[10:])):
        with pytest.raises(ValueError, match="the export is incomplete"):
            read_export(text)


def test_names_may_have_characters_that_end_lines_elsewhere():
    """Only a line feed ends a line of an export."""
    name = "a\x85b\u2028seawall_retries_total"
    (found,) = measurements_of(read_export(f'seawall_retries_total{{guard="{name}"}} 3\n'))
    assert (found.name, found.retries) == (name, 3)
