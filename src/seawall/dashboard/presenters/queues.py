"""Queues, outboxes, jobs, their workers, and dead letters."""

from __future__ import annotations

from typing import Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import number
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    Presenter,
    RowContent,
    Seen,
    Troubles,
    counted,
    plain_facts,
    plain_row,
    share_of,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits
from seawall.telemetry.readings import waiting_of


def _queue_row(kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    known = waiting_of(kind, seen)
    if "waiting" not in known:
        return plain_row(kind, name, seen, counters)
    age = number(known.get("oldest"))
    most = limits.OUTBOX_AGE_SECONDS if kind == "outbox" else limits.QUEUE_AGE_SECONDS
    dead, blocked = number(known.get("dead")), number(known.get("blocked"))
    tone: Tone = "bad" if age > most or blocked > limits.BLOCKED_AGGREGATES else "ok"
    if tone == "ok" and dead > limits.DEAD:
        tone = "warn"
    facts: Facts = [("oldest", say.seconds(age))]
    facts += counted(known, _JOB_FACTS if kind == "jobs" else _QUEUE_FACTS)
    waiting = number(known.get("waiting"))
    room = known.get("max_size", known.get("max_waiting", known.get("capacity")))
    state = f"{say.amount(waiting)} waiting"
    return RowContent(state, tone, facts, share_of(waiting, room), waiting)


_QUEUE_FACTS: Final = (
    *("dead", "blocked", "claimed", "running", "delayed"),
    *("dropped", "rejected", "refused", "expired", "lost"),
)
_JOB_FACTS: Final = ("dead", "running", "expired")
"""Other numbers of these names are counters of the process, and say nothing of what waits."""


def _queue_troubles(kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    known = waiting_of(kind, seen)
    what = say.plainly(kind)
    age = number(known.get("oldest"))
    most = limits.OUTBOX_AGE_SECONDS if kind == "outbox" else limits.QUEUE_AGE_SECONDS
    if age > most:
        waiting = f", {say.amount(known.get('waiting'))} wait"
        text = f"The oldest of the {what} has waited for {say.seconds(age)}{waiting}"
        yield FoundTrouble(f"age:{kind}:{name}", "bad", name, text, "Does somebody work it off?")
    dead = number(known.get("dead"))
    if dead > limits.DEAD:
        text = f"Given up: {say.amount(dead)} of the {what}"
        advice = "Look at why they failed; do them again, or drop them"
        yield FoundTrouble(f"dead:{kind}:{name}", "warn", name, text, advice)
    blocked = number(known.get("blocked"))
    if blocked > limits.BLOCKED_AGGREGATES:
        text = f"Events of {say.several(blocked, 'aggregate')} wait behind one that failed"
        advice = "Mend the cause, then unblock them"
        yield FoundTrouble(f"blocked:{name}", "bad", name, text, advice)


def has_no_letters(seen: Seen) -> bool:
    """Return whether a pipeline has no known dead letters, and so needs no row."""
    known = waiting_of("dead_letters", seen)
    counts = (known.get(state) for state in ("dead", "waiting", "claimed"))
    return "stored_error" not in seen and not any(map(number, counts))


def _dead_letter_row(kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    known = waiting_of(kind, seen)
    dead = number(known.get("dead"))
    facts: Facts = [
        (label, say.amount(known[key]))
        for key, label in (("waiting", "to be replayed"), ("claimed", "being replayed"))
        if number(known.get(key))
    ]
    state = say.several(dead, "dead letter") if dead else "no dead letters"
    return RowContent(state, "warn" if dead > limits.DEAD else "ok", facts, None, dead)


def _dead_letter_troubles(kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    dead = number(waiting_of(kind, seen).get("dead"))
    if dead > limits.DEAD:
        what = f"{say.several(dead, 'dead letter waits', 'dead letters wait')} for somebody"
        yield FoundTrouble(f"dead:{name}", "warn", name, what, REPLAY)


def _worker_row(kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    slots, busy = number(seen.get("concurrency")), number(seen.get("at_work"))
    done = sum(number(seen.get(key)) for key in ("done", "succeeded", "delivered"))
    speed = counters.rate((kind, name, "done"), done)
    facts: Facts = [("done", say.rate(speed))]
    left = ("concurrency", "at_work", "running", "paused", "listening", "rounds")
    facts += [one for one in plain_facts(seen, left) if one[1] != "0"]
    if seen.get("running") is False:
        return RowContent("not running", "off", facts, None, speed)
    if seen.get("paused") is True:
        return RowContent("paused", "warn", facts, None, speed)
    state = f"{say.amount(busy)} of {say.amount(slots)} at work" if slots else "running"
    return RowContent(state, "ok", facts, share_of(busy, slots), speed)


def _serializer_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    waiting = number(seen["waiting"])
    facts: Facts = [
        ("in turn", say.amount(seen.get("in_flight"))),
        ("longest line", say.amount(seen.get("longest_line"))),
        ("refused", say.amount(seen.get("rejected"))),
    ]
    return RowContent(f"{say.amount(waiting)} waiting", "ok", facts, None, waiting)


def _fifo_troubles(kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    counters.rate((kind, name, "gaps"), seen["gaps"])
    gaps = counters.recent((kind, name, "gaps"))
    if gaps > limits.FIFO_GAPS:
        what = f"{say.several(gaps, 'message')} did not come for too long"
        yield FoundTrouble(f"gaps:{name}", "warn", name, what, "Look at its sender")


def _counters_row(kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    total = sum(number(value) for value in seen.values() if type(value) is int)
    speed = counters.rate((kind, name, "all"), total)
    facts = [one for one in plain_facts(seen, ("window", "in_flight")) if one[1] != "0"]
    return RowContent(say.rate(speed), "ok", facts, None, speed)


REPLAY: Final = "Look at why they failed; replay them, or drop them"

PRESENTERS: Final = {
    **dict.fromkeys(
        ("queue", "channel", "outbox", "jobs", "deferred_calls"),
        Presenter(_queue_row, _queue_troubles),
    ),
    **dict.fromkeys(
        ("worker", "job_worker", "deferred_call_worker", "dispatcher"), Presenter(_worker_row)
    ),
    **dict.fromkeys(
        ("idempotency", "idempotent_requests", "inbox", "fifo_sender", "jobs_api"),
        Presenter(_counters_row),
    ),
    "fifo_receiver": Presenter(_counters_row, _fifo_troubles),
    "dead_letters": Presenter(_dead_letter_row, _dead_letter_troubles),
    "serializer": Presenter(_serializer_row),
}
