"""What is wrong with anything that is no guard: rules over its snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import number
from seawall.dashboard._found import Found
from seawall.dashboard._guard_rules import guard_rule
from seawall.dashboard._lately import Seen, full, mapping
from seawall.dashboard._layers import listed
from seawall.dashboard._lines import ill_checks, waiting_of, worst_health
from seawall.dashboard._moves import Moves
from seawall.dashboard.views import Tone
from seawall.telemetry import _thresholds as limits

Rule = Callable[[str, str, Seen, Moves], Iterator[Found]]

OUT_FOR: Final = 60.0
"""Seconds after which a resource that is still out counts as one that does not come back."""


def _waiting(kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    known = waiting_of(kind, seen)
    what = say.plainly(kind)
    age = number(known.get("oldest"))
    most = limits.OUTBOX_AGE_SECONDS if kind == "outbox" else limits.QUEUE_AGE_SECONDS
    if age > most:
        waiting = f", {say.amount(known.get('waiting'))} wait"
        told = f"The oldest of the {what} has waited for {say.seconds(age)}{waiting}"
        yield Found(f"age:{kind}:{name}", "bad", name, told, "Does somebody work it off?")
    dead = number(known.get("dead"))
    if dead > limits.DEAD:
        told = f"Given up: {say.amount(dead)} of the {what}"
        advice = "Look at why they failed; do them again, or drop them"
        yield Found(f"dead:{kind}:{name}", "warn", name, told, advice)
    blocked = number(known.get("blocked"))
    if blocked > limits.BLOCKED_AGGREGATES:
        told = f"Events of {say.several(blocked, 'aggregate')} wait behind one that failed"
        yield Found(f"blocked:{name}", "bad", name, told, "Mend the cause, then unblock them")


def _pool(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    waiting = number(seen.get("waiting"))
    if waiting:
        slow = number(mapping(seen.get("wait")).get("p99"))
        tone: Tone = "bad" if slow > limits.POOL_WAIT_SECONDS else "warn"
        who = say.several(waiting, "borrower waits", "borrowers wait")
        what = f"{who}, there are {say.amount(seen.get('limit'))} in all"
        yield Found(f"pool:{name}", tone, name, what, "Enlarge it, or give back sooner")
    leaks = number(seen.get("leaked"))
    moves.rate(("pool", name, "leaked"), leaks)
    borrowers = seen.get("borrowers")
    oldest = 0.0
    if isinstance(borrowers, (list, tuple)) and borrowers:
        oldest = number(mapping(borrowers[0]).get("seconds"))
    if moves.lately(("pool", name, "leaked")) or (leaks and oldest > OUT_FOR):
        what = f"{say.several(leaks, 'resource was', 'resources were')} not given back in time"
        what += f", the oldest is out for {say.seconds(oldest)}" if oldest else ""
        yield Found(f"leak:{name}", "warn", name, what, "Borrow in a with block")


def _executor(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if full(seen):
        what = f"No worker of {say.amount(seen.get('workers'))} is free,"
        what += f" {say.several(seen.get('waiting'), 'call waits', 'calls wait')}"
        yield Found(f"executor:{name}", "warn", name, what, "Give it more workers, or less work")


def _store(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if seen.get("up") is False:
        what = f"The store at {say.address(seen.get('at', ''))} does not answer"
        advice = "What is shared goes on as its on_store_failure says"
        yield Found(f"store:{name}", "bad", name, what, advice, f"store:{name}")


def _health(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    worst = worst_health(seen)
    if worst in {"degraded", "unhealthy"}:
        ill = ill_checks(seen)
        what = f"The service is {worst}" + (f": {listed(ill)}" if ill else "")
        tone: Tone = "bad" if worst == "unhealthy" else "warn"
        yield Found(f"health:{name}", tone, name, what, "", f"health:{name}")


def _lifecycle(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if seen.get("state") == "draining":
        what = f"The service is draining, {say.several(seen.get('in_flight'), 'request')} in flight"
        yield Found(f"lifecycle:{name}", "warn", name, what, "", f"lifecycle:{name}")


def _ladder(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    level = str(seen["level"])
    if level != "full":
        pinned = ", since somebody pinned it" if seen.get("pinned") is True else ""
        what = f"The level of service is {say.plainly(level)}{pinned}"
        tone: Tone = "bad" if level == "maintenance" else "warn"
        yield Found(f"ladder:{name}", tone, name, what, "", f"ladder:{name}")


def _upstreams(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    hosts = mapping(seen["hosts"])
    out = [say.address(url) for url, one in hosts.items() if mapping(one).get("state") != "serving"]
    if out:
        what = f"Out of service are {len(out)} of {say.several(len(hosts), 'host')}: {listed(out)}"
        tone: Tone = "bad" if len(out) > limits.UNHEALTHY_HOSTS * len(hosts) else "warn"
        yield Found(f"upstreams:{name}", tone, name, what, "", f"upstreams:{name}")


def _watchdog(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    lag = number(seen.get("lag"))
    if lag > limits.LOOP_LAG_SECONDS:
        what = f"The event loop is {say.seconds(lag)} late, and so are all its requests"
        advice = "Move what blocks it to an executor: LoopBlocked tells where it stands"
        yield Found(f"watchdog:{name}", "bad", name, what, advice, f"watchdog:{name}")


def _request_limits(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    for limit in mapping(seen.get("limits")):
        over = moves.lately(("request_limits", name, "limits", limit))
        if over:
            what = f"The limit {limit} refuses {say.rate(over / moves.span)}"
            yield Found(f"request_limits:{name}:{limit}", "warn", name, what)
    shared = mapping(seen.get("shared"))
    if shared.get("mode", "shared") != "shared":
        what = f"The limits go without their store: {say.plainly(str(shared['mode']))}"
        key = f"store_mode:{name}"
        advice = "See whether the store answers"
        yield Found(f"{key}:limits", "warn", name, what, advice, f"{key}:rate_limit")


def _fifo(kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    moves.rate((kind, name, "gaps"), seen["gaps"])
    gaps = moves.lately((kind, name, "gaps"))
    if gaps > limits.FIFO_GAPS:
        what = f"{say.several(gaps, 'message')} did not come for too long"
        yield Found(f"gaps:{name}", "warn", name, what, "Look at its sender")


RULES: Final[dict[str, Rule]] = {
    "guard": guard_rule,
    **dict.fromkeys(("queue", "channel", "outbox", "jobs", "later"), _waiting),
    "pool": _pool,
    "executor": _executor,
    "store": _store,
    "health": _health,
    "lifecycle": _lifecycle,
    "ladder": _ladder,
    "upstreams": _upstreams,
    "watchdog": _watchdog,
    "request_limits": _request_limits,
    "fifo_receiver": _fifo,
}
"""By kind, what may be wrong with it."""
