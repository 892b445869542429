"""Contents of the Grafana dashboard: rows of panels with their queries, from the table of metrics.

Each metric of the table has a panel.
"""

from __future__ import annotations

import json
from typing import Final, Literal, NamedTuple

from seawall.models.histogram import USUAL
from seawall.telemetry import thresholds as limits
from seawall.telemetry.metrics import Metric
from seawall.telemetry.promql import PromqlQueries

Shape = Literal["lines", "stack", "states", "firing"]

SCOPE: Final = (
    ("job", 'job=~"$job"'),
    ("instance", 'instance=~"$instance"'),
    ("guard", 'guard=~"$guard"'),
)

_ask: Final = PromqlQueries("$__rate_interval", SCOPE)


class Query(NamedTuple):
    """A query, and the legend of its results."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One panel. From `warn` on it is yellow, from `bad` on red."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    shape: Shape = "lines"
    warn: float | None = None
    bad: float | None = None
    values: tuple[tuple[str, str], ...] = ()
    """Text and colour of the states 0, 1, 2..."""


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split()) or "all"


def _rate(name: str, by: str, note: str = "") -> Query:
    return Query(_ask.rate(name, by), _legend(by) + note)


def _gauge(fold: str, name: str, by: str, note: str = "") -> Query:
    return Query(_ask.gauge(fold, name, by), _legend(by) + note)


def _panel(
    title: str,
    *queries: Query,
    unit: str = "short",
    shape: Shape = "lines",
    warn: float | None = None,
    bad: float | None = None,
    values: tuple[tuple[str, str], ...] = (),
) -> Panel:
    return Panel(title, queries, unit, shape, warn, bad, values)


def _shares(
    title: str, *queries: Query, warn: float | None = None, bad: float | None = None
) -> Panel:
    return _panel(title, *queries, unit="percentunit", warn=warn, bad=bad)


def _quantiles(title: str, name: str, by: str, bad: float | None = None) -> Panel:
    """Return a panel with p50, p95 and p99 of all processes together, from their histograms."""
    queries = (
        Query(_ask.quantile(share, name, by), f"{_legend(by)} p{share * 100:g}") for share in USUAL
    )
    return _panel(title, *queries, unit="s", bad=bad)


def _share(part: str, whole: str, legend: str) -> Query:
    return Query(f"{part} / {whole}", legend)


def _seconds(title: str, name: str, by: str, bad: float | None = None) -> Panel:
    """Return a panel with the largest value: durations and ages of processes cannot be added."""
    return _panel(title, _gauge("max", name, by), unit="s", bad=bad)


def _speed(title: str, name: str, by: str, shape: Shape = "lines") -> Panel:
    return _panel(title, _rate(name, by), unit="cps", shape=shape)


def _count(title: str, fold: str, name: str, by: str) -> Panel:
    return _panel(title, _gauge(fold, name, by))


_CALLS: Final = _ask.rate("attempts", "guard")

_BREAKER: Final = Query(
    "max by (instance, guard) ("
    + " or ".join(
        f"{value} * ({_ask.series('breaker_state', 'state=' + json.dumps(state))} > bool 0)"
        for value, state in enumerate(("closed", "half_open", "open", "isolated"))
    )
    + ")",
    "{{guard}} {{instance}}",
)
"""One number for the state over time, the worst if a guard has several breakers."""
_ONE_OR_NONE: Final = (("no", "red"), ("yes", "green"))

ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Overview": (
        _panel(
            "Alerts that fire now",
            Query(
                'ALERTS{alertname=~"Seawall.*",alertstate="firing",job=~"$job"}', "{{alertname}}"
            ),
            shape="firing",
        ),
        _shares(
            "Load (1 is full)",
            _gauge("avg", "autoscale_load", "job", " mean"),
            _gauge("max", "autoscale_load", "job", " fullest"),
            warn=limits.LOAD_WARN,
            bad=limits.LOAD,
        ),
        _speed("Attempts by outcome", "attempts", "outcome", "stack"),
        _shares(
            "Share of attempts that fail",
            _share(
                _ask.rate("attempts", "guard", 'outcome="failed"'),
                _ask.rate("attempts", "guard", 'outcome=~"succeeded|failed"'),
                "{{guard}}",
            ),
            warn=limits.ERROR_RATIO_WARN,
            bad=limits.ERROR_RATIO,
        ),
        _shares(
            "Share refused by open circuits",
            _share(_ask.rate("rejected", "guard", 'policy="breaker"'), _CALLS, "{{guard}}"),
            bad=limits.CIRCUIT_OPEN,
        ),
        _panel(
            "Breakers",
            _BREAKER,
            shape="states",
            values=(
                ("closed", "green"),
                ("half-open", "yellow"),
                ("open", "red"),
                ("isolated", "purple"),
            ),
        ),
    ),
    "Guards": (
        _quantiles("Duration: p50, p95, p99", "attempt_duration_seconds", "guard"),
        _quantiles("Waited to be admitted: p50, p95, p99", "queue_wait_seconds", "guard"),
        _speed("Attempts", "attempts", "guard outcome"),
        _shares(
            "Share of recent attempts that failed, worst process",
            _gauge("max", "error_ratio", "guard"),
            warn=limits.ERROR_RATIO_WARN,
            bad=limits.ERROR_RATIO,
        ),
        _speed("Timeouts", "timeouts", "guard"),
        _panel("Degraded answers", _rate("degraded", "guard"), _rate("stale", "guard", ": stale")),
        _speed("Refused, by policy", "rejected", "guard policy"),
        _speed("Would be refused (shadow mode)", "would_reject", "guard policy"),
        _shares(
            "Retries for each attempt", _share(_ask.rate("retries", "guard"), _CALLS, "{{guard}}")
        ),
        _speed("Calls, with and without a retry", "retry_calls", "guard outcome"),
        _speed("Not retried further, by cause", "retries_stopped", "guard cause"),
        # No `bad`: a budget that is not refilled yet does no harm.
        _shares(
            "Retry budget spent",
            _gauge("max", "retry_budget_spent_ratio", "guard"),
            warn=limits.BUDGET_SPENT_WARN,
        ),
        _count("Processes by the state of their breaker", "sum", "breaker_state", "guard state"),
        _speed("Changes of breakers, by new state", "breaker_transitions", "guard to"),
        _count("Open keys of keyed breakers", "max", "breaker_open_keys", "guard"),
        _speed("Shed, by reason and class", "shed", "guard reason class"),
        _speed("Refused by rate limits", "rate_limited", "kind name limit"),
        _speed("Fallbacks that answered", "fallbacks", "guard level"),
        _speed("Cache lookups", "cache", "guard result"),
        _panel("Hedges", _rate("hedges", "guard"), _rate("hedge_wins", "guard", " won")),
        _panel(
            "Shared policies decide with their store",
            _gauge("min", "policy_shared", "guard policy"),
            shape="states",
            values=_ONE_OR_NONE,
        ),
        _count("Threads whose caller gave up", "sum", "abandoned_threads", "guard"),
    ),
    "Slots, pools, executors": (
        _panel(
            "Slots in use",
            _gauge("sum", "slots_in_use", "guard policy"),
            _gauge("sum", "slots", "guard policy", ": all"),
        ),
        _count("Calls that wait for a slot", "sum", "slots_waiting", "guard policy"),
        _seconds(
            "Oldest wait for a slot",
            "slot_wait_seconds",
            "guard policy",
            limits.SLOT_WAIT_SECONDS,
        ),
        _panel(
            "Pools",
            _gauge("sum", "pool_in_use", "pool", ": in use"),
            _gauge("sum", "pool_idle", "pool", ": idle"),
            _gauge("sum", "pool_slots", "pool", ": all"),
        ),
        _count("Borrowers that wait", "sum", "pool_waiting", "pool"),
        _quantiles(
            "Waits for a resource: p50, p95, p99",
            "pool_wait_seconds",
            "pool",
            limits.POOL_WAIT_SECONDS,
        ),
        _quantiles("Use of a resource: p50, p95, p99", "pool_use_seconds", "pool"),
        _speed("Lent", "pool_borrowed", "pool"),
        _speed("Troubles of pools", "pool_troubles", "pool result"),
        _panel(
            "Executors",
            _gauge("sum", "executor_in_use", "executor", ": busy"),
            _gauge("sum", "executor_waiting", "executor", ": waiting"),
            _gauge("sum", "executor_workers", "executor", ": workers"),
        ),
        _speed("Calls of executors", "executor_calls", "executor outcome"),
        _panel(
            "Serializers",
            _gauge("sum", "serializer_waiting", "serializer", ": waiting"),
            _rate("serializer_rejected", "serializer", ": refused a second"),
        ),
    ),
    "Queues, outbox, jobs": (
        _count("Waiting", "max", "queue_depth", "kind name"),
        _seconds("Oldest wait", "queue_age_seconds", "kind name", limits.QUEUE_AGE_SECONDS),
        _panel(
            "Dead jobs, events and letters",
            _gauge("max", "queue_dead", "kind name"),
            bad=limits.DEAD + 1,
        ),
        _seconds(
            "Outbox: oldest event",
            "outbox_age_seconds",
            "outbox",
            limits.OUTBOX_AGE_SECONDS,
        ),
        _panel(
            "Outbox: blocked aggregates",
            _gauge("max", "outbox_blocked_aggregates", "outbox"),
            bad=limits.BLOCKED_AGGREGATES + 1,
        ),
        _seconds(
            "Age of values read from stores and databases",
            "reading_age_seconds",
            "kind name",
            limits.READING_AGE_SECONDS,
        ),
        _panel(
            "Workers",
            _gauge("sum", "worker_busy", "kind name", ": busy"),
            _gauge("sum", "worker_slots", "kind name", ": slots"),
        ),
        _speed("Jobs by how they ended", "worker_jobs", "kind name result"),
        _speed("Items of channels", "channel_items", "channel result"),
    ),
    "Effects that happen once": (
        _speed("Repeats dropped", "duplicates_dropped", "kind name"),
        _speed("Requests with a key, by result", "idempotency", "kind name result"),
        _speed("Refused late: the work may have run twice", "refused_late", "kind name"),
        _speed("FIFO: messages missing", "fifo_gaps", "name"),
    ),
    "Pipelines": (
        _speed("Items read", "pipeline_read", "pipeline source"),
        _speed("Items by how they ended", "pipeline_ended", "pipeline result", "stack"),
        _panel(
            "In flight, and degraded items in sinks",
            _gauge("sum", "pipeline_in_flight", "pipeline", " in flight"),
            _rate("pipeline_degraded", "pipeline", " degraded a second"),
            _rate("pipeline_replayed", "pipeline", " replayed a second"),
        ),
        _seconds(
            "Oldest wait for a stage",
            "pipeline_stage_oldest_seconds",
            "pipeline stage",
            limits.STAGE_AGE_SECONDS,
        ),
        _panel(
            "Oldest item, last item of each source",
            _gauge("max", "pipeline_oldest_seconds", "pipeline", " oldest"),
            _gauge("min", "pipeline_source_silence_seconds", "pipeline source", " silent"),
            unit="s",
        ),
        _speed("Items of stages, by result", "pipeline_stage_items", "pipeline stage result"),
        _speed("Failures by type", "pipeline_stage_failures", "pipeline stage reason"),
        _panel(
            "Workers of stages, and waiting items",
            _gauge("sum", "pipeline_stage_busy", "pipeline stage", " busy"),
            _gauge("sum", "pipeline_stage_workers", "pipeline stage", " workers"),
            _gauge("sum", "pipeline_stage_waiting", "pipeline stage", " waiting"),
        ),
        _quantiles(
            "Time in a stage: p50, p95, p99", "pipeline_stage_duration_seconds", "pipeline stage"
        ),
        _panel(
            "Sources that fail",
            _gauge("max", "pipeline_source_failing", "pipeline source"),
            bad=1.0,
        ),
        _speed("Failures of sources", "pipeline_source_errors", "pipeline source"),
        _count("Processes that run a pipeline", "sum", "pipeline_running", "pipeline"),
        _count("Sources of collections", "max", "collect_sources", "collect state"),
        _seconds(
            "Sources are missing for",
            "collect_missing_seconds",
            "collect source",
            limits.MISSING_SECONDS,
        ),
        _speed("Collections", "collect_collections", "collect result", "stack"),
    ),
    "Members": (
        _count("Members by state, as all processes see them", "sum", "members", "group state"),
        _speed("Suspected, cleared, confirmed, left", "member_changes", "group result"),
        _shares(
            "Share of suspicions that were wrong",
            _share(
                _ask.rate("member_changes", "group", 'result="cleared"'),
                _ask.rate("member_changes", "group", 'result=~"cleared|confirmed"'),
                "{{group}} now",
            ),
            _gauge("max", "member_false_suspect_ratio", "group", " worst process, ever"),
            warn=limits.FALSE_SUSPECTS_WARN,
            bad=limits.FALSE_SUSPECTS,
        ),
        _panel(
            "Most suspected members (suspected from 1)",
            _gauge("max", "member_level_ratio", "group member"),
            bad=1.0,
        ),
        _quantiles("Time to confirm a member: p50, p95, p99", "member_detection_seconds", "group"),
        _quantiles("Round trips: p50, p95, p99", "member_round_trip_seconds", "group"),
        _speed("Own pauses", "member_own_pauses", "group instance"),
        _shares("Share of time in own pauses", _rate("member_own_pause_seconds", "group instance")),
        _count("Health score (0 is well)", "max", "member_health_score", "group instance"),
        _speed("Messages", "member_messages", "group result"),
        _panel("Bytes", _rate("member_bytes", "group result"), unit="Bps"),
    ),
    "Surroundings": (
        _panel(
            "Stores answer",
            _gauge("min", "store_up", "store instance"),
            shape="states",
            values=_ONE_OR_NONE,
        ),
        _count("Processes that hold a lease", "sum", "lease_held", "lease"),
        _count("Processes by health", "sum", "health_state", "service level state"),
        _count("Processes by phase", "sum", "lifecycle_state", "service state"),
        _count("Requests in flight", "sum", "requests_in_flight", "service"),
        _count("Processes by level of service", "sum", "service_level", "service level"),
        _count("Hosts, as all processes see them", "sum", "upstream_hosts", "upstreams state"),
        _seconds(
            "Lag of event loops", "loop_lag_seconds", "watchdog instance", limits.LOOP_LAG_SECONDS
        ),
        _speed("Blocks of event loops", "loop_blocks", "watchdog"),
        _panel("Cannot be read", _gauge("sum", "unreadable", "kind"), bad=limits.UNREADABLE + 1),
        _panel("Combined series", _gauge("max", "series_folded", "metric"), bad=limits.FOLDED + 1),
    ),
    "Language models": (
        _quantiles(
            "Requests to language models: p50, p95, p99",
            "gen_ai_client_operation_duration_seconds",
            "guard gen_ai_request_model",
        ),
        _quantiles(
            "Time to the first chunk: p50, p95, p99",
            "gen_ai_client_operation_time_to_first_chunk_seconds",
            "guard gen_ai_request_model",
        ),
        _panel(
            "Tokens a second",
            Query(
                _ask.sum_rate(
                    "gen_ai_client_token_usage", "gen_ai_request_model gen_ai_token_type"
                ),
                _legend("gen_ai_request_model gen_ai_token_type"),
            ),
            shape="stack",
        ),
        _panel(
            "Cost an hour",
            Query(f"3600 * {_ask.rate('llm_cost', 'guard model')}", _legend("guard model")),
        ),
        _speed(
            "Answers by model (level 0 is preferred)",
            "models_served",
            "models model level",
            "stack",
        ),
        _speed("Calls that no model answered", "models_failed", "models"),
    ),
}


def mentions(expr: str, metric: Metric) -> bool:
    """Return whether a query is about `metric`, not about one whose name starts the same."""
    suffixes = ("_bucket", "_sum") if metric.kind == "histogram" else ("",)
    return any(f"({metric.name}{suffix}{{" in expr for suffix in suffixes)
