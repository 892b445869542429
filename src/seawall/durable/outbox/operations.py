"""The database operations of an outbox: adding events, and those of the dispatcher.

A dispatcher's claim of an aggregate has an owner, an epoch and a lease. Its later writes are bound
to owner and epoch: a dispatcher that was taken over writes nothing.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.statements import Dialect
from seawall.durable.outbox.events import OutboxEvent, error_text, event_of
from seawall.runtime.driver import Steps


class ClaimedAggregate(NamedTuple):
    """A claimed aggregate with its next events, once they are fetched."""

    lane: int
    """Number of the aggregate in its table."""
    epoch: int
    attempts: int
    """Number of failed attempts of the first event."""
    tail: int
    """On SQLite: the sequence number up to which events are fetched."""
    events: list[OutboxEvent]


class ClaimedBatch(NamedTuple):
    """The result of a claim, and where the next one continues."""

    aggregates: list[ClaimedAggregate]
    after: int
    ended: bool
    """Whether the search reached the end of the outbox."""


class AggregateOutcome(NamedTuple):
    """The outcome for one aggregate, of which the first `delivered` events were delivered."""

    aggregate: ClaimedAggregate
    delivered: int
    action: str
    """One of "done" (released), "again" or "block" (failed), "skip" (the next event is dead)."""
    attempts: int = 0
    delay: int = 0
    error: object = ""

    @property
    def has_failed(self) -> bool:
        """Whether the event after the delivered ones was attempted and failed."""
        return type(self.error) is not str or self.error != ""

    @property
    def upto(self) -> int:
        """The sequence number of the last delivered event; 0 if none."""
        return self.aggregate.events[self.delivered - 1].sequence if self.delivered else 0


class StoredOutcomes(NamedTuple):
    """The result of storing outcomes."""

    late: int
    """Number of refused outcomes: their aggregates were taken over meanwhile."""
    failed: set[int]
    """The failed aggregates whose outcome was stored."""


# Adding


def add_event(dialect: Dialect, arguments: dict[str, Any]) -> Steps[int]:
    """Add one event; return its sequence number in its aggregate."""
    if dialect == "postgres":
        rows = yield NamedQuery("outbox.add", arguments)
        number: int = rows[0][0]
        return number
    where = {name: arguments[name] for name in ("outbox", "aggregate", "aggregate_id")}
    rows = yield NamedQuery("outbox.place", where)
    lane, number = rows[0]
    yield NamedQuery("outbox.put", {**arguments, "lane": lane, "sequence": number})
    return number


# Claiming


def claim_aggregates(
    dialect: Dialect,
    outbox: str,
    *,
    after: int,
    far: bool,
    batch: int,
    largest: int,
    owner: str,
    lease: int,
) -> Steps[ClaimedBatch]:
    """Claim aggregates behind `after`, and fetch a batch of their events.

    These are the aggregates of the next `batch` events; or, with `far`, the next `batch` aggregates
    however many events they have, for when the nearest cannot be claimed.
    """
    reach = {"near": 0, "far": batch} if far else {"near": batch, "far": 0}
    given = {"outbox": outbox, "after": after, **reach}
    if dialect == "postgres":
        yield NamedQuery("outbox.by_index", {})
        rows = yield NamedQuery("outbox.claim", {**given, "owner": owner, "lease": lease})
        looked, furthest = rows[0][:2]
        taken = [
            ClaimedAggregate(lane, epoch, failed, 0, [])
            for _, _, lane, epoch, failed in rows
            if lane is not None
        ]
        each = batch if not far else max(1, batch // max(1, len(taken)))
    else:
        rows = yield NamedQuery("outbox.look", given)
        looked, furthest = sum(row[4] for row in rows), rows[-1][0] if rows else None
        free = {row[0]: row[2:4] for row in rows if row[1]}
        each = max(1, batch // max(1, len(free)))
        got: list[tuple[Any, ...]] = []
        if free:
            listed = ",".join(map(str, free))
            asked = {"lanes": listed, "owner": owner, "lease": lease}
            got = yield NamedQuery("outbox.claim", asked)
        # There is no other writer meanwhile: every free one can be claimed.
        ends = {lane: head + each - 1 if far else tail for lane, (head, tail) in free.items()}
        taken = [
            ClaimedAggregate(lane, epoch, failed, ends[lane], []) for lane, epoch, failed in got
        ]
    taken.sort()
    yield from fetch_events(dialect, outbox, taken, each, batch, largest)
    used = [one.lane for one in taken if one.events]
    if used and len(used) < len(taken):
        # The batch was full before all aggregates had a turn: continue with the rest.
        return ClaimedBatch(taken, used[-1], ended=False)
    ended = (looked or 0) < batch
    return ClaimedBatch(taken, 0 if ended else furthest, ended=ended)


def fetch_events(
    dialect: Dialect,
    outbox: str,
    taken: list[ClaimedAggregate],
    each: int,
    batch: int,
    largest: int,
) -> Steps[None]:
    """Fetch the events of claimed aggregates: `each` per aggregate, `batch` in all.

    Fewer if their payloads exceed `largest` bytes together, but at least one.
    """
    if not taken:
        return
    arguments: dict[str, Any] = {"outbox": outbox, "bytes": largest}
    if dialect == "postgres":
        lanes = ",".join(str(one.lane) for one in taken)
        arguments |= {"lanes": lanes, "each": each, "batch": batch}
    else:
        arguments["marks"] = ",".join(f"[{one.lane},{one.tail}]" for one in taken)
    rows = yield NamedQuery("outbox.fetch", arguments)
    found = {one.lane: one for one in taken}
    for lane, sequence, number, aggregate, aggregate_id, *rest in rows:
        event = event_of((number, aggregate, aggregate_id, sequence, *rest))
        found[lane].events.append(event)


def renew_leases(
    dialect: Dialect, owner: str, aggregates: list[ClaimedAggregate], lease: int
) -> Steps[set[int]]:
    """Renew the leases; return the aggregates that are still held."""
    if dialect == "postgres":
        yield NamedQuery("outbox.by_index", {})
        asked = {
            "lanes": ",".join(str(one.lane) for one in aggregates),
            "epochs": ",".join({str(one.epoch) for one in aggregates}),
        }
        rows = yield NamedQuery("outbox.renew", {**asked, "owner": owner, "lease": lease})
        return {row[0] for row in rows}
    held = yield from _held(owner, aggregates)
    listed = ",".join(map(str, held))
    yield NamedQuery("outbox.renew", {"lanes": listed, "owner": owner, "lease": lease})
    return held


# Storing outcomes


def store_outcomes(
    dialect: Dialect, outbox: str, owner: str, settled: list[AggregateOutcome], *, keep: bool
) -> Steps[StoredOutcomes]:
    """Store the outcome of each aggregate; return how many were refused.

    An aggregate that was taken over meanwhile is refused: nothing is written for it.
    """
    steps = _store_outcomes_postgres if dialect == "postgres" else _store_outcomes_sqlite
    return steps(outbox, owner, settled, keep=keep)


def _store_outcomes_postgres(
    outbox: str, owner: str, settled: list[AggregateOutcome], *, keep: bool
) -> Steps[StoredOutcomes]:
    yield NamedQuery("outbox.by_index", {})
    ours = {"outbox": outbox, "owner": owner}
    accepted, stored = 0, set[int]()
    progressed = [one for one in settled if one.delivered]
    if keep and progressed:
        yield NamedQuery("outbox.keep", {**ours, **_listed(progressed)})
    if done := [one for one in settled if one.action == "done"]:
        rows = yield NamedQuery("outbox.done", {**ours, **_listed(done)})
        accepted += rows[0][0]
    if failed := [one for one in settled if one.action in {"again", "block"}]:
        marks = [
            {**_mark(one), "delay": one.delay, "blocked": one.action == "block"} for one in failed
        ]
        rows = yield NamedQuery("outbox.failed", {**ours, "marks": json.dumps(marks)})
        stored |= {row[0] for row in rows}
    if poison := [one for one in settled if one.action == "skip"]:
        marks = [
            {**_mark(one), "dead": one.aggregate.events[one.delivered].sequence} for one in poison
        ]
        rows = yield NamedQuery("outbox.bury", {**ours, "marks": json.dumps(marks)})
        stored |= {row[0] for row in rows}
    return StoredOutcomes(len(settled) - accepted - len(stored), stored)


def _mark(one: AggregateOutcome) -> dict[str, Any]:
    return {
        "lane": one.aggregate.lane,
        "epoch": one.aggregate.epoch,
        "upto": one.upto,
        "attempts": one.attempts,
        "error": error_text(one.error),
    }


def _listed(settled: list[AggregateOutcome]) -> dict[str, str]:
    return {
        "lanes": ",".join(str(one.aggregate.lane) for one in settled),
        "epochs": ",".join({str(one.aggregate.epoch) for one in settled}),
        "uptos": ",".join(str(one.upto) for one in settled),
    }


def _store_outcomes_sqlite(
    outbox: str, owner: str, settled: list[AggregateOutcome], *, keep: bool
) -> Steps[StoredOutcomes]:
    held = yield from _held(owner, [one.aggregate for one in settled])
    ours = [one for one in settled if one.aggregate.lane in held]
    if progressed := [one for one in ours if one.delivered]:
        marks = ",".join(f"[{one.aggregate.lane},{one.upto}]" for one in progressed)
        if keep:
            yield NamedQuery("outbox.keep", {"outbox": outbox, "marks": marks})
        yield NamedQuery("outbox.gone", {"outbox": outbox, "marks": marks})
    for one in ours:
        if one.action in {"again", "block"}:
            failure = {"attempts": one.attempts, "delay": one.delay, "error": error_text(one.error)}
            where = {"lane": one.aggregate.lane, "owner": owner, "blocked": one.action == "block"}
            yield NamedQuery("outbox.trouble", {**where, **failure})
        elif one.action == "skip":
            dead = one.aggregate.events[one.delivered].sequence
            where = {"outbox": outbox, "lane": one.aggregate.lane, "dead": dead}
            failure = {"attempts": one.attempts, "error": error_text(one.error)}
            yield NamedQuery("outbox.bury", {**where, **failure})
            marks = f"[{one.aggregate.lane},{dead}]"
            yield NamedQuery("outbox.gone", {"outbox": outbox, "marks": marks})
    freed = ",".join(str(one.aggregate.lane) for one in ours if one.action in {"done", "skip"})
    yield NamedQuery("outbox.free", {"owner": owner, "lanes": freed})
    stored = {one.aggregate.lane for one in ours if one.action != "done"}
    return StoredOutcomes(len(settled) - len(ours), stored)


def stored_earlier(outbox: str, settled: list[AggregateOutcome], *, held: bool) -> Steps[set[int]]:
    """Return the aggregates whose block or dead event an earlier attempt of ours has stored.

    A block is recognised by its epoch. A dead event counts only while our lease is `held`: later,
    another dispatcher may have stored it.
    """
    found = set()
    for one in settled:
        rows: list[Any] = []
        if one.action == "block":
            place = {"lane": one.aggregate.lane, "epoch": one.aggregate.epoch}
            rows = yield NamedQuery("outbox.was_blocked", place)
        elif one.action == "skip" and held:
            event = one.aggregate.events[one.delivered]
            rows = yield NamedQuery("outbox.was_buried", {"outbox": outbox, "id": event.id})
        if rows:
            found.add(one.aggregate.lane)
    return found


def _held(owner: str, aggregates: list[ClaimedAggregate]) -> Steps[set[int]]:
    marks = ",".join(f"[{one.lane},{one.epoch}]" for one in aggregates)
    rows = yield NamedQuery("outbox.held", {"marks": marks, "owner": owner})
    return {row[0] for row in rows}
