"""Pools, executors, stores and leases."""

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
    full,
    mapping,
    share_of,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits


def _pool_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "limit", "waiting"))
    facts: Facts = [("idle", say.amount(seen.get("idle"))), ("waiting", say.amount(waiting))]
    for label, key in (("waits (p99)", "wait"), ("uses (p99)", "use")):
        p99 = mapping(seen.get(key)).get("p99")
        if p99 is not None:
            facts.append((label, say.seconds(p99)))
    troubles = ("leaked", "rejected", "timed_out", "connect_failed", "close_failed")
    facts += [
        (say.plainly(key), say.amount(seen[key])) for key in troubles if number(seen.get(key))
    ]
    return RowContent(
        say.use(used, size), "warn" if waiting else "ok", facts, share_of(used, size), waiting
    )


OUT_FOR: Final = 60.0
"""Seconds after which a borrowed resource counts as one that is not returned."""


def _pool_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    waiting = number(seen.get("waiting"))
    if waiting:
        slow = number(mapping(seen.get("wait")).get("p99"))
        tone: Tone = "bad" if slow > limits.POOL_WAIT_SECONDS else "warn"
        who = say.several(waiting, "borrower waits", "borrowers wait")
        what = f"{who}, there are {say.amount(seen.get('limit'))} in all"
        yield FoundTrouble(f"pool:{name}", tone, name, what, "Enlarge it, or give back sooner")
    leaks = number(seen.get("leaked"))
    counters.rate(("pool", name, "leaked"), leaks)
    borrowers = seen.get("borrowers")
    oldest = 0.0
    if isinstance(borrowers, (list, tuple)) and borrowers:
        oldest = number(mapping(borrowers[0]).get("seconds"))
    if counters.recent(("pool", name, "leaked")) or (leaks and oldest > OUT_FOR):
        what = f"{say.several(leaks, 'resource was', 'resources were')} not given back in time"
        what += f", the oldest is out for {say.seconds(oldest)}" if oldest else ""
        yield FoundTrouble(f"leak:{name}", "warn", name, what, "Borrow in a with block")


def _executor_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "workers", "waiting"))
    facts: Facts = [("waiting", say.amount(waiting))]
    if seen.get("p99") is not None:
        facts.append(("takes (p99)", say.seconds(seen["p99"])))
    troubles = ("failed", "rejected", "timed_out", "replaced", "abandoned")
    facts += [
        (say.plainly(key), say.amount(seen[key])) for key in troubles if number(seen.get(key))
    ]
    tone: Tone = "warn" if full(seen) else "ok"
    return RowContent(say.use(used, size), tone, facts, share_of(used, size), waiting)


def _executor_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    if full(seen):
        what = f"No worker of {say.amount(seen.get('workers'))} is free,"
        what += f" {say.several(seen.get('waiting'), 'call waits', 'calls wait')}"
        yield FoundTrouble(
            f"executor:{name}", "warn", name, what, "Give it more workers, or less work"
        )


def _store_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    up = seen["up"] is True
    facts: Facts = [("at", say.address(seen.get("at", "")))]
    if number(seen.get("dropped")):
        facts.append(("dropped", say.amount(seen["dropped"])))
    return RowContent("up" if up else "down", "ok" if up else "bad", facts, None, float(up))


def _store_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    if seen.get("up") is False:
        what = f"The store at {say.address(seen.get('at', ''))} does not answer"
        advice = "What is shared goes on as its on_store_failure says"
        yield FoundTrouble(f"store:{name}", "bad", name, what, advice, f"store:{name}")


def _lease_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    held = seen["held"] is True
    facts: Facts = [("token", say.amount(seen.get("token")))]
    if held:
        facts.append(("left", say.seconds(seen.get("left"))))
    return RowContent(
        "held" if held else "not held", "ok" if held else "off", facts, None, float(held)
    )


PRESENTERS: Final = {
    "pool": Presenter(_pool_row, _pool_troubles),
    "executor": Presenter(_executor_row, _executor_troubles),
    "store": Presenter(_store_row, _store_troubles),
    "lease": Presenter(_lease_row),
}
