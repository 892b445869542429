"""Alert rules for Prometheus, made from the tables of metrics and thresholds.

Promises:
- The file loads as it is.
- Each rule has a heading in the documentation that says what it means and what to do.
- Rules distinguish jobs, so that one file serves all services.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from seawall.telemetry import thresholds as threshold
from seawall.telemetry.promql import PromqlQueries

__all__ = ["alert_rules"]

Severity = Literal["page", "ticket"]


class Alert(NamedTuple):
    """One rule; `expr` must hold for `lasts` seconds before it fires."""

    name: str
    severity: Severity
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


# Rules

_ask: Final = PromqlQueries(f"{threshold.WINDOW / 60:g}m")

_CALLS: Final = _ask.rate("attempts", "job guard")
_ENOUGH: Final = f"{_CALLS} > {threshold.FEW_CALLS / 60:.4f}"


def _share(part: str, whole: str, above: float) -> str:
    """Return the condition that `part` is too large a share of enough calls of a guard."""
    return f"{part}\n/\n{whole}\n> {above:g}\nand\n{_ENOUGH}"


def _above(expr: str, limit: float) -> str:
    return f"{expr} > {limit:g}"


def _any(expr: str) -> str:
    """Return the condition that at least one is set: a series may combine several."""
    return f"{expr} >= 1"


def _none(expr: str) -> str:
    return f"{expr} == 0"


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        "SeawallCircuitOpenRate",
        "page",
        _share(
            _ask.rate("rejected", "job guard", 'policy="breaker"'), _CALLS, threshold.CIRCUIT_OPEN
        ),
        60,
        "{{ $labels.guard }}: {{ $value | humanizePercentage }} of calls meet an open circuit",
        f"More than {_percent(threshold.CIRCUIT_OPEN)} of the calls of guard"
        " {{ $labels.guard }} in {{ $labels.job }} are refused because its breaker is open: the"
        " dependency fails.",
    ),
    Alert(
        "SeawallErrorRatio",
        "page",
        _share(
            _ask.rate("attempts", "job guard", 'outcome="failed"'),
            _ask.rate("attempts", "job guard", 'outcome=~"succeeded|failed"'),
            threshold.ERROR_RATIO,
        ),
        300,
        "{{ $labels.guard }}: {{ $value | humanizePercentage }} of attempts fail",
        f"More than {_percent(threshold.ERROR_RATIO)} of the attempts of guard"
        " {{ $labels.guard }} in {{ $labels.job }} fail.",
    ),
    Alert(
        "SeawallRetryBudgetSpent",
        "ticket",
        # Not the gauge: for a budget refilled by successes, it stays at 1 long after an outage.
        _above(_ask.rate("retries_stopped", "job guard", 'cause="budget"'), threshold.UNRETRIED),
        300,
        "{{ $labels.guard }}: the retry budget is spent, failed calls are not retried",
        "Calls of guard {{ $labels.guard }} in {{ $labels.job }} fail and are not retried, since"
        " the retry budget is spent.",
    ),
    Alert(
        "SeawallBreakerIsolated",
        "ticket",
        _any(_ask.gauge("max", "breaker_state", "job guard", 'state="isolated"')),
        threshold.ISOLATED_SECONDS,
        "{{ $labels.guard }}: its breaker is isolated, by hand",
        "Somebody isolated the breaker of {{ $labels.guard }} in {{ $labels.job }}, and it has"
        " been so for an hour: it does not close by itself.",
    ),
    Alert(
        "SeawallBreakerFlapping",
        "ticket",
        _above(
            _ask.increase("breaker_transitions", "job instance guard", 'to="closed"'),
            threshold.FLAPPING,
        ),
        600,
        "{{ $labels.guard }}: its breaker closes and opens again and again",
        "The breaker of {{ $labels.guard }} on {{ $labels.instance }} closed"
        " {{ $value | humanize }} times in five minutes: the dependency bears the probes, but not"
        " the load.",
    ),
    Alert(
        "SeawallShedding",
        "ticket",
        _share(_ask.rate("shed", "job guard"), _CALLS, threshold.SHED),
        300,
        "{{ $labels.guard }}: {{ $value | humanizePercentage }} of calls are shed",
        f"More than {_percent(threshold.SHED)} of the calls of {{{{ $labels.guard }}}} in"
        " {{ $labels.job }} are shed: there is more work than it can do.",
    ),
    Alert(
        "SeawallSaturated",
        "ticket",
        _above(_ask.gauge("avg", "autoscale_load", "job"), threshold.LOAD),
        600,
        "{{ $labels.job }}: {{ $value | humanizePercentage }} full",
        "The processes of {{ $labels.job }} are full, on average: above 100 % work waits.",
    ),
    Alert(
        "SeawallSlotsFull",
        "ticket",
        _above(
            _ask.gauge("max", "slot_wait_seconds", "job guard policy"), threshold.SLOT_WAIT_SECONDS
        ),
        120,
        "{{ $labels.guard }}: calls wait {{ $value | humanizeDuration }} for a slot",
        "The first in line for a slot of the {{ $labels.policy }} of {{ $labels.guard }} in"
        " {{ $labels.job }} waits too long.",
    ),
    Alert(
        "SeawallPoolWait",
        "ticket",
        _above(_ask.quantile(0.99, "pool_wait_seconds", "job pool"), threshold.POOL_WAIT_SECONDS),
        300,
        "{{ $labels.pool }}: borrowers wait {{ $value | humanizeDuration }} (p99)",
        "The pool {{ $labels.pool }} in {{ $labels.job }} is too small, or what it lends is kept"
        " too long.",
    ),
    Alert(
        "SeawallAbandonedThreads",
        "ticket",
        _above(
            _ask.gauge("sum", "abandoned_threads", "job instance guard"),
            threshold.ABANDONED_THREADS,
        ),
        600,
        "{{ $labels.guard }}: {{ $value }} threads run on without a caller",
        "Calls of {{ $labels.guard }} on {{ $labels.instance }} timed out, but their threads did"
        " not end.",
    ),
    Alert(
        "SeawallLoopLag",
        "ticket",
        _above(_ask.gauge("max", "loop_lag_seconds", "job instance"), threshold.LOOP_LAG_SECONDS),
        60,
        "{{ $labels.instance }}: its event loop is {{ $value | humanizeDuration }} late",
        "Something blocks the event loop of {{ $labels.instance }} ({{ $labels.job }}): all of its"
        " requests are late.",
    ),
    Alert(
        "SeawallOutboxOld",
        "page",
        _above(_ask.gauge("max", "outbox_age_seconds", "job outbox"), threshold.OUTBOX_AGE_SECONDS),
        120,
        "{{ $labels.outbox }}: an event waits for {{ $value | humanizeDuration }}",
        "The oldest event of the outbox {{ $labels.outbox }} in {{ $labels.job }} has not been"
        " sent: no dispatcher runs, or the place it sends to refuses.",
    ),
    Alert(
        "SeawallAggregateBlocked",
        "page",
        _above(
            _ask.gauge("max", "outbox_blocked_aggregates", "job outbox"),
            threshold.BLOCKED_AGGREGATES,
        ),
        60,
        "{{ $labels.outbox }}: {{ $value }} aggregates are blocked",
        "An event of the outbox {{ $labels.outbox }} in {{ $labels.job }} could not be sent, and"
        " what comes after it waits until somebody decides.",
    ),
    Alert(
        "SeawallQueueOld",
        "ticket",
        _above(
            _ask.gauge("max", "queue_age_seconds", "job kind name", 'kind!="outbox"'),
            threshold.QUEUE_AGE_SECONDS,
        ),
        300,
        "{{ $labels.kind }} {{ $labels.name }}: the oldest waits for"
        " {{ $value | humanizeDuration }}",
        "What waits in {{ $labels.kind }} {{ $labels.name }} of {{ $labels.job }} is not worked"
        " off in time: no worker runs, or too few.",
    ),
    Alert(
        "SeawallDeadLetters",
        "ticket",
        _above(_ask.gauge("max", "queue_dead", "job kind name"), threshold.DEAD),
        60,
        "{{ $labels.kind }} {{ $labels.name }}: {{ $value }} given up",
        "What {{ $labels.kind }} {{ $labels.name }} of {{ $labels.job }} gave up is kept to be"
        " looked at.",
    ),
    Alert(
        "SeawallRefusedLate",
        "ticket",
        _above(_ask.increase("refused_late", "job kind name"), threshold.REFUSED_LATE),
        0,
        "{{ $labels.kind }} {{ $labels.name }}: work was taken over while it went on",
        "Answers of {{ $labels.kind }} {{ $labels.name }} in {{ $labels.job }} came after another"
        " process had taken the work over. The database refused them, but what was done outside of"
        " it may have been done twice.",
    ),
    Alert(
        "SeawallFifoGap",
        "page",
        _above(_ask.increase("fifo_gaps", "job name"), threshold.FIFO_GAPS),
        0,
        "{{ $labels.name }}: messages are missing",
        "The FIFO receiver {{ $labels.name }} in {{ $labels.job }} waits for messages that do not"
        " come.",
    ),
    Alert(
        "SeawallStoreLost",
        "page",
        _none(_ask.gauge("min", "store_up", "job store")),
        threshold.STORE_DOWN_SECONDS,
        "{{ $labels.store }}: the shared store does not answer",
        "At least one process of {{ $labels.job }} does not reach the store {{ $labels.store }}:"
        " its shared policies go by `on_store_failure`.",
    ),
    Alert(
        "SeawallPolicyAlone",
        "ticket",
        _none(_ask.gauge("min", "policy_shared", "job guard policy")),
        600,
        "{{ $labels.guard }}: its {{ $labels.policy }} goes without the store",
        "The {{ $labels.policy }} of {{ $labels.guard }} in {{ $labels.job }} is shared, but goes"
        " by `on_store_failure` for ten minutes now.",
    ),
    Alert(
        "SeawallUnhealthy",
        "page",
        _any(_ask.gauge("max", "health_state", "job instance service level", 'state="unhealthy"')),
        300,
        "{{ $labels.instance }}: {{ $labels.service }} is unhealthy ({{ $labels.level }})",
        "The checks of level {{ $labels.level }} of {{ $labels.service }} fail on"
        " {{ $labels.instance }}.",
    ),
    Alert(
        "SeawallHostsOut",
        "ticket",
        _ask.gauge("sum", "upstream_hosts", "job upstreams", 'state!="serving"')
        + "\n/\n"
        + _ask.gauge("sum", "upstream_hosts", "job upstreams")
        + f"\n> {threshold.UNHEALTHY_HOSTS:g}",
        120,
        "{{ $labels.upstreams }}: {{ $value | humanizePercentage }} of hosts do not serve",
        "Most hosts of {{ $labels.upstreams }} are ejected or fail their checks, as"
        " {{ $labels.job }} sees them.",
    ),
    Alert(
        "SeawallPipelineFailing",
        "page",
        _ask.increase("pipeline_ended", "job pipeline", 'result="dead_letter"')
        + "\n/\n"
        + _ask.increase("pipeline_ended", "job pipeline")
        + f"\n> {threshold.DEAD_ITEMS:g}\nand\n"
        + _above(
            _ask.increase("pipeline_ended", "job pipeline", 'result="dead_letter"'),
            threshold.FEW_DEAD_ITEMS,
        ),
        60,
        "{{ $labels.pipeline }}: {{ $value | humanizePercentage }} of items are dead letters",
        f"More than {_percent(threshold.DEAD_ITEMS)} of the items of pipeline"
        " {{ $labels.pipeline }} in {{ $labels.job }} fail for good and are set aside.",
    ),
    Alert(
        "SeawallStageStalled",
        "page",
        _above(
            _ask.gauge("max", "pipeline_stage_oldest_seconds", "job pipeline stage"),
            threshold.STAGE_AGE_SECONDS,
        ),
        60,
        "{{ $labels.pipeline }}: an item has waited for {{ $labels.stage }} for"
        " {{ $value | humanizeDuration }}",
        "Stage {{ $labels.stage }} of pipeline {{ $labels.pipeline }} in {{ $labels.job }} does"
        " not come to the items that wait for it: what it needs is down, or too slow. Its source"
        " is read no faster.",
    ),
    Alert(
        "SeawallSourceFailing",
        "page",
        _any(_ask.gauge("max", "pipeline_source_failing", "job pipeline source")),
        120,
        "{{ $labels.pipeline }}: source {{ $labels.source }} fails",
        "Source {{ $labels.source }} of pipeline {{ $labels.pipeline }} in {{ $labels.job }} cannot"
        " be read, or does not take the ends of items. It is tried again and again.",
    ),
    Alert(
        "SeawallSourceMissing",
        "ticket",
        _above(
            _ask.gauge("max", "collect_missing_seconds", "job collect source"),
            threshold.MISSING_SECONDS,
        ),
        60,
        "{{ $labels.collect }}: {{ $labels.source }} is missing since"
        " {{ $value | humanizeDuration }}",
        "Collections of {{ $labels.collect }} in {{ $labels.job }} go on without a fresh value of"
        " {{ $labels.source }}, and say so.",
    ),
    Alert(
        "SeawallTooFewSources",
        "page",
        _above(
            _ask.increase("collect_collections", "job collect", 'result="too_few"'),
            threshold.TOO_FEW,
        ),
        0,
        "{{ $labels.collect }}: too few sources have a value",
        "Collections of {{ $labels.collect }} in {{ $labels.job }} have less than their minimum of"
        " values: they are left out, passed on or an error, as `too_few=` says.",
    ),
    Alert(
        "SeawallFalseSuspects",
        "ticket",
        _ask.increase("member_changes", "job group", 'result="cleared"')
        + "\n/\n"
        + _ask.increase("member_changes", "job group", 'result=~"cleared|confirmed"')
        + f"\n> {threshold.FALSE_SUSPECTS:g}\nand\n"
        + _above(
            _ask.increase("member_changes", "job group", 'result="cleared"'),
            threshold.FEW_FALSE_SUSPECTS,
        ),
        600,
        "{{ $labels.group }}: {{ $value | humanizePercentage }} of suspicions are wrong",
        "Members of {{ $labels.group }} are suspected by {{ $labels.job }} again and again, and"
        " then prove to be alive. Jitter or GC pauses: widen windows before you page humans.",
    ),
    Alert(
        "SeawallReadingOld",
        "ticket",
        _above(
            _ask.gauge("min", "reading_age_seconds", "job kind name"), threshold.READING_AGE_SECONDS
        ),
        300,
        "{{ $labels.kind }} {{ $labels.name }}: nobody asked for {{ $value | humanizeDuration }}",
        "What is shown of {{ $labels.kind }} {{ $labels.name }} in {{ $labels.job }} is old, so"
        " that its age and depth tell nothing.",
    ),
    Alert(
        "SeawallUnreadable",
        "ticket",
        _above(_ask.gauge("sum", "unreadable", "job kind"), threshold.UNREADABLE),
        600,
        "{{ $labels.job }}: {{ $value }} of kind {{ $labels.kind }} cannot be read",
        "A snapshot or a question to a store or database fails in {{ $labels.job }}: what these"
        " would tell is missing.",
    ),
    Alert(
        "SeawallSeriesFolded",
        "ticket",
        _above(_ask.gauge("max", "series_folded", "job metric"), threshold.FOLDED),
        900,
        "{{ $labels.job }}: {{ $labels.metric }} has too many series",
        "{{ $value }} series of {{ $labels.metric }} in {{ $labels.job }} are combined, as"
        " `other`: names are made from data.",
    ),
)
"""All rules, in the order of the file."""


# Output


def _written(alert: Alert, runbooks: str | None) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield "        expr: |-"
    yield from (f"          {line}" for line in alert.expr.splitlines())
    if alert.lasts:
        yield f"        for: {alert.lasts:g}s"
    yield "        labels:"
    yield f"          severity: {alert.severity}"
    yield "        annotations:"
    texts = [("summary", alert.summary), ("description", alert.description)]
    if runbooks is not None:
        texts.append(("runbook_url", _runbook(alert, runbooks)))
    for name, text in texts:
        # A JSON string is also a YAML string, and needs no further escaping.
        yield f"          {name}: {json.dumps(text, ensure_ascii=False)}"


def _runbook(alert: Alert, runbooks: str) -> str:
    if "{alert}" in runbooks:
        return runbooks.replace("{alert}", alert.name)
    return f"{runbooks}#{alert.name.lower()}"
