"""The table of metrics: the name, meaning and source of each.

Exporters, dashboards, alert rules and the documentation are made from it. Names and meanings are
stable. Names follow the rules of Prometheus; those of OpenTelemetry are derived from them. Metrics
that have a name in OpenTelemetry's conventions (`gen_ai`) use it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from seawall.models.histogram import BOUNDS, SECONDS, TOKENS

Kind = Literal["counter", "gauge", "histogram"]
Fold = Literal["sum", "max", "min"]

GEN_AI: Final = "gen_ai_"

CLOSED: Final = frozenset(
    {
        *("kind", "level", "outcome", "result", "state", "to", "metric"),
        *("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_token_type"),
    }
)
"""Labels whose values are fixed words of ours, so that there are few of them."""


class Metric(NamedTuple):
    """One metric; `fold` says how several values with the same labels are combined."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    source: str
    fold: Fold = "sum"
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the last one, which is unbounded."""

    @property
    def otel_name(self) -> str:
        """The name in OpenTelemetry, which includes neither unit nor kind."""
        bare = self.name.removesuffix("_total").removesuffix("_seconds").removesuffix("_ratio")
        if bare in _CONVENTIONS:
            return _CONVENTIONS[bare]
        return bare.replace("_", ".", 1)

    @property
    def otel_labels(self) -> tuple[str, ...]:
        """The labels as OpenTelemetry's attributes; those of its conventions have dots."""
        return tuple(_attribute(label) for label in self.labels)

    @property
    def open_labels(self) -> tuple[str, ...]:
        """The labels whose values users choose."""
        return tuple(label for label in self.labels if label not in CLOSED)


def _attribute(label: str) -> str:
    if label.startswith(GEN_AI):
        return "gen_ai." + label.removeprefix(GEN_AI).replace("_", ".")
    return "error.type" if label == "error_type" else label


def _metric(
    series: str,
    kind: Kind,
    help_: str,
    source: str,
    unit: str = "1",
    *,
    fold: Fold = "sum",
    bounds: tuple[float, ...] = (),
    suffix: str = "",
) -> Metric:
    """Return a metric; `series` is its name without prefix and suffix, and its labels."""
    name, _, labels = series.removesuffix("}").partition("{")
    names = tuple(labels.split(", ")) if labels else ()
    return Metric(f"seawall_{name}{suffix}", kind, unit, names, help_, source, fold, bounds)


def _counter(series: str, help_: str, source: str, unit: str = "1") -> Metric:
    return _metric(series, "counter", help_, source, unit, suffix="_total")


def _gauge(series: str, help_: str, source: str, fold: Fold = "sum") -> Metric:
    return _metric(series, "gauge", help_, source, fold=fold)


def _highest(series: str, help_: str, source: str) -> Metric:
    return _gauge(series, help_, source, "max")


def _seconds(series: str, help_: str, source: str) -> Metric:
    return _metric(series, "gauge", help_, source, "s", fold="max", suffix="_seconds")


def _durations(series: str, help_: str, source: str) -> Metric:
    return _metric(series, "histogram", help_, source, "s", bounds=BOUNDS, suffix="_seconds")


_CONVENTIONS: Final = {
    "gen_ai_client_token_usage": "gen_ai.client.token.usage",
    "gen_ai_client_operation_duration": "gen_ai.client.operation.duration",
    "gen_ai_client_operation_time_to_first_chunk": "gen_ai.client.operation.time_to_first_chunk",
}
"""Names of OpenTelemetry's conventions, by that for Prometheus without its unit."""

_OPERATION: Final = (
    *("guard", "gen_ai_operation_name", "gen_ai_provider_name"),
    *("gen_ai_request_model", "gen_ai_response_model"),
)


def _gen_ai(
    name: str, unit: str, labels: tuple[str, ...], bounds: tuple[float, ...], help_: str, of: str
) -> Metric:
    names = (*_OPERATION, *labels)
    return Metric(f"{GEN_AI}client_{name}", "histogram", unit, names, help_, of, "sum", bounds)


METRICS: Final[tuple[Metric, ...]] = (
    # Guards
    _counter(
        "attempts{guard, outcome}",
        "Attempts by how they ended (succeeded, failed, cancelled), and those refused (rejected)",
        "guard: succeeded, failed, cancelled, rejected",
    ),
    _counter("timeouts{guard}", "Attempts that ran out of time", "guard: timed_out"),
    _counter("degraded{guard}", "Calls that got a substitute answer", "guard: degraded"),
    _counter("stale{guard}", "Of these, calls that got an old answer from a cache", "guard: stale"),
    _highest("error_ratio{guard}", "Share of recent attempts that failed", "guard: error_rate"),
    _durations(
        "attempt_duration{guard}",
        "Duration of the attempts that succeeded or ran out of time",
        "guard: histogram",
    ),
    _durations(
        "queue_wait{guard}",
        "How long calls waited at a gate that then admitted them, of those that had to wait",
        "guard: waits",
    ),
    _gauge(
        "abandoned_threads{guard}",
        "Threads that still run although their caller gave up",
        "guard: abandoned",
    ),
    _counter("rejected{guard, policy}", "Calls that a policy refused", "policy: rejected"),
    _counter(
        "would_reject{guard, policy}",
        "Calls that a policy in shadow mode would have refused",
        "policy: would_reject",
    ),
    _counter("retries{guard}", "Attempts beyond the first", "guard: retries"),
    _counter(
        "retry_calls{guard, outcome}",
        "Calls by how they ended: succeeded, succeeded_after_retry, failed, failed_after_retry",
        "retry: outcomes",
    ),
    _counter(
        "retries_stopped{guard, cause}",
        "Calls that were not retried further, by cause; `budget`: the budget was spent",
        "retry: stopped",
    ),
    _highest(
        "retry_budget_spent_ratio{guard}",
        "Share of the retry budget that is spent, from 0 to 1",
        "retry: budget",
    ),
    _counter(
        "shed{guard, reason, class}",
        "Calls shed, by rule and by class: criticality, or the partition of an adaptive limit",
        "shed: shed_classes; adaptive_limit: partitions",
    ),
    _highest(
        "breaker_state{guard, state}",
        "1 for the state that the breaker is in, 0 for the others; keyed: the worst of all keys",
        "breaker: state",
    ),
    _counter(
        "breaker_transitions{guard, to}",
        "Changes of a breaker's state, by the state it went to",
        "breaker: transitions",
    ),
    _gauge(
        "breaker_open_keys{guard}",
        "Keys of a keyed breaker that are open or isolated",
        "breaker: open_keys",
    ),
    _counter(
        "rate_limited{kind, name, limit}",
        "Refusals by rate limits: of a guard, or of requests by the limit's name",
        "rate_limit: rejected, reserve_rejected; request_limits: over",
    ),
    _gauge(
        "slots{guard, policy}",
        "Calls that may run at once: the limit of a bulkhead, or the one that was learnt",
        "bulkhead, adaptive_limit: limit; thread_bulkhead: workers",
    ),
    _gauge(
        "slots_in_use{guard, policy}",
        "Slots taken",
        "bulkhead, adaptive_limit, thread_bulkhead: in_flight",
    ),
    _gauge(
        "slots_waiting{guard, policy}",
        "Calls that wait for a slot",
        "bulkhead, adaptive_limit, thread_bulkhead: waiting",
    ),
    _seconds(
        "slot_wait{guard, policy}",
        "How long the first call in the queue for a slot has waited",
        "bulkhead, adaptive_limit: queue_wait",
    ),
    _counter("cache{guard, result}", "Lookups in a cache", "cache: hits, misses, shared"),
    _counter("hedges{guard}", "Second calls started beside slow ones", "hedge: hedges"),
    _counter("hedge_wins{guard}", "Second calls that answered first", "hedge: wins"),
    _counter("fallbacks{guard, level}", "Calls by the fallback that answered", "fallback: levels"),
    _gauge(
        "policy_shared{guard, policy}",
        "1 while a shared policy decides with its store, 0 while without it",
        "policy: shared",
        fold="min",
    ),
    # Pools, executors, serializers
    _gauge("pool_slots{pool}", "Resources that a pool may have", "pool: limit"),
    _gauge("pool_in_use{pool}", "Resources that are borrowed", "pool: in_flight"),
    _gauge("pool_idle{pool}", "Resources that are free", "pool: idle"),
    _gauge("pool_waiting{pool}", "Borrowers that wait", "pool: waiting"),
    _durations(
        "pool_wait{pool}",
        "How long borrowers waited, of those that had to",
        "pool: wait: histogram",
    ),
    _durations("pool_use{pool}", "How long borrowers used a resource", "pool: use: histogram"),
    _counter("pool_borrowed{pool}", "Resources lent", "pool: borrowed"),
    _counter(
        "pool_troubles{pool, result}",
        "Refused or failed borrowings, and failures of resources",
        "pool: rejected, timed_out, connect_failed, leaked, close_failed, degraded",
    ),
    _gauge("executor_workers{executor}", "Workers of an executor", "executor: workers"),
    _gauge("executor_in_use{executor}", "Workers that are busy", "executor: in_flight"),
    _gauge("executor_waiting{executor}", "Calls that wait for a worker", "executor: waiting"),
    _counter(
        "executor_calls{executor, outcome}",
        "Calls of an executor by how they ended",
        "executor: succeeded, failed, cancelled, rejected",
    ),
    _gauge("serializer_waiting{serializer}", "Calls that wait for a turn", "serializer: waiting"),
    _counter("serializer_rejected{serializer}", "Calls refused a turn", "serializer: rejected"),
    # Queues
    _highest(
        "queue_depth{kind, name}",
        "Items that wait, by kind: queue, channel, jobs, deferred_calls, outbox; dead_letters:"
        " those to be replayed",
        "queue, deferred_calls, dead_letters: waiting; channel: depth; jobs: queued;"
        " outbox: pending",
    ),
    _seconds(
        "queue_age{kind, name}",
        "How long the oldest of them has waited",
        "queue, deferred_calls: oldest; channel, outbox: oldest_age; jobs: queued;"
        " dead_letters: waiting",
    ),
    _highest(
        "queue_dead{kind, name}",
        "Items that were given up, and are kept for operators",
        "queue, deferred_calls, outbox, dead_letters: dead; jobs: failed",
    ),
    _counter(
        "channel_items{channel, result}",
        "Items of a channel: put, got, dropped, rejected",
        "channel: put, got, dropped, rejected",
    ),
    _gauge("worker_slots{kind, name}", "Jobs that a worker may run at once", "worker: concurrency"),
    _gauge("worker_busy{kind, name}", "Jobs that a worker is running", "worker: at_work"),
    _counter(
        "worker_jobs{kind, name, result}",
        "Jobs of this process by how they ended",
        "worker, job_worker, deferred_call_worker, dispatcher: counts",
    ),
    _seconds(
        "outbox_age{outbox}",
        "How long the oldest event of an outbox has waited",
        "outbox: oldest_age",
    ),
    _highest(
        "outbox_blocked_aggregates{outbox}",
        "Aggregates whose events wait for `unblock`",
        "outbox: blocked",
    ),
    # Idempotency
    _counter(
        "duplicates_dropped{kind, name}",
        "Repeats that were recognized and had no second effect",
        "inbox: duplicates; fifo_receiver: duplicate, late; jobs: repeated; deferred_calls: again",
    ),
    _counter(
        "idempotency{kind, name, result}",
        "Requests with an idempotency key, by how they ended; `replays` got a stored answer",
        "idempotency, idempotent_requests: counts",
    ),
    _counter(
        "refused_late{kind, name}",
        "Outcomes refused because another worker had taken over: the work may have run twice",
        "dispatcher, jobs, deferred_calls, idempotency, idempotent_requests: refused_late",
    ),
    _counter("fifo_gaps{name}", "Messages missing for too long", "fifo_receiver: gaps"),
    # Surroundings of the service
    _gauge("store_up{store}", "1 while the shared store answers", "store: up", fold="min"),
    _highest("lease_held{lease}", "1 while this process holds the lease", "lease: held"),
    _highest(
        "health_state{service, level, state}",
        "1 for the state of each level of health, 0 for the others",
        "health: levels",
    ),
    _highest(
        "lifecycle_state{service, state}",
        "1 for the phase that the service is in, 0 for the others",
        "lifecycle: state",
    ),
    _gauge("requests_in_flight{service}", "Requests being served", "lifecycle: in_flight"),
    _highest(
        "service_level{service, level}",
        "1 for the current level of service, 0 for the others",
        "service_levels: level",
    ),
    _gauge(
        "upstream_hosts{upstreams, state}",
        "Hosts by state: serving, ejected, failing checks, suspected",
        "upstreams: hosts",
    ),
    # Members
    _gauge("members{group, state}", "Members of a group by state", "members: members"),
    _counter(
        "member_changes{group, result}",
        "Changes of members: suspected, cleared (the suspicion was wrong), confirmed, left",
        "members: suspicions, cleared, confirmed, left",
    ),
    _highest(
        "member_false_suspect_ratio{group}",
        "Share of ended suspicions that were wrong, since the process started",
        "members: false_suspect_rate",
    ),
    _durations(
        "member_detection{group}",
        "Time from the last sign of life of a member to its confirmation",
        "members: detection_times",
    ),
    _durations(
        "member_round_trip{group}", "How long members took to answer probes", "members: round_trips"
    ),
    _highest(
        "member_level_ratio{group, member}",
        "Suspicion level of the ten most suspected members; a member is suspected from 1",
        "members: level, threshold",
    ),
    _highest(
        "member_health_score{group}",
        "How little this process trusts its own view of the group: 0 is best, 8 is worst",
        "members: health_score",
    ),
    _counter(
        "member_own_pauses{group}",
        "Pauses of this process, during which it suspects no member",
        "members: own_pauses",
    ),
    _counter(
        "member_own_pause_seconds{group}",
        "How long these pauses lasted together",
        "members: paused_seconds",
        "s",
    ),
    _counter(
        "member_messages{group, result}",
        "Messages between members: sent, received, refused",
        "members: messages",
    ),
    _counter(
        "member_bytes{group, result}",
        "Bytes of these messages: sent, received",
        "members: bytes",
        "By",
    ),
    # Pipelines
    _highest("pipeline_running{pipeline}", "1 while the pipeline runs", "pipeline: running"),
    _counter("pipeline_read{pipeline, source}", "Items read by source", "pipeline: sources: read"),
    _counter(
        "pipeline_ended{pipeline, result}",
        "Items by how they ended: sink, dead_letter, dropped, returned",
        "pipeline: sink, dead_letter, dropped, returned",
    ),
    _counter("pipeline_degraded{pipeline}", "Degraded items that a sink got", "pipeline: degraded"),
    _counter(
        "pipeline_replayed{pipeline}", "Dead letters that were replayed", "pipeline: replayed"
    ),
    _gauge("pipeline_in_flight{pipeline}", "Items in flight", "pipeline: in_flight"),
    _seconds("pipeline_oldest{pipeline}", "Age of the oldest of them", "pipeline: oldest"),
    _highest(
        "pipeline_source_failing{pipeline, source}",
        "1 while a source cannot be read, or accepts no reports of ends",
        "pipeline: sources: error",
    ),
    _counter(
        "pipeline_source_errors{pipeline, source}",
        "Failures to read a source, or to report to it how items ended",
        "pipeline: sources: errors",
    ),
    _seconds(
        "pipeline_source_silence{pipeline, source}",
        "Time since the last item of a source",
        "pipeline: sources: last_at",
    ),
    _counter(
        "pipeline_stage_items{pipeline, stage, result}",
        "Items of a stage: done, failed, degraded, dropped, dead_letter; and calls of it that were"
        " retried, refused, or ended by the death of a worker process (died)",
        "pipeline: stages: done, failed, degraded, dropped, dead_letters, retries, refused, deaths",
    ),
    _counter(
        "pipeline_stage_failures{pipeline, stage, reason}",
        "Failed items of a stage by the type of the error",
        "pipeline: stages: failures",
    ),
    _gauge("pipeline_stage_workers{pipeline, stage}", "Workers", "pipeline: stages: workers"),
    _gauge("pipeline_stage_busy{pipeline, stage}", "Workers with items", "pipeline: stages: busy"),
    _gauge(
        "pipeline_stage_waiting{pipeline, stage}", "Items that wait", "pipeline: stages: waiting"
    ),
    _seconds(
        "pipeline_stage_oldest{pipeline, stage}",
        "How long the oldest of them has waited there",
        "pipeline: stages: oldest",
    ),
    _durations(
        "pipeline_stage_duration{pipeline, stage}",
        "How long items were in a stage with workers, including the wait",
        "pipeline: stages: histogram",
    ),
    _gauge(
        "collect_sources{collect, state}",
        "Sources by state: ok, stale, unavailable",
        "collect: sources, missing",
    ),
    _seconds(
        "collect_missing{collect, source}",
        "How long the ten sources that are missing longest have not answered",
        "collect: missing",
    ),
    _counter(
        "collect_collections{collect, result}",
        "Collections: complete, degraded (something is stale or missing), too_few (less than the"
        " minimum)",
        "collect: collections, degraded, too_few",
    ),
    # Event loops
    _seconds("loop_lag{watchdog}", "How late the event loop is", "watchdog: lag"),
    _counter("loop_blocks{watchdog}", "How often the event loop was blocked", "watchdog: blocks"),
    # Language models
    _gen_ai(
        "operation_duration_seconds",
        "s",
        ("error_type",),
        SECONDS,
        "Duration of requests to language models, to the end of the answer",
        "llm: durations",
    ),
    _gen_ai(
        "operation_time_to_first_chunk_seconds",
        "s",
        (),
        SECONDS,
        "Time until the first event of a streamed answer",
        "llm: first_chunks",
    ),
    _gen_ai(
        "token_usage",
        "{token}",
        ("gen_ai_token_type",),
        TOKENS,
        "Tokens of one request, of the input and of the output",
        "llm: input, output",
    ),
    _counter(
        "llm_cost{guard, model}",
        "Cost of the tokens by the price table, in its currency; by the requested model",
        "llm: cost",
    ),
    _counter(
        "models_served{models, model, level}",
        "Calls by the model that answered; level 0 is the preferred one, higher ones are fallbacks",
        "models: served",
    ),
    _counter("models_failed{models}", "Calls that no model answered", "models: failed"),
    # Process and telemetry
    _highest(
        "autoscale_load",
        "How full this process is: 1.0 is full, above that work waits; scale on its mean",
        "edge, executor, worker: see autoscale_load",
    ),
    _seconds(
        "reading_age{kind, name}",
        "How long ago the values of a store or database were read",
        "stored_age",
    ),
    _gauge(
        "unreadable{kind}",
        "Objects whose snapshot or last query failed",
        "snapshot_error, stored_error",
    ),
    _gauge(
        "series_folded{metric}",
        "Series beyond the maximum, which are combined as `other`",
        "the exporter",
    ),
)
"""All metrics, in the order in which they are exported."""


def full_name(name: str) -> str:
    """Return the full name of a metric from that without our prefix."""
    return name if name.startswith(GEN_AI) else f"seawall_{name}"


BY_NAME: Final = {metric.name: metric for metric in METRICS}
