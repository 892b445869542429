"""Alert rules for Prometheus, made from the tables of metrics and thresholds.

Promises:
- The file loads as it is.
- Each rule has a heading in the documentation that says what it means and what to do.
- Rules distinguish jobs, so that one file serves all services.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Final, Literal, NamedTuple

from seawall.telemetry import thresholds as limits
from seawall.telemetry.promql import PromqlQueries

__all__ = ["alert_rules"]

Severity = Literal["page", "ticket"]


class Alert(NamedTuple):
    """One rule; `expr` must hold for `lasts` seconds before it fires.

    `{label}` in its texts is the value of that label, `{value}` that of the expression, and
    `{percent}`, `{number}` and `{duration}` are the value in that form.
    """

    severity: Severity
    name: str
    expr: str
    lasts: float
    summary: str
    description: str


def alert_rules(*, runbooks: str | None = None) -> str:
    """Return the rule file, as YAML.

    With `runbooks` each alert has a link: to its heading on the page at that address, or, if the
    address contains `{alert}`, to the address with the name of the alert in that place. The address
    must be absolute, since pagers and chats show the link outside Prometheus. Without `runbooks`
    alerts have no link.
    """
    if runbooks is not None and not _is_address(runbooks):
        raise ValueError(
            f"runbooks={runbooks!r}: write an absolute address, such as"
            " 'https://wiki.example/seawall/alerts' or 'https://wiki.example/runbooks/{alert}', or"
            " leave it out"
        )
    lines = ["groups:", "  - name: seawall", "    rules:"]
    for alert in ALERTS:
        lines += _written(alert, runbooks)
    return "\n".join(lines) + "\n"


def _is_address(text: object) -> bool:
    if not isinstance(text, str) or not text.isprintable() or " " in text:
        return False
    scheme, _, rest = text.partition("://")
    host = rest.partition("/")[0]
    return scheme in {"http", "https"} and bool(host) and "{" not in host


_page: Final = partial(Alert, "page")
_ticket: Final = partial(Alert, "ticket")

_ask: Final = PromqlQueries(f"{limits.WINDOW / 60:g}m")

_CALLS: Final = _ask.rate("attempts", "job guard")
_ENOUGH: Final = f"{_CALLS} > {limits.FEW_CALLS / 60:.4f}"


def _share(part: str, whole: str, above: float) -> str:
    """Return the condition that `part` is too large a share of enough calls of a guard."""
    return f"{_ratio_above(part, whole, above)}\nand\n{_ENOUGH}"


def _ratio_above(part: str, whole: str, limit: float) -> str:
    return f"{part}\n/\n{whole}\n> {limit:g}"


def _above(expr: str, limit: float) -> str:
    return f"{expr} > {limit:g}"


def _gauge_above(fold: str, name: str, by: str, limit: float, where: str = "") -> str:
    return _above(_ask.gauge(fold, name, f"job {by}", where), limit)


def _more_than(name: str, by: str, limit: float, where: str = "") -> str:
    """Return the condition that a counter has increased by more than `limit`."""
    return _above(_ask.increase(name, f"job {by}", where), limit)


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


ALERTS: Final[tuple[Alert, ...]] = (
    _page(
        "SeawallCircuitOpenRate",
        _share(_ask.rate("rejected", "job guard", 'policy="breaker"'), _CALLS, limits.CIRCUIT_OPEN),
        60,
        "{guard}: {percent} of calls meet an open circuit",
        f"More than {_percent(limits.CIRCUIT_OPEN)} of the calls of guard {{guard}} in {{job}}"
        " are refused because its breaker is open: the dependency fails.",
    ),
    _page(
        "SeawallErrorRatio",
        _share(
            _ask.rate("attempts", "job guard", 'outcome="failed"'),
            _ask.rate("attempts", "job guard", 'outcome=~"succeeded|failed"'),
            limits.ERROR_RATIO,
        ),
        300,
        "{guard}: {percent} of attempts fail",
        f"More than {_percent(limits.ERROR_RATIO)} of the attempts of guard {{guard}} in"
        " {job} fail.",
    ),
    _ticket(
        "SeawallRetryBudgetSpent",
        # Not the gauge: for a budget refilled by successes, it stays at 1 long after an outage.
        _above(_ask.rate("retries_stopped", "job guard", 'cause="budget"'), limits.UNRETRIED),
        300,
        "{guard}: the retry budget is spent, failed calls are not retried",
        "Calls of guard {guard} in {job} fail and are not retried, since the retry budget is"
        " spent.",
    ),
    _ticket(
        "SeawallBreakerIsolated",
        _ask.gauge("max", "breaker_state", "job guard", 'state="isolated"') + " >= 1",
        limits.ISOLATED_SECONDS,
        "{guard}: its breaker is isolated, by hand",
        "Somebody isolated the breaker of {guard} in {job}, and it has been so for an hour: it"
        " does not close by itself.",
    ),
    _ticket(
        "SeawallBreakerFlapping",
        _more_than("breaker_transitions", "instance guard", limits.FLAPPING, 'to="closed"'),
        600,
        "{guard}: its breaker closes and opens again and again",
        "The breaker of {guard} on {instance} closed {number} times in five minutes: the"
        " dependency bears the probes, but not the load.",
    ),
    _ticket(
        "SeawallShedding",
        _share(_ask.rate("shed", "job guard"), _CALLS, limits.SHED),
        300,
        "{guard}: {percent} of calls are shed",
        f"More than {_percent(limits.SHED)} of the calls of {{guard}} in {{job}} are shed:"
        " there is more work than it can do.",
    ),
    _ticket(
        "SeawallSaturated",
        _gauge_above("avg", "autoscale_load", "", limits.LOAD),
        600,
        "{job}: {percent} full",
        "The processes of {job} are full, on average: above 100 % work waits.",
    ),
    _ticket(
        "SeawallSlotsFull",
        _gauge_above("max", "slot_wait_seconds", "guard policy", limits.SLOT_WAIT_SECONDS),
        120,
        "{guard}: calls wait {duration} for a slot",
        "The first in line for a slot of the {policy} of {guard} in {job} waits too long.",
    ),
    _ticket(
        "SeawallPoolWait",
        _above(_ask.quantile(0.99, "pool_wait_seconds", "job pool"), limits.POOL_WAIT_SECONDS),
        300,
        "{pool}: borrowers wait {duration} (p99)",
        "The pool {pool} in {job} is too small, or what it lends is kept too long.",
    ),
    _ticket(
        "SeawallAbandonedThreads",
        _gauge_above("sum", "abandoned_threads", "instance guard", limits.ABANDONED_THREADS),
        600,
        "{guard}: {value} threads run on without a caller",
        "Calls of {guard} on {instance} timed out, but their threads did not end.",
    ),
    _ticket(
        "SeawallLoopLag",
        _gauge_above("max", "loop_lag_seconds", "instance", limits.LOOP_LAG_SECONDS),
        60,
        "{instance}: its event loop is {duration} late",
        "Something blocks the event loop of {instance} ({job}): all of its requests are late.",
    ),
    _page(
        "SeawallOutboxOld",
        _gauge_above("max", "outbox_age_seconds", "outbox", limits.OUTBOX_AGE_SECONDS),
        120,
        "{outbox}: an event waits for {duration}",
        "The oldest event of the outbox {outbox} in {job} has not been sent: no dispatcher runs,"
        " or the place it sends to refuses.",
    ),
    _page(
        "SeawallAggregateBlocked",
        _gauge_above("max", "outbox_blocked_aggregates", "outbox", limits.BLOCKED_AGGREGATES),
        60,
        "{outbox}: {value} aggregates are blocked",
        "An event of the outbox {outbox} in {job} could not be sent, and what comes after it"
        " waits until somebody decides.",
    ),
    _ticket(
        "SeawallQueueOld",
        _gauge_above(
            "max", "queue_age_seconds", "kind name", limits.QUEUE_AGE_SECONDS, 'kind!="outbox"'
        ),
        300,
        "{kind} {name}: the oldest waits for {duration}",
        "What waits in {kind} {name} of {job} is not worked off in time: no worker runs, or too"
        " few.",
    ),
    _ticket(
        "SeawallDeadLetters",
        _gauge_above("max", "queue_dead", "kind name", limits.DEAD),
        60,
        "{kind} {name}: {value} given up",
        "What {kind} {name} of {job} gave up is kept to be looked at.",
    ),
    _ticket(
        "SeawallRefusedLate",
        _more_than("refused_late", "kind name", limits.REFUSED_LATE),
        0,
        "{kind} {name}: work was taken over while it went on",
        "Answers of {kind} {name} in {job} came after another process had taken the work over."
        " The database refused them, but what was done outside of it may have been done twice.",
    ),
    _page(
        "SeawallFifoGap",
        _more_than("fifo_gaps", "name", limits.FIFO_GAPS),
        0,
        "{name}: messages are missing",
        "The FIFO receiver {name} in {job} waits for messages that do not come.",
    ),
    _page(
        "SeawallStoreLost",
        _ask.gauge("min", "store_up", "job store") + " == 0",
        limits.STORE_DOWN_SECONDS,
        "{store}: the shared store does not answer",
        "At least one process of {job} does not reach the store {store}: its shared policies go"
        " by `on_store_failure`.",
    ),
    _ticket(
        "SeawallPolicyAlone",
        _ask.gauge("min", "policy_shared", "job guard policy") + " == 0",
        600,
        "{guard}: its {policy} goes without the store",
        "The {policy} of {guard} in {job} is shared, but goes by `on_store_failure` for ten"
        " minutes now.",
    ),
    _page(
        "SeawallUnhealthy",
        _ask.gauge("max", "health_state", "job instance service level", 'state="unhealthy"')
        + " >= 1",
        300,
        "{instance}: {service} is unhealthy ({level})",
        "The checks of level {level} of {service} fail on {instance}.",
    ),
    _ticket(
        "SeawallHostsOut",
        _ratio_above(
            _ask.gauge("sum", "upstream_hosts", "job upstreams", 'state!="serving"'),
            _ask.gauge("sum", "upstream_hosts", "job upstreams"),
            limits.UNHEALTHY_HOSTS,
        ),
        120,
        "{upstreams}: {percent} of hosts do not serve",
        "Most hosts of {upstreams} are ejected or fail their checks, as {job} sees them.",
    ),
    _page(
        "SeawallPipelineFailing",
        _ratio_above(
            _ask.increase("pipeline_ended", "job pipeline", 'result="dead_letter"'),
            _ask.increase("pipeline_ended", "job pipeline"),
            limits.DEAD_ITEMS,
        )
        + "\nand\n"
        + _more_than("pipeline_ended", "pipeline", limits.FEW_DEAD_ITEMS, 'result="dead_letter"'),
        60,
        "{pipeline}: {percent} of items are dead letters",
        f"More than {_percent(limits.DEAD_ITEMS)} of the items of pipeline {{pipeline}} in"
        " {job} fail for good and are set aside.",
    ),
    _page(
        "SeawallStageStalled",
        _gauge_above(
            "max", "pipeline_stage_oldest_seconds", "pipeline stage", limits.STAGE_AGE_SECONDS
        ),
        60,
        "{pipeline}: an item has waited for {stage} for {duration}",
        "Stage {stage} of pipeline {pipeline} in {job} does not come to the items that wait for"
        " it: what it needs is down, or too slow. Its source is read no faster.",
    ),
    _page(
        "SeawallSourceFailing",
        _ask.gauge("max", "pipeline_source_failing", "job pipeline source") + " >= 1",
        120,
        "{pipeline}: source {source} fails",
        "Source {source} of pipeline {pipeline} in {job} cannot be read, or does not take the"
        " ends of items. It is tried again and again.",
    ),
    _ticket(
        "SeawallSourceMissing",
        _gauge_above("max", "collect_missing_seconds", "collect source", limits.MISSING_SECONDS),
        60,
        "{collect}: {source} is missing since {duration}",
        "Collections of {collect} in {job} go on without a fresh value of {source}, and say so.",
    ),
    _page(
        "SeawallTooFewSources",
        _more_than("collect_collections", "collect", limits.TOO_FEW, 'result="too_few"'),
        0,
        "{collect}: too few sources have a value",
        "Collections of {collect} in {job} have less than their minimum of values: they are left"
        " out, passed on or an error, as `too_few=` says.",
    ),
    _ticket(
        "SeawallFalseSuspects",
        _ratio_above(
            _ask.increase("member_changes", "job group", 'result="cleared"'),
            _ask.increase("member_changes", "job group", 'result=~"cleared|confirmed"'),
            limits.FALSE_SUSPECTS,
        )
        + "\nand\n"
        + _more_than("member_changes", "group", limits.FEW_FALSE_SUSPECTS, 'result="cleared"'),
        600,
        "{group}: {percent} of suspicions are wrong",
        "Members of {group} are suspected by {job} again and again, and then prove to be alive."
        " Jitter or GC pauses: widen windows before you page humans.",
    ),
    _ticket(
        "SeawallReadingOld",
        _gauge_above("min", "reading_age_seconds", "kind name", limits.READING_AGE_SECONDS),
        300,
        "{kind} {name}: nobody asked for {duration}",
        "What is shown of {kind} {name} in {job} is old, so that its age and depth tell nothing.",
    ),
    _ticket(
        "SeawallUnreadable",
        _gauge_above("sum", "unreadable", "kind", limits.UNREADABLE),
        600,
        "{job}: {value} of kind {kind} cannot be read",
        "A snapshot or a question to a store or database fails in {job}: what these would tell is"
        " missing.",
    ),
    _ticket(
        "SeawallSeriesFolded",
        _gauge_above("max", "series_folded", "metric", limits.FOLDED),
        900,
        "{job}: {metric} has too many series",
        "{value} series of {metric} in {job} are combined, as `other`: names are made from data.",
    ),
)
"""All rules, in the order of the file."""


def _written(alert: Alert, runbooks: str | None) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield "        expr: |-"
    yield from (f"          {line}" for line in alert.expr.splitlines())
    if alert.lasts:
        yield f"        for: {alert.lasts:g}s"
    yield "        labels:"
    yield f"          severity: {alert.severity}"
    yield "        annotations:"
    texts = [("summary", _template(alert.summary)), ("description", _template(alert.description))]
    if runbooks is not None:
        texts.append(("runbook_url", _runbook(alert, runbooks)))
    for name, text in texts:
        # A JSON string is also a YAML string, and needs no further escaping.
        yield f"          {name}: {json.dumps(text, ensure_ascii=False)}"


_VALUES: Final = {
    "value": "$value",
    "percent": "$value | humanizePercentage",
    "number": "$value | humanize",
    "duration": "$value | humanizeDuration",
}


def _template(text: str) -> str:
    """Return a text of an `Alert` as a template of Prometheus."""
    return re.sub(
        r"\{(\w+)\}",
        lambda field: f"{{{{ {_VALUES.get(field[1], f'$labels.{field[1]}')} }}}}",
        text,
    )


def _runbook(alert: Alert, runbooks: str) -> str:
    if "{alert}" in runbooks:
        return runbooks.replace("{alert}", alert.name)
    return f"{runbooks}#{alert.name.lower()}"
