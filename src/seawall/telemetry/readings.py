"""Conversion of a snapshot to readings: pure, without clock, lock or I/O.

Promises:
- Values that are missing or have another shape are omitted; nothing raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from math import isfinite
from typing import Any, Final

from seawall.telemetry.metrics import BY_NAME, full_name
from seawall.telemetry.series import Labels, MetricReading, combined, label

Snapshot = Mapping[str, Iterable[Mapping[str, Any]]]
Sample = tuple[str, Labels, Any]


def readings_of(snapshot: Snapshot) -> list[MetricReading]:
    """Return all readings of `seawall.snapshot()`, by the table of names."""
    found: list[Sample] = []
    for kind, things in snapshot.items():
        read = _READERS.get(kind)
        unreadable = 0
        for thing in things:
            name = str(thing.get("name", ""))
            unreadable += "snapshot_error" in thing or "stored_error" in thing
            if thing.get("stored_age") is not None:
                found.append(("reading_age_seconds", (kind, name), thing["stored_age"]))
            found += _plain(kind, name, thing)
            if read is not None:
                found += _read(read, kind, name, thing)
        if unreadable:
            found.append(("unreadable", (kind,), unreadable))
    found.append(("autoscale_load", (), autoscale_load(snapshot)))
    return combined(_readings(found))


def _readings(values: Iterable[Sample]) -> Iterator[MetricReading]:
    """Drop readings that are no numbers, or no histograms of the right bounds."""
    for name, labels, value in values:
        metric = BY_NAME[full_name(name)]
        numbers = value if isinstance(value, tuple) else (value,)
        expected = len(metric.bounds) + 2 if metric.kind == "histogram" else 1
        if len(numbers) == expected and all(map(_is_number, numbers)):
            first, *counts = map(float, numbers)
            yield MetricReading(
                metric, tuple(label(str(one)) for one in labels), first, tuple(counts)
            )


def autoscale_load(snapshot: Snapshot) -> float:
    """Return how full the fullest part of this process is: 1.0 is full, above that work waits.

    For an edge: its share of the loop's time, and (in flight + waiting) / limit of each of its
    limits. For an executor: (in flight + waiting) / workers. For a worker: (at work + waiting,
    limited to its concurrency) / concurrency. Limits on calls to a dependency do not count: more
    processes would only put more load on it.
    """
    loads = [0.0]
    edges = {str(edge.get("name")) for edge in snapshot.get("edge", ())}
    for guard in snapshot.get("guard", ()):
        policies = _policies(guard)
        if guard.get("name") in edges or any("busy" in policy for policy in policies):
            for policy in policies:
                loads += [_number(policy, "busy"), _fullness(policy, "limit")]
    loads += [_fullness(executor, "workers") for executor in snapshot.get("executor", ())]
    for kind, queue in _WORKERS.items():
        waiting = {
            name: value
            for thing in snapshot.get(queue, ())
            for metric, (_, name), value in _read(_waiting, queue, str(thing.get("name")), thing)
            if metric == "queue_depth" and _is_number(value)
        }
        for worker in snapshot.get(kind, ()):
            slots = _number(worker, "concurrency")
            if slots > 0 and worker.get("running"):
                backlog = min(slots, waiting.get(str(worker.get("name")), 0.0))
                loads.append((_number(worker, "at_work") + backlog) / slots)
    return max(loads)


Reader = Callable[[str, str, Mapping[str, Any]], Iterator[Sample]]


def _read(read: Reader, kind: str, name: str, thing: Mapping[str, Any]) -> list[Sample]:
    found: list[Sample] = []
    try:
        for one in read(kind, name, thing):
            found.append(one)  # noqa: PERF402 - keeps what was read before an exception
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        pass  # a user's own policy may show anything
    return found


def _guard(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    yield from _histogram("attempt_duration_seconds", (name,), seen.get("histogram"))
    yield from _histogram("queue_wait_seconds", (name,), seen.get("waits"))
    for policy in _policies(seen):
        kind = str(policy.get("policy"))
        for metric in ("rejected", "would_reject"):
            if metric in policy:
                yield f"{metric}_total", (name, kind), policy[metric]
        shared = policy.get("shared")
        if isinstance(shared, Mapping) and "mode" in shared:
            yield "policy_shared", (name, kind), shared["mode"] == "shared"
        yield from _plain(kind, name, policy)
        reader = _POLICIES.get(kind)
        if reader is not None:
            yield from _read(reader, "guard", name, policy)
    if isinstance(family := seen.get("family"), Mapping):
        yield from _worst_keys(name, family["worst"])


def _worst_keys(name: str, worst: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Yield the state of the worst keys of a family; their counts are in the family's counters."""
    for key, seen in worst.items():
        member = f"{name}[{key}]"
        yield "error_ratio", (member,), seen.get("error_rate")
        for policy in _policies(seen):
            if policy.get("policy") == "breaker" and "state" in policy:
                yield from _states("breaker_state", (member,), policy["state"], BREAKER_STATES)


def _retry(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for outcome, number in seen.get("outcomes", {}).items():
        yield "retry_calls_total", (name, outcome), number
    for cause, number in seen.get("stopped", {}).items():
        yield "retries_stopped_total", (name, cause), number
    if "budget" in seen:
        yield "retry_budget_spent_ratio", (name,), spent_share(seen["budget"])


def spent_share(budget: Mapping[str, float]) -> float:
    """Return the share of a retry budget that is spent, from 0 to 1."""
    if "maximum" in budget:
        half = budget["maximum"] / 2  # below that, no retry is made
        share = (budget["maximum"] - budget["tokens"]) / half if half else 1.0
    else:
        allowed = budget["allowed"]
        share = budget["retries"] / allowed if allowed > 0 else float(budget["retries"] > 0)
    return min(1.0, max(0.0, share))


def _shed(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for rule, classes in seen.get("shed_classes", {}).items():
        for class_, number in classes.items():
            yield "shed_total", (name, rule, class_), number


def _slots(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    labels = name, str(seen["policy"])
    yield "slots", labels, seen.get("limit", seen.get("workers"))
    yield "slots_in_use", labels, seen["in_flight"]
    yield "slots_waiting", labels, seen["waiting"]
    if "queue_wait" in seen:
        yield "slot_wait_seconds", labels, seen["queue_wait"]
    for class_, part in seen.get("partitions", {}).items():
        yield "shed_total", (name, "partition", class_), part["rejected"]


BREAKER_STATES: Final = ("closed", "open", "half_open", "isolated")


def _breaker(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    yield from _states("breaker_state", (name,), seen["state"], BREAKER_STATES)
    for state, number in seen.get("transitions", {}).items():
        yield "breaker_transitions_total", (name, state), number


def _rate_limit(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    refused = seen["rejected"] + seen.get("reserve_rejected", 0)
    yield "rate_limited_total", (kind, name, "any"), refused


def _request_limits(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for limit, one in seen.get("limits", {}).items():
        yield "rate_limited_total", (kind, name, limit), one["over"]


def _fallback(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for level, number in enumerate(seen.get("levels", {}).values(), 1):
        yield "fallbacks_total", (name, str(level)), number


_POLICIES: Final[dict[str, Reader]] = {
    "retry": _retry,
    "shed": _shed,
    "bulkhead": _slots,
    "thread_bulkhead": _slots,
    "adaptive_limit": _slots,
    "breaker": _breaker,
    "rate_limit": _rate_limit,
    "fallback": _fallback,
}


def _pool(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for key in ("wait", "use"):
        times = seen.get(key)
        if isinstance(times, Mapping):
            yield from _histogram(f"pool_{key}_seconds", (name,), times.get("histogram"))


def _waiting(kind: str, name: str, thing: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the waiting items of a queue, a channel, jobs, an outbox or deferred calls."""
    seen = waiting_of(kind, thing)
    for key, metric in (
        ("waiting", "queue_depth"),
        ("oldest", "queue_age_seconds"),
        ("dead", "queue_dead"),
    ):
        if key in seen:
            yield metric, (kind, name), seen[key]
    if kind == "outbox" and "oldest" in seen:
        yield "outbox_age_seconds", (name,), seen["oldest"]
        yield "outbox_blocked_aggregates", (name,), seen["blocked"]


def waiting_of(kind: str, thing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of something in which items wait, with the same names for all kinds.

    Databases return a count and the age of the oldest for each state.
    """
    stored = thing.get("stored")
    if not isinstance(stored, Mapping):
        stored = {}
    names = {"depth": "waiting", "pending": "waiting", "oldest_age": "oldest"}
    seen: dict[str, Any] = {}
    if kind == "jobs":
        names = {"queued": "waiting", "failed": "dead"}
        seen = {"waiting": 0, "oldest": 0.0, "dead": 0} if stored else {}
    for key, value in {**thing, **stored}.items():
        name = names.get(key, key)
        if isinstance(value, (list, tuple)) and len(value) == 2:  # noqa: PLR2004
            seen[name] = value[0]
            if name == "waiting":
                seen["oldest"] = value[1]
        else:
            seen[name] = value
    return seen


_WORKERS: Final = {
    "worker": "queue",
    "job_worker": "jobs",
    "deferred_call_worker": "deferred_calls",
}
"""The kinds of workers, with the kind of their queue."""
_NOT_ENDS: Final = frozenset({"concurrency", "at_work", "rounds", "abandoned", "refused_late"})


def _worker(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for result, number in seen.items():
        if type(number) is int and result not in _NOT_ENDS:
            yield "worker_jobs_total", (kind, name, result), number


def _idempotency(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for result, number in seen.items():
        if type(number) is int and result != "refused_late":
            yield "idempotency_total", (kind, name, result), number


def _fifo(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    yield "duplicates_dropped_total", (kind, name), seen["duplicate"] + seen["late"]


def _health(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    states = ("healthy", "degraded", "unhealthy", "unknown")
    for level, state in seen["levels"].items():
        yield from _states("health_state", (name, level), state, states)


def _lifecycle(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    phases = ("starting", "ready", "draining", "stopped")
    yield from _states("lifecycle_state", (name,), seen["state"], phases)


def _service_levels(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    levels = ("full", "cached", "partial", "static", "maintenance")
    yield from _states("service_level", (name,), seen["level"], levels)


def _upstreams(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    states = [host["state"] for host in seen["hosts"].values()]
    for state in ("serving", "ejected", "failing checks", "suspected"):
        yield "upstream_hosts", (name, state), states.count(state)


MOST_MEMBERS: Final = 10
"""Maximum number of members of a group whose level is exported: the most suspected ones."""
MEMBER_STATES: Final = ("unknown", "alive", "suspected", "confirmed", "left")


def _members(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for key in ("messages", "bytes"):
        if isinstance(numbers := seen.get(key), Mapping):
            ways = ("sent", "received", "refused")
            yield from _results(f"member_{key}_total", (name,), numbers, ways)
    counts = seen["counts"]
    changes = {**counts, "suspected": counts.get("suspicions")}
    results = ("suspected", "cleared", "confirmed", "left")
    yield from _results("member_changes_total", (name,), changes, results)
    yield "member_false_suspect_ratio", (name,), counts.get("false_suspect_rate")
    yield "member_own_pauses_total", (name,), counts.get("own_pauses")
    yield "member_own_pause_seconds_total", (name,), counts.get("paused_seconds")
    yield from _histogram("member_detection_seconds", (name,), counts.get("detection_times"))
    yield from _histogram("member_round_trip_seconds", (name,), counts.get("round_trips"))
    members = seen["members"]
    states = Counter(member["state"] for member in members)
    for state in MEMBER_STATES:
        yield "members", (name, state), states[state]
    present = [one for one in members if one["state"] in {"alive", "suspected"}]
    for member in nlargest(MOST_MEMBERS, present, key=_level_ratio):
        yield "member_level_ratio", (name, str(member["name"])), _level_ratio(member)


def _level_ratio(member: Mapping[str, Any]) -> float:
    """Return the level of suspicion as a share of the threshold."""
    return _number(member, "level") / (_number(member, "threshold") or 1.0)


MOST_MISSING: Final = 10
"""Maximum number of missing sources of a `Collect` that are exported: those missing longest."""

_STAGE_RESULTS: Final = {
    "done": "done",
    "failed": "failed",
    "degraded": "degraded",
    "dropped": "dropped",
    "dead_letter": "dead_letters",
    "retried": "retries",
    "refused": "refused",
    "died": "deaths",
}
"""The results of a stage, with their names in the snapshot."""


def _pipeline(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    yield "pipeline_running", (name,), float(bool(seen["running"]))
    oldest = seen.get("oldest")
    yield "pipeline_oldest_seconds", (name,), oldest["age"] if oldest else 0.0
    for source in seen["sources"]:
        labels = name, str(source["name"])
        yield "pipeline_read_total", labels, source["read"]
        yield "pipeline_source_errors_total", labels, source["errors"]
        yield "pipeline_source_failing", labels, float(bool(source["error"]))
        yield "pipeline_source_silence_seconds", labels, source["last_at"]
    for stage in seen["stages"]:
        labels = name, str(stage["name"])
        for result, key in _STAGE_RESULTS.items():
            yield "pipeline_stage_items_total", (*labels, result), stage[key]
        for reason, number in stage["failures"].items():
            yield "pipeline_stage_failures_total", (*labels, str(reason)), number
        if stage["workers"]:
            yield "pipeline_stage_workers", labels, stage["workers"]
            yield "pipeline_stage_busy", labels, stage["busy"]
            yield "pipeline_stage_waiting", labels, stage["waiting"]
            yield "pipeline_stage_oldest_seconds", labels, stage["oldest"]
            yield from _histogram("pipeline_stage_duration_seconds", labels, stage["histogram"])


def _collect(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    missing = seen["missing"]
    states = Counter(one["state"] for one in missing)
    states["ok"] = seen["sources"] - len(missing)
    for state in ("ok", "stale", "unavailable"):
        yield "collect_sources", (name, state), states[state]
    too_few, degraded = seen["too_few"], seen["degraded"]
    results = {
        "complete": seen["collections"] - degraded,
        "degraded": degraded - too_few,
        "too_few": too_few,
    }
    yield from _results("collect_collections_total", (name,), results, results)
    for one in nlargest(MOST_MISSING, missing, key=lambda one: _number(one, "since")):
        yield "collect_missing_seconds", (name, str(one["source"])), one["since"]


def _llm(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    client = "gen_ai_client"
    for one in seen["operations"]:
        models = one["request_model"], one["response_model"]
        labels = name, one["operation"], one["provider"], *models
        yield from _histogram(
            f"{client}_operation_duration_seconds", (*labels, one["error"]), one["durations"]
        )
        for key in ("input", "output"):
            if any(one[key]["counts"]):  # counts that no answer contained are not reported
                yield from _histogram(f"{client}_token_usage", (*labels, key), one[key])
        if any(one["first_chunks"]["counts"]):
            yield from _histogram(
                f"{client}_operation_time_to_first_chunk_seconds", labels, one["first_chunks"]
            )
        if seen["priced"]:
            yield "llm_cost_total", (name, one["request_model"]), one["cost"]


def _models(_kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for level, (model, number) in enumerate(seen["served"].items()):
        yield "models_served_total", (name, model, str(level)), number


_READERS: Final[dict[str, Reader]] = {
    "guard": _guard,
    "llm": _llm,
    "models": _models,
    "request_limits": _request_limits,
    "pool": _pool,
    **dict.fromkeys(
        ("queue", "channel", "jobs", "deferred_calls", "outbox", "dead_letters"), _waiting
    ),
    **dict.fromkeys(("worker", "job_worker", "deferred_call_worker", "dispatcher"), _worker),
    **dict.fromkeys(("idempotency", "idempotent_requests"), _idempotency),
    "fifo_receiver": _fifo,
    "health": _health,
    "lifecycle": _lifecycle,
    "service_levels": _service_levels,
    "members": _members,
    "pipeline": _pipeline,
    "collect": _collect,
    "upstreams": _upstreams,
}


_LATE: Final = {"refused_late": "refused_late_total"}
_WORKER: Final = {"concurrency": "worker_slots", "at_work": "worker_busy", **_LATE}

_NUMBERS: Final[dict[str, dict[str, str]]] = {
    "guard": {
        "timed_out": "timeouts_total",
        "degraded": "degraded_total",
        "stale": "stale_total",
        "retries": "retries_total",
        "error_rate": "error_ratio",
        "abandoned": "abandoned_threads",
    },
    "breaker": {"open_keys": "breaker_open_keys"},
    "hedge": {"hedges": "hedges_total", "wins": "hedge_wins_total"},
    "pool": {
        "limit": "pool_slots",
        "in_flight": "pool_in_use",
        "idle": "pool_idle",
        "waiting": "pool_waiting",
        "borrowed": "pool_borrowed_total",
    },
    "executor": {
        "workers": "executor_workers",
        "in_flight": "executor_in_use",
        "waiting": "executor_waiting",
    },
    "serializer": {"waiting": "serializer_waiting", "rejected": "serializer_rejected_total"},
    **dict.fromkeys((*_WORKERS, "dispatcher"), _WORKER),
    "jobs": {"repeated": "duplicates_dropped_total", **_LATE},
    "deferred_calls": {"again": "duplicates_dropped_total", **_LATE},
    **dict.fromkeys(("idempotency", "idempotent_requests"), _LATE),
    "inbox": {"duplicates": "duplicates_dropped_total"},
    "fifo_receiver": {"gaps": "fifo_gaps_total"},
    "store": {"up": "store_up"},
    "lease": {"held": "lease_held"},
    "lifecycle": {"in_flight": "requests_in_flight"},
    "members": {"health_score": "member_health_score"},
    "pipeline": {
        "degraded": "pipeline_degraded_total",
        "replayed": "pipeline_replayed_total",
        "in_flight": "pipeline_in_flight",
    },
    "watchdog": {"lag": "loop_lag_seconds", "blocks": "loop_blocks_total"},
    "models": {"failed": "models_failed_total"},
}
"""By kind, the numbers of a snapshot that are metrics as they are."""

_RESULTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "guard": ("attempts_total", ("succeeded", "failed", "cancelled", "rejected")),
    "cache": ("cache_total", ("hits", "misses", "shared")),
    "pool": (
        "pool_troubles_total",
        ("rejected", "timed_out", "connect_failed", "leaked", "close_failed", "degraded"),
    ),
    "executor": ("executor_calls_total", ("succeeded", "failed", "cancelled", "rejected")),
    "channel": ("channel_items_total", ("put", "got", "dropped", "rejected")),
    "pipeline": ("pipeline_ended_total", ("sink", "dead_letter", "dropped", "returned")),
}
"""By kind, the metric whose last label says which of these numbers it is."""


def _plain(kind: str, name: str, seen: Mapping[str, Any]) -> Iterator[Sample]:
    for key, metric in _NUMBERS.get(kind, {}).items():
        if key in seen:
            labels = (kind, name) if "kind" in BY_NAME[full_name(metric)].labels else (name,)
            yield metric, labels, seen[key]
    metric, results = _RESULTS.get(kind, ("", ()))
    yield from _results(metric, (name,), seen, results)


def _results(
    metric: str, labels: Labels, seen: Mapping[str, Any], results: Iterable[str]
) -> Iterator[Sample]:
    for result in results:
        if result in seen:
            yield metric, (*labels, result), seen[result]


def _states(metric: str, labels: Labels, state: str, states: Iterable[str]) -> Iterator[Sample]:
    for known in states:
        yield metric, (*labels, known), float(known == state)


def _histogram(metric: str, labels: Labels, seen: Any) -> Iterator[Sample]:
    if isinstance(seen, Mapping):
        yield metric, labels, (seen["sum"], *seen["counts"])


def _policies(guard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    policies = guard.get("policies")
    if not isinstance(policies, (list, tuple)):
        return []
    return [policy for policy in policies if isinstance(policy, (dict, Mapping))]


def _number(seen: Mapping[str, Any], key: str) -> float:
    value = seen.get(key)
    return float(value) if _is_number(value) and value is not None else 0.0


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _fullness(seen: Mapping[str, Any], of: str) -> float:
    slots = _number(seen, of)
    return (_number(seen, "in_flight") + _number(seen, "waiting")) / slots if slots > 0 else 0.0
