"""Whether the alerts fire: when they should, and only then, by readings that are made up."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seawall.telemetry import thresholds as threshold
from seawall.telemetry.alerts import alert_rules
from tests.telemetry.promql import Prometheus, Rule

yaml = pytest.importorskip("yaml")
(GROUP,) = yaml.safe_load(alert_rules())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
STEP = 30.0
"""Seconds between two readings that are made up; all times of rules are multiples of it."""


# Readings that are made up


def _fires(
    name: str, tell: Callable[[Prometheus, float, int], None], seconds: float | None = None
) -> bool:
    """Tell whether the alert fires within its time and a window, each step told by `tell`."""
    prometheus, rule = Prometheus(), Rule(RULES[name])
    lasts = rule.lasts + threshold.WINDOW + 2 * STEP if seconds is None else seconds
    for step in range(int(lasts / STEP) + 1):
        tell(prometheus, step * STEP, step)
        if rule.look(prometheus, step * STEP):
            return True
    return False


def _calls(prometheus: Prometheus, at: float, step: int, **outcomes: float) -> None:
    for outcome, each in outcomes.items():
        total = each * step
        prometheus.tell(at, "seawall_attempts_total", total, guard="vendor", outcome=outcome)


@given(refused=st.integers(0, 200), others=st.integers(1, 1000))
def test_circuit_open_rate_fires_above_five_percent(refused: int, others: int):
    """It fires if, and only if, more than 5 % of the calls meet an open circuit."""
    share = refused / (refused + others)
    assume(abs(share - threshold.CIRCUIT_OPEN) > 1e-9)

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        _calls(prometheus, at, step, succeeded=others, rejected=refused)
        labels = {"guard": "vendor", "policy": "breaker"}
        prometheus.tell(at, "seawall_rejected_total", refused * step, **labels)
        # A full bulkhead is no open circuit.
        labels["policy"] = "bulkhead"
        prometheus.tell(at, "seawall_rejected_total", others * step, **labels)

    assert _fires("SeawallCircuitOpenRate", tell) == (share > threshold.CIRCUIT_OPEN)


@given(st.integers(1, 40))
def test_one_refusal_in_an_hour_is_no_open_circuit(spread: int):
    """Where hardly anybody calls, a share means nothing."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        total = float(step >= spread)
        prometheus.tell(at, "seawall_attempts_total", total, guard="v", outcome="rejected")
        prometheus.tell(at, "seawall_rejected_total", total, guard="v", policy="breaker")

    assert not _fires("SeawallCircuitOpenRate", tell, seconds=3600)


def test_without_the_least_number_of_calls_one_refusal_would_fire():
    """The condition on the number of calls is needed: a share of one call is all or nothing."""
    share, _, enough = RULES["SeawallCircuitOpenRate"]["expr"].rpartition("\nand\n")
    prometheus = Prometheus()
    for step in range(8):
        at, total = step * STEP, float(step >= 4)
        prometheus.tell(at, "seawall_attempts_total", total, guard="v", outcome="rejected")
        prometheus.tell(at, "seawall_rejected_total", total, guard="v", policy="breaker")
    assert prometheus.ask(share, at)
    assert not prometheus.ask(enough, at)


@given(failed=st.integers(0, 300), succeeded=st.integers(1, 1000))
def test_error_ratio_fires_above_ten_percent(failed: int, succeeded: int):
    """It fires if, and only if, more than 10 % of what was attempted failed."""
    share = failed / (failed + succeeded)
    assume(abs(share - threshold.ERROR_RATIO) > 1e-9)

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        _calls(prometheus, at, step, succeeded=succeeded, failed=failed, rejected=500)

    assert _fires("SeawallErrorRatio", tell) == (share > threshold.ERROR_RATIO)


@given(shed=st.integers(0, 200), others=st.integers(1, 1000))
def test_shedding_fires_above_five_percent(shed: int, others: int):
    """It fires if, and only if, more than 5 % of the calls are shed."""
    share = shed / (shed + others)
    assume(abs(share - threshold.SHED) > 1e-9)

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        _calls(prometheus, at, step, succeeded=others, rejected=shed)
        for number, reason in enumerate(("criticality", "queue_time")):
            part = (shed + number) // 2 * step
            labels = {"guard": "vendor", "reason": reason, "class": "CRITICAL"}
            prometheus.tell(at, "seawall_shed_total", part, **labels)

    assert _fires("SeawallShedding", tell) == (share > threshold.SHED)


@pytest.mark.parametrize("stopped", [0, 1, 5])
@pytest.mark.parametrize("spent", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("calls", [0, 40])
def test_retry_budget_fires_when_retries_are_refused(stopped: int, spent: float, calls: int):
    """It fires if, and only if, retries are refused: not for a budget that is not refilled yet."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        _calls(prometheus, at, step, succeeded=calls)
        prometheus.tell(at, "seawall_retry_budget_spent_ratio", spent, guard="vendor")
        for cause, number in (("budget", stopped), ("attempts", 9)):
            labels = {"guard": "vendor", "cause": cause}
            prometheus.tell(at, "seawall_retries_stopped_total", number * step, **labels)

    assert _fires("SeawallRetryBudgetSpent", tell) == (stopped > 0)


def test_retries_that_were_refused_once_do_not_fire():
    """Refusals of a moment, however many, are over before it fires."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        labels = {"guard": "vendor", "cause": "budget"}
        prometheus.tell(at, "seawall_retries_stopped_total", 50 * (step >= 4), **labels)

    assert not _fires("SeawallRetryBudgetSpent", tell, seconds=3600)


GAUGES: dict[str, tuple[str, dict[str, str], float]] = {
    "SeawallSaturated": ("autoscale_load", {}, threshold.LOAD),
    "SeawallSlotsFull": (
        "slot_wait_seconds",
        {"guard": "v", "policy": "bulkhead"},
        threshold.SLOT_WAIT_SECONDS,
    ),
    "SeawallAbandonedThreads": ("abandoned_threads", {"guard": "v"}, threshold.ABANDONED_THREADS),
    "SeawallLoopLag": ("loop_lag_seconds", {"watchdog": "w"}, threshold.LOOP_LAG_SECONDS),
    "SeawallOutboxOld": ("outbox_age_seconds", {"outbox": "o"}, threshold.OUTBOX_AGE_SECONDS),
    "SeawallAggregateBlocked": (
        "outbox_blocked_aggregates",
        {"outbox": "o"},
        threshold.BLOCKED_AGGREGATES,
    ),
    "SeawallQueueOld": (
        "queue_age_seconds",
        {"kind": "queue", "name": "q"},
        threshold.QUEUE_AGE_SECONDS,
    ),
    "SeawallDeadLetters": ("queue_dead", {"kind": "jobs", "name": "j"}, threshold.DEAD),
    "SeawallReadingOld": (
        "reading_age_seconds",
        {"kind": "outbox", "name": "o"},
        threshold.READING_AGE_SECONDS,
    ),
    "SeawallStageStalled": (
        "pipeline_stage_oldest_seconds",
        {"pipeline": "p", "stage": "s"},
        threshold.STAGE_AGE_SECONDS,
    ),
    "SeawallSourceMissing": (
        "collect_missing_seconds",
        {"collect": "c", "source": "S1"},
        threshold.MISSING_SECONDS,
    ),
    "SeawallUnreadable": ("unreadable", {"kind": "queue"}, threshold.UNREADABLE),
    "SeawallSeriesFolded": ("series_folded", {"metric": "m"}, threshold.FOLDED),
}
"""Rules about one gauge: its name, its labels, and the value above which it is wrong."""

STATES: dict[str, tuple[str, dict[str, str], float]] = {
    "SeawallBreakerIsolated": ("breaker_state", {"guard": "v", "state": "isolated"}, 1),
    "SeawallUnhealthy": (
        "health_state",
        {"service": "s", "level": "ready", "state": "unhealthy"},
        1,
    ),
    "SeawallSourceFailing": (
        "pipeline_source_failing",
        {"pipeline": "p", "source": "s"},
        1,
    ),
    "SeawallStoreLost": ("store_up", {"store": "s"}, 0),
    "SeawallPolicyAlone": ("policy_shared", {"guard": "v", "policy": "breaker"}, 0),
}
"""Rules about a gauge that is 1 or 0: its name, its labels, and what is wrong."""

COUNTED = {
    "SeawallCircuitOpenRate",
    "SeawallErrorRatio",
    "SeawallShedding",
    "SeawallRetryBudgetSpent",
    "SeawallBreakerFlapping",
    "SeawallFifoGap",
    "SeawallRefusedLate",
    "SeawallHostsOut",
    "SeawallPoolWait",
    "SeawallFalseSuspects",
    "SeawallPipelineFailing",
    "SeawallTooFewSources",
}
"""Rules that have tests of their own."""


def test_each_rule_is_shown_to_fire():
    """None is left out of the tests of what fires and what does not."""
    assert set(RULES) == {*GAUGES, *STATES, *COUNTED}


@pytest.mark.parametrize("name", GAUGES)
@given(over=st.floats(1e-6, 1e6), under=st.floats(0, 1))
def test_gauges_fire_above_their_threshold(name: str, over: float, under: float):
    """It fires if, and only if, the value is above the threshold for long enough."""
    metric, labels, limit = GAUGES[name]
    rule = Rule(RULES[name])

    def tell(value: float) -> Callable[[Prometheus, float, int], None]:
        return lambda prometheus, at, _step: prometheus.tell(
            at, f"seawall_{metric}", value, **labels
        )

    within = rule.lasts + 2 * STEP
    assert _fires(name, tell(limit + over), within)
    assert not _fires(name, tell(limit + over), rule.lasts - STEP)
    assert not _fires(name, tell(limit * under), within)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("other", ["same", "well"])
def test_states_fire_while_they_are_wrong(name: str, other: str):
    """One process that is wrong is enough; none is no alert."""
    metric, labels, wrong = STATES[name]
    rule = Rule(RULES[name])

    def tell(value: float) -> Callable[[Prometheus, float, int], None]:
        def told(prometheus: Prometheus, at: float, _step: int) -> None:
            prometheus.tell(at, f"seawall_{metric}", value, **labels)
            another = value if other == "same" else 1 - wrong
            prometheus.tell(at, f"seawall_{metric}", another, instance="pod-2", **labels)

        return told

    within = rule.lasts + 2 * STEP
    assert _fires(name, tell(wrong), within)
    assert not _fires(name, tell(wrong), rule.lasts - STEP)
    assert not _fires(name, tell(1 - wrong), within)


@pytest.mark.parametrize("name", [name for name in STATES if STATES[name][2] == 1])
def test_two_that_are_wrong_fire_as_one_does(name: str):
    """Where a series has two of them, and their sum is told, it is wrong all the more."""
    metric, labels, _ = STATES[name]

    def tell(prometheus: Prometheus, at: float, _step: int) -> None:
        prometheus.tell(at, f"seawall_{metric}", 2.0, **labels)

    assert _fires(name, tell)


@pytest.mark.parametrize(("closings", "fires"), [(0, False), (2, False), (5, True)])
def test_flapping_is_closing_again_and_again(closings: int, fires: bool):  # noqa: FBT001
    """It fires where a breaker closes more than three times in five minutes, and goes on so."""
    steps = threshold.WINDOW / STEP

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        total = int(step * closings / steps)
        labels = {"guard": "vendor", "to": "closed"}
        prometheus.tell(at, "seawall_breaker_transitions_total", total, **labels)
        labels["to"] = "open"  # an outage: it opens after each probe, and that is no flapping
        prometheus.tell(at, "seawall_breaker_transitions_total", step, **labels)

    assert _fires("SeawallBreakerFlapping", tell) == fires


@given(st.integers(0, 3))
def test_a_gap_fires_at_once(gaps: int):
    """A missing message is told as soon as it is known to be missing."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        prometheus.tell(at, "seawall_fifo_gaps_total", gaps if step > 1 else 0, name="orders")

    assert _fires("SeawallFifoGap", tell, 3 * STEP) == (gaps > 0)


@given(st.integers(0, 3))
def test_an_answer_that_was_refused_late_fires_at_once(late: int):
    """Each may stand for something that was done twice."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        labels = {"kind": "jobs", "name": "reports"}
        prometheus.tell(at, "seawall_refused_late_total", late if step > 1 else 0, **labels)

    assert _fires("SeawallRefusedLate", tell, 3 * STEP) == (late > 0)


@given(slow=st.integers(0, 30), quick=st.integers(0, 3000))
def test_pool_wait_fires_by_the_p99_of_all_processes(slow: int, quick: int):
    """It fires if, and only if, more than one borrower in a hundred waits too long, of all pods."""
    assume(slow * 100 != slow + quick)

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        # One pod is slow and has few borrowers: its own p99 says nothing of all.
        for instance, bound, number in (("pod-1", 1.0, slow), ("pod-2", 0.25, quick)):
            for upper in (0.25, 0.5, 1.0, inf):
                total = number * step if upper >= bound else 0
                labels = {"pool": "p", "le": str(upper), "instance": instance}
                prometheus.tell(at, "seawall_pool_wait_seconds_bucket", total, **labels)

    assert _fires("SeawallPoolWait", tell) == (slow * 100 > slow + quick)


@given(serving=st.integers(0, 9), ejected=st.integers(0, 9))
def test_hosts_out_fires_when_most_do_not_serve(serving: int, ejected: int):
    """It fires if, and only if, more than half of the hosts do not serve."""

    def tell(prometheus: Prometheus, at: float, _step: int) -> None:
        for state, number in (("serving", serving), ("ejected", ejected), ("failing checks", 0)):
            prometheus.tell(at, "seawall_upstream_hosts", number, upstreams="u", state=state)

    assert _fires("SeawallHostsOut", tell) == (ejected > serving)


@given(dead=st.integers(0, 40), stored=st.integers(0, 400))
def test_pipelines_fail_when_too_many_items_are_dead_letters(dead: int, stored: int):
    """It fires if, and only if, more than 5 % are, and more than a few."""
    steps = threshold.WINDOW / STEP

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        for result, number in (("dead_letter", dead), ("sink", stored), ("dropped", 0)):
            labels = {"pipeline": "orders", "result": result}
            prometheus.tell(at, "seawall_pipeline_ended_total", number * step / steps, **labels)

    assume(abs(dead - threshold.FEW_DEAD_ITEMS) > 0.5)
    assume(abs(dead - threshold.DEAD_ITEMS * (dead + stored)) > 1e-6)
    share = dead / (dead + stored) if dead + stored else 0.0
    fires = share > threshold.DEAD_ITEMS and dead > threshold.FEW_DEAD_ITEMS
    assert _fires("SeawallPipelineFailing", tell) == fires


@pytest.mark.parametrize("result", ["too_few", "degraded"])
def test_too_few_sources_fire_at_once(result: str):
    """A collection that is only degraded does not."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        total = max(0, step - 3)
        labels = {"collect": "sites", "result": result}
        prometheus.tell(at, "seawall_collect_collections_total", total, **labels)

    assert _fires("SeawallTooFewSources", tell, seconds=6 * STEP) == (result == "too_few")


@given(cleared=st.integers(0, 40), confirmed=st.integers(0, 40))
def test_false_suspects_fire_when_most_suspicions_are_wrong(cleared: int, confirmed: int):
    """It fires if, and only if, most of them are wrong, and more than a few are."""
    steps = threshold.WINDOW / STEP

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        ends = (("cleared", cleared), ("confirmed", confirmed), ("suspected", 99), ("left", 99))
        for result, number in ends:
            # Two pods of a service: their suspicions count together.
            for instance in ("pod-1", "pod-2"):
                labels = {"group": "pods", "result": result, "instance": instance}
                total = number * step / steps / 2
                prometheus.tell(at, "seawall_member_changes_total", total, **labels)

    assume(abs(cleared - threshold.FEW_FALSE_SUSPECTS) > 0.5)
    fires = cleared > confirmed and cleared > threshold.FEW_FALSE_SUSPECTS
    assert _fires("SeawallFalseSuspects", tell) == fires


def test_one_pause_of_one_pod_is_no_rising_rate_of_false_suspects():
    """All others suspect and clear it, once: nobody is told."""

    def tell(prometheus: Prometheus, at: float, step: int) -> None:
        labels = {"group": "pods", "result": "cleared"}
        prometheus.tell(at, "seawall_member_changes_total", 49 * (step >= 4), **labels)

    assert not _fires("SeawallFalseSuspects", tell, seconds=3600)


def test_an_old_outbox_is_told_once():
    """Its age is among the ages of queues too, but wakes nobody twice."""

    def tell(prometheus: Prometheus, at: float, _step: int) -> None:
        prometheus.tell(at, "seawall_queue_age_seconds", 900.0, kind="outbox", name="o")

    assert not _fires("SeawallQueueOld", tell)
    prometheus = Prometheus()
    tell(prometheus, 0.0, 0)
    everything = RULES["SeawallQueueOld"]["expr"].replace('{kind!="outbox"}', "")
    assert prometheus.ask(everything, 1.0), "it would, if outboxes were not left out"
