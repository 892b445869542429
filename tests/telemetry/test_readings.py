from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seawall
from seawall import Breaker, Guard
from seawall.members import MemberState, MemberView
from seawall.resources import Pool
from seawall.telemetry import METRICS
from seawall.telemetry.metrics import BY_NAME, Metric
from seawall.telemetry.readings import autoscale_load, readings_of
from seawall.telemetry.series import OTHER, Series, label
from seawall.testing import run_virtual
from tests.support import falsified, let_pass
from tests.telemetry.world import Members

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "telemetry.md"
UNITS = {"1", "s", "By", "{token}"}


def _values(snapshot: Any) -> dict[tuple[str, ...], float]:
    return {(one.metric.name, *one.labels): one.value for one in readings_of(snapshot)}


# The table


def test_names_follow_the_rules_of_prometheus():
    """Counters end with _total, seconds with _seconds; each name and label is a legal one."""
    for metric in METRICS:
        assert re.fullmatch(r"(seawall|gen_ai_client)_[a-z][a-z_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        bare = metric.name.removesuffix("_total")
        assert bare.endswith("_seconds") == (metric.unit == "s")
        assert metric.unit in UNITS
        assert metric.help
        assert metric.source
        assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in metric.labels)
        assert not {"key", "user", "path", "route", "tenant", "id"} & set(metric.labels)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert len({metric.otel_name for metric in METRICS}) == len(METRICS)


@pytest.mark.usefixtures("world")
def test_every_metric_is_read_from_something():
    """In a world with one of everything each metric has a value, but for those of trouble."""
    told = {one.metric.name for one in readings_of(seawall.snapshot())}
    rare = {"seawall_unreadable", "seawall_series_folded"}
    assert told == {metric.name for metric in METRICS} - rare, (
        "read the metric in seawall/telemetry/readings.py, and see that an object in"
        " tests/telemetry/world.py has it"
    )


@pytest.mark.usefixtures("world")
def test_sources_are_kinds_of_objects_and_policies():
    """What a metric says it is read from is a kind in the snapshot, or a policy of a guard."""
    snapshot = seawall.snapshot()
    kinds = {"policy", *snapshot}
    kinds |= {policy["policy"] for guard in snapshot["guard"] for policy in guard["policies"]}
    sources = [part for metric in METRICS for part in metric.source.split("; ") if ": " in part]
    named = {kind for source in sources for kind in source.split(": ")[0].split(", ")}
    assert named - kinds == set()


@pytest.mark.usefixtures("world")
def test_values_are_those_of_the_snapshot():
    """What was done is what is told."""
    told = _values(seawall.snapshot())
    assert told["seawall_attempts_total", "w-vendor", "failed"] == 2
    assert told["seawall_rejected_total", "w-vendor", "breaker"] == 2
    assert told["seawall_retries_total", "w-vendor"] == 1
    assert told["seawall_fallbacks_total", "w-vendor", "1"] == 3
    assert told["seawall_breaker_transitions_total", "w-vendor", "open"] == 1
    assert told["seawall_breaker_state", "w-vendor", "closed"] == 1
    assert told["seawall_breaker_open_keys", "w-keyed"] == 1
    assert told["seawall_shed_total", "w-shed", "criticality", "sheddable"] == 1
    assert told["seawall_queue_depth", "queue", "w-queue"] == 1
    assert told["seawall_queue_depth", "outbox", "w-outbox"] == 1
    assert told["seawall_queue_depth", "jobs", "w-jobs"] == 1
    assert told["seawall_outbox_blocked_aggregates", "w-outbox"] == 0
    assert told["seawall_pool_borrowed_total", "w-pool"] == 1


# Pipelines


@pytest.mark.usefixtures("world")
def test_pipelines_and_collections_are_read():
    """Items by source, end and stage; failures by type; times in a stage; what is missing."""
    told = _values(seawall.snapshot())
    assert told["seawall_pipeline_read_total", "w-pipeline", "items"] == 3
    assert told["seawall_pipeline_ended_total", "w-pipeline", "sink"] == 2
    assert told["seawall_pipeline_ended_total", "w-pipeline", "dead_letter"] == 1
    assert told["seawall_pipeline_running", "w-pipeline"] == 0
    assert told["seawall_pipeline_stage_items_total", "w-pipeline", "odd", "done"] == 2
    assert told["seawall_pipeline_stage_items_total", "w-pipeline", "odd", "dead_letter"] == 1
    assert told["seawall_pipeline_stage_failures_total", "w-pipeline", "odd", "ValueError"] == 1
    assert told["seawall_queue_dead", "dead_letters", "w-pipeline"] == 1
    assert told["seawall_collect_sources", "w-sites", "ok"] == 1
    assert told["seawall_collect_sources", "w-sites", "unavailable"] == 1
    assert told["seawall_collect_collections_total", "w-sites", "degraded"] == 1
    assert ("seawall_collect_missing_seconds", "w-sites", "S2") in told
    (times,) = (
        one
        for one in readings_of(seawall.snapshot())
        if one.metric.name == "seawall_pipeline_stage_duration_seconds"
    )
    assert sum(times.counts) == 2


def test_only_the_sources_that_are_missing_for_longest_are_exported():
    """Of a thousand sources, ten: a metric stays small."""
    missing = [
        {"source": f"S{number}", "state": "unavailable", "since": float(number), "cause": "x"}
        for number in range(1000)
    ]
    seen = {"name": "sites", "sources": 1000, "missing": missing}
    told = _values({"collect": [{**seen, "collections": 9, "degraded": 9, "too_few": 4}]})
    found = {key[2] for key in told if key[0] == "seawall_collect_missing_seconds"}
    assert found == {f"S{number}" for number in range(990, 1000)}
    assert told["seawall_collect_collections_total", "sites", "too_few"] == 4
    assert told["seawall_collect_collections_total", "sites", "degraded"] == 5


def test_letters_of_a_database_are_counted_as_those_of_memory():
    """What waits to be replayed has an age there."""
    stored = {"dead": [3, 70.0], "waiting": [2, 40.0], "claimed": [0, 0.0]}
    told = _values({"dead_letters": [{"name": "orders", "stored": stored, "stored_age": 1.0}]})
    assert told["seawall_queue_dead", "dead_letters", "orders"] == 3
    assert told["seawall_queue_depth", "dead_letters", "orders"] == 2
    assert told["seawall_queue_age_seconds", "dead_letters", "orders"] == 40.0


# Members


def test_members_are_counted_by_state_and_by_what_became_of_suspicions():
    """Suspicions, their ends, own pauses, health, messages and bytes are read as they are."""
    views = [
        MemberView("a", MemberState.SUSPECTED, 0.0, level=9.0, threshold=8.0),
        MemberView("b", MemberState.ALIVE, 0.0, level=2.0, threshold=8.0),
        MemberView("c", MemberState.CONFIRMED, 0.0, level=50.0, threshold=8.0),
    ]
    members = Members("pods", *views)
    for after in ("alive", "confirmed"):
        members.change("a", "alive", "suspected")
        members.change("a", "suspected", after, silence=3.0)
    members.group.note_own_pause(6.5)
    members.group.round_trips.add(0.3)
    members.health_score = 2
    members.messages.update(sent=7, received=5, refused=1)
    members.bytes.update(sent=700, received=500)
    told = _values({"members": [{**members.snapshot(), "name": "pods"}]})
    states = ("unknown", "alive", "suspected", "confirmed", "left")
    assert [told["seawall_members", "pods", state] for state in states] == [0, 1, 1, 1, 0]
    changes = {
        result: told["seawall_member_changes_total", "pods", result]
        for result in ("suspected", "cleared", "confirmed", "left")
    }
    assert changes == {"suspected": 2, "cleared": 1, "confirmed": 1, "left": 0}
    assert told["seawall_member_false_suspect_ratio", "pods"] == 0.5
    assert told["seawall_member_detection_seconds", "pods"] == 3.0
    assert told["seawall_member_round_trip_seconds", "pods"] == pytest.approx(0.3, rel=0.04)
    assert told["seawall_member_own_pauses_total", "pods"] == 1
    assert told["seawall_member_own_pause_seconds_total", "pods"] == 6.5
    assert told["seawall_member_health_score", "pods"] == 2
    assert told["seawall_member_messages_total", "pods", "refused"] == 1
    assert told["seawall_member_bytes_total", "pods", "sent"] == 700
    levels = {key[2]: value for key, value in told.items() if "member_level" in key[0]}
    assert levels == {"a": 9 / 8, "b": 2 / 8}


def test_only_the_most_suspected_members_have_a_series_of_their_own():
    """A group of a thousand makes ten series: those next to suspicion, of the present ones."""
    views = [
        MemberView(f"pod-{number}", MemberState.ALIVE, 0.0, level=number / 1000.0)
        for number in range(1000)
    ]
    views.append(MemberView("dead", MemberState.CONFIRMED, 0.0, level=99.0))
    Random(1).shuffle(views)
    members = Members("pods", *views)
    told = _values({"members": [{**members.snapshot(), "name": "pods"}]})
    levels = {key[2]: value for key, value in told.items() if "member_level" in key[0]}
    assert levels == {f"pod-{number}": number / 1000.0 for number in range(990, 1000)}


# Shapes

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.just(10**400), st.floats(), st.text(max_size=3)
)
PLAIN = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.text(max_size=3), LEAVES)
WORDS = """policy policies state keys transitions shed_classes partitions limit in_flight waiting
    budget stopped levels stored stored_age hosts checks wait histogram counts sum succeeded
    concurrency at_work members counts messages level threshold"""
KEYS = st.sampled_from(WORDS.split())
KINDS = st.sampled_from(
    ("guard", "pool", "jobs", "queue", "outbox", "worker", "health", "members", "nobody")
)
SHOWN = st.dictionaries(KEYS, PLAIN, max_size=4)
THINGS = st.dictionaries(KEYS, PLAIN | SHOWN | st.lists(SHOWN, max_size=2), max_size=4)


@given(st.dictionaries(KINDS, st.lists(THINGS, max_size=2), max_size=2))
def test_any_shape_is_read_without_an_error(snapshot: Any):
    """A policy of the user's own may show anything: what is no number is left out."""
    for one in readings_of(snapshot):
        assert isinstance(one.value, float)
        assert len(one.labels) == len(one.metric.labels)
        assert all(isinstance(value, str) for value in one.labels)


def test_equal_labels_are_told_once_by_sum_or_maximum():
    """Two channels of one name are one series."""
    one = {"name": "c", "depth": 2, "oldest_age": 1.0, "put": 3}
    two = {"name": "c", "depth": 5, "oldest_age": 0.5, "put": 4}
    told = _values({"channel": [one, two]})
    assert told["seawall_channel_items_total", "c", "put"] == 7
    assert told["seawall_queue_age_seconds", "channel", "c"] == 1.0


def test_one_that_is_lost_is_not_hidden_by_another():
    """Two stores of one name, or two shared policies of one guard: 0 if one of them is lost."""
    modes = [{"policy": "rate_limit", "shared": {"mode": mode}} for mode in ("shared", "local")]
    stores = [{"name": "redis", "up": up} for up in (True, False, True)]
    told = _values({"guard": [{"name": "v", "policies": modes}], "store": stores})
    assert told["seawall_policy_shared", "v", "rate_limit"] == 0
    assert told["seawall_store_up", "redis"] == 0


def test_several_in_one_state_are_told_as_one():
    """Two breakers of a guard, two of a name: a state is 1 if one of them is in it."""
    breakers = [{"policy": "breaker", "state": state} for state in ("open", "open", "closed")]
    told = _values(
        {
            "guard": [{"name": "v", "policies": breakers}],
            "health": [{"name": "s", "levels": {"ready": "unhealthy"}}] * 2,
            "lifecycle": [{"name": "s", "state": "ready", "in_flight": 1}] * 2,
            "service_levels": [{"name": "l", "level": "full"}, {"name": "l", "level": "static"}],
        }
    )
    states = {key[-1] for key in told if key[0] == "seawall_breaker_state" and told[key] == 1}
    assert states == {"open", "closed"}
    assert told["seawall_health_state", "s", "ready", "unhealthy"] == 1
    assert told["seawall_lifecycle_state", "s", "ready"] == 1
    assert told["seawall_requests_in_flight", "s"] == 2
    assert (
        told["seawall_service_level", "l", "full"] == told["seawall_service_level", "l", "static"]
    )
    assert max(told.values()) == 2


def test_what_was_refused_late_is_one_counter_of_all_kinds():
    """It is the number to watch, so it is not one among many results."""
    counts = {"name": "n", "refused_late": 2, "done": 1}
    kinds = ("dispatcher", "jobs", "idempotency", "idempotent_requests")
    told = _values({kind: [counts] for kind in kinds})
    for kind in kinds:
        assert told["seawall_refused_late_total", kind, "n"] == 2
    assert not [key for key in told if key[-1] == "refused_late"]
    assert told["seawall_worker_jobs_total", "dispatcher", "n", "done"] == 1


def test_trouble_is_counted():
    """Who cannot be read is missed."""
    told = _values({"queue": [{"name": "a", "stored_error": "gone"}, {"name": "b"}]})
    assert told["seawall_unreadable", "queue"] == 1


@given(st.text())
def test_a_label_is_short_and_legible(text: str):
    """Whatever a thing is called."""
    assert len(label(text)) <= 120
    assert label(text).isprintable()


def test_names_that_differ_at_their_end_are_two():
    """A long one is cut, and ends with what tells it from others."""
    guards = [{"name": "x" * 299 + end, "retries": 1} for end in "ab"]
    told = [key for key in _values({"guard": guards}) if key[0] == "seawall_retries_total"]
    assert len(told) == 2
    assert all(name.startswith("x" * 100) for _, name in told)
    assert label("x" * 120) == "x" * 120


# Cardinality


def _bounded(case: tuple[int, int]) -> None:
    number, cap = case
    guards = [{"name": f"g{n}", "succeeded": n, "failed": 1} for n in range(number)]
    told = Series(cap).bounded(readings_of({"guard": guards}))
    attempts = [one for one in told if one.metric.name == "seawall_attempts_total"]
    own = [one for one in attempts if one.labels[0] != OTHER]
    assert len(own) <= cap
    assert len(attempts) - len(own) <= 2
    assert sum(one.value for one in attempts) == sum(range(number)) + number


CASES = st.tuples(st.integers(0, 60), st.integers(10, 40))


@given(CASES)
def test_series_stay_below_the_cap_and_nothing_is_lost(case: tuple[int, int]):
    """What is beyond the cap is told together, and the sum is the same."""
    _bounded(case)


def test_without_the_cap_series_grow_with_names(monkeypatch):
    """The safeguard is what bounds them."""
    monkeypatch.setattr(Series, "_admit", lambda _self, _name, owners: dict.fromkeys(owners))
    assert falsified(_bounded, CASES)


def test_a_series_keeps_its_name_while_others_come_and_go():
    """A counter that moved into "other" and back would seem to start again."""
    series = Series(10)

    def told(names: list[str]) -> set[str]:
        guards = [{"name": name, "retries": 1} for name in names]
        found = series.bounded(readings_of({"guard": guards}))
        return {one.labels[0] for one in found if one.metric.name == "seawall_retries_total"}

    first = [f"m{n}" for n in range(10)]
    assert told(first) == set(first)
    assert told(["a", *first]) == {*first, OTHER}
    assert told(["a", *first[1:]]) == {"a", *first[1:]}


def test_ten_thousand_random_names_reasons_and_keys_are_bounded():
    """Nobody's keys are labels, and made-up names and reasons fill the cap and no more."""
    chance = Random(7)

    def word() -> str:
        return "".join(chance.choices('abcdefghij\n"\\é', k=12))

    keyed = Guard("readings keyed", Breaker(consecutive=1, key=lambda key: key, max_keys=10_000))
    for _ in range(10_000):
        keyed.attempt(_fail, word())
    made_up = [
        {
            "name": word(),
            "succeeded": 1,
            "policies": [
                {"policy": "retry", "stopped": {word(): 1}},
                {"policy": "shed", "shed_classes": {word(): {word(): 1}}},
                {"policy": word(), "rejected": 1},
            ],
        }
        for _ in range(10_000)
    ]
    shown = seawall.snapshot()
    series = Series()
    real = series.bounded(readings_of(shown))
    (open_keys,) = [one for one in real if one.metric.name == "seawall_breaker_open_keys"]
    assert open_keys.value > 9_000
    assert len(real) < 500
    told = series.bounded(readings_of({**shown, "guard": [*shown["guard"], *made_up]}))
    numbers: dict[str, int] = {}
    for one in told:
        numbers[one.metric.name] = numbers.get(one.metric.name, 0) + 1
    assert max(numbers.values()) <= 1010
    folded = {one.labels[0] for one in told if one.metric.name == "seawall_series_folded"}
    assert {
        "seawall_attempts_total",
        "seawall_retries_stopped_total",
        "seawall_shed_total",
    } <= folded


def _fail(_key: str) -> None:
    raise ConnectionError


def test_something_may_be_called_other():
    """Then it is told with all others, and not twice."""
    guards = [{"name": name, "retries": 1} for name in (OTHER, *"abcdefghijklmnop")]
    told = Series(10).bounded(readings_of({"guard": guards}))
    series = [(one.metric.name, one.labels) for one in told]
    assert len(set(series)) == len(series)
    assert sum(one.value for one in told if one.metric.name == "seawall_retries_total") == 17


# The number to scale on


def test_the_load_is_that_of_the_fullest_part():
    """Edges, executors and workers count; what protects a dependency does not."""
    vendor = {"name": "v", "policies": [{"policy": "bulkhead", "limit": 1, "in_flight": 1}]}
    assert autoscale_load({"guard": [vendor]}) == 0
    turns = {"policy": "loop_admission", "busy": 0.4}
    limit = {"policy": "adaptive_limit", "limit": 10, "in_flight": 5, "waiting": 1}
    assert autoscale_load({"guard": [{"name": "edge", "policies": [turns, limit]}]}) == 0.6
    assert autoscale_load({"executor": [{"workers": 2, "in_flight": 2, "waiting": 1}]}) == 1.5
    worker = {"name": "q", "concurrency": 4, "at_work": 4, "running": True}
    assert autoscale_load({"worker": [worker]}) == 1
    assert autoscale_load({"worker": [worker], "queue": [{"name": "q", "waiting": 900}]}) == 2
    assert autoscale_load({"worker": [{**worker, "running": False}]}) == 0


def test_a_pool_at_its_limit_tells_how_long_its_borrowers_waited():
    """One resource, three who want it for two seconds each: they wait for none, two and four."""

    async def main() -> dict[Any, float]:
        pool = Pool(list, name="narrow", max_size=1, max_waiting=5, checkout_timeout=9.0)

        async def use() -> None:
            async with pool.borrow():
                await let_pass(2.0)

        await asyncio.gather(*(use() for _ in range(3)))
        told = _values(seawall.snapshot())
        await pool.aclose()
        return told

    told = run_virtual(main())
    assert told["seawall_pool_wait_seconds", "narrow"] == pytest.approx(6.0, rel=0.04)
    assert told["seawall_pool_borrowed_total", "narrow"] == 3


@pytest.mark.parametrize("metric", BY_NAME.values(), ids=lambda metric: metric.name)
def test_names_are_as_prometheus_wants_them(metric: Metric):
    """What its own linter asks for: reserved labels are those of its own kinds of metrics."""
    assert not {"quantile", "le", "job", "instance"} & set(metric.labels)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help
    assert metric.name == metric.name.lower()
    assert not any(label.startswith("__") for label in metric.labels)
