"""Events that are committed together with the rows they describe, and delivered afterwards.

Promises:

- An event is added in the user's own transaction: it is committed with it or never exists.
- Within an aggregate (an order, an account) events have sequence numbers without gaps, in commit
  order. For that, the row of the counter is locked from `add` to the end of the transaction: other
  transactions that add to the same aggregate wait, all others do not.
- Each event has an id, which is the same for every delivery.

A `Dispatcher` delivers the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID
from weakref import WeakSet

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import containing
from seawall.durable.database.twins import OnConnection, transaction_twins, twins
from seawall.durable.outbox.events import (
    BlockedAggregate,
    DeadEvent,
    FromRow,
    NewEvent,
    event_of,
    headers_text,
    new_id,
    payload_bytes,
    refuse_column,
    text,
)
from seawall.durable.outbox.operations import (
    AggregateOutcome,
    ClaimedAggregate,
    add_event,
    fetch_events,
    store_outcomes,
)
from seawall.durable.outbox.with_clause import EventMembers, write
from seawall.jobs import WorkItem, WorkPage
from seawall.jobs.work_list import BEYOND, OPENED, page_of, page_request
from seawall.models.queue.jobs import BROWSED
from seawall.runtime.driver import Steps
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.durable.outbox.dispatcher import Dispatcher

DEBOUNCE: Final = 0.05
"""Minimum seconds between two notifications of one process: each takes a lock at commit."""

TOGETHER: Final = "the event is committed with the rows it tells of"
MOST_LISTED: Final = 1_000
CLEAN_AT_ONCE: Final = 1_000
"""Default number of rows that one transaction deletes."""
KEEP_DEAD: Final = 30 * 86_400.0


class Outbox:
    """The events for one kind of receiver; several outboxes may share a database."""

    WORK_STATES = ("dead", "blocked", "waiting")
    """The event states that `browse` can list."""

    def __init__(
        self,
        database: Database,
        name: str = "outbox",
        *,
        max_payload: int = 262_144,
        clock: Clock | None = None,
    ) -> None:
        """Keep events under `name` in `database`, each of up to `max_payload` bytes."""
        self.database = checked_database("Outbox", database)
        self.name = text("name", name)
        self.max_payload = check.count("max_payload", max_payload, maximum=2**26)
        self.clock = current_clock() if clock is None else check_clock(clock)
        self._begin_afresh()
        survives_fork(self)
        registry.enter(self, "outbox", self.name, ask="asurvey", local=False)

    def _begin_afresh(self) -> None:
        self._mutex = Mutex()
        self._notified_at = float("-inf")
        self._dispatchers: WeakSet[Dispatcher] | None = None

    def _after_fork(self) -> None:
        self._begin_afresh()

    def __repr__(self) -> str:
        return f"<Outbox {self.name!r} in {self.database!r}>"

    @property
    def channel(self) -> str:
        """The PostgreSQL NOTIFY channel."""
        return self.database.names.channel(f"outbox.{self.name}")

    # Adding events, in the user's transaction

    def _add(
        self,
        conn: Any,
        aggregate: str,
        aggregate_id: str | int | UUID,
        event_type: str,
        payload: Any,
        *,
        headers: Mapping[str, str] | None = None,
        notify: bool = False,
    ) -> Steps[str]:
        """Add an event in the current transaction of `conn`; return its id.

        With `notify`, listening dispatchers are notified at the commit (at most every 50 ms by this
        process, because notifications serialise commits).
        """
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        adding = partial(self._add_steps, new_id(), event, notify=check.flag("notify", notify))
        id_: str = yield OnConnection(conn, adding, TOGETHER)
        return id_

    add, aadd = twins(_add)

    def _add_all(
        self, conn: Any, events: Iterable[NewEvent], *, notify: bool = False
    ) -> Steps[list[str]]:
        """Add several events, on PostgreSQL in one statement; return their ids."""
        by_id = {new_id(): event for event in listed_events(events)}
        adding = partial(self._add_all_steps, by_id, notify=check.flag("notify", notify))
        ids: list[str] = yield OnConnection(conn, adding, TOGETHER)
        return ids

    add_all, aadd_all = twins(_add_all)

    def _add_steps(self, id_: str, event: NewEvent, *, notify: bool) -> Steps[str]:
        yield from add_event(self.database.dialect, self._arguments(id_, event))
        if notify:
            yield from self._notify()
        return id_

    def _add_all_steps(self, events: Mapping[str, NewEvent], *, notify: bool) -> Steps[list[str]]:
        """Add events by id; return their ids."""
        if events and self.database.dialect == "postgres":
            for event in events.values():
                for name, value in (("aggregate_id", event[1]), ("payload", event[3])):
                    if isinstance(value, FromRow):
                        refuse_column(name, value)
            members = self._members(events)
            yield TextQuery(f"WITH {members.text}\nSELECT 1", members.arguments)
        else:
            for id_, event in events.items():
                yield from self._add_steps(id_, event, notify=False)
        if events and notify:
            yield from self._notify()
        return list(events)

    def _notify(self) -> Steps[None]:
        notification = self._notification()
        if notification is not None:
            yield notification

    def _arguments(self, id_: str, event: NewEvent) -> dict[str, Any]:
        return {
            "outbox": self.name,
            "aggregate": text("aggregate", event.aggregate),
            "aggregate_id": text("aggregate_id", event.aggregate_id),
            "id": id_,
            "type": text("event_type", event.type),
            "payload": payload_bytes(event.payload, self.max_payload),
            "headers": headers_text(event.headers),
        }

    def rows_cte(self, events: Iterable[NewEvent], *, source: str | None = None) -> EventMembers:
        """Return the members of a WITH clause that add `events`: (text, arguments).

        For a statement that also writes the business row (PostgreSQL). The text has the form of
        `sql/`. `source` names the member that returns the business row. Events are then added only
        if there is such a row, and an event's `aggregate_id` or `payload` may be a column of it, as
        `FromRow("id")`.
        """
        return self._members({new_id(): event for event in listed_events(events)}, source)

    def _members(self, events: Mapping[str, NewEvent], source: str | None = None) -> EventMembers:
        """Return the members that add `events` by id."""
        arguments: dict[str, Any] = {}
        text = write(arguments, self.name, events, source, self.max_payload)
        return EventMembers(text, arguments)

    # Waking dispatchers

    def _announce(self) -> Steps[None]:
        """Wake dispatchers after a commit; those of other processes at most every 50 ms."""
        self.wake()
        notification = self._notification()
        if notification is not None:
            yield notification.alone

    announce, aannounce = twins(_announce)

    def wake(self) -> None:
        """Wake the dispatchers of this process, so that they look at once."""
        if self._dispatchers is None:  # most services run them in another process
            return
        with self._mutex:
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.wake()

    def _register(self, dispatcher: Dispatcher) -> None:
        """Register a dispatcher for `wake`, for as long as it lives."""
        with self._mutex:
            known = self._dispatchers = (
                WeakSet() if self._dispatchers is None else self._dispatchers
            )
            known.add(dispatcher)

    def _notification(self) -> NamedQuery | None:
        """Return the query that notifies other processes; None on SQLite, or after another one.

        An event that follows a notification closely is found by the dispatchers that it has woken,
        because they poll often then.
        """
        if self.database.dialect != "postgres":
            return None
        now = self.clock.now()
        with self._mutex:
            if now - self._notified_at < DEBOUNCE:
                return None
            self._notified_at = now
        return NamedQuery("outbox.notify", {"channel": self.channel})

    # Browsing

    def _browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> Steps[WorkPage]:
        """Return a page of up to 100 events that are dead, blocked or waiting.

        Dead events start with the latest; for a blocked aggregate the blocking event is listed.
        `search` matches id, type, aggregate and error, ignoring case. `after` is `next` of the
        previous page. One call examines a bounded number of events: a page may have fewer than
        `limit` events and still a `next`. Without `payloads`, payloads are not read.
        """
        request = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        if state == "waiting" and request.id and not request.id.isdecimal():
            raise ValueError(f"after={after!r:.50}: write None, or `next` of the page before")
        first = BEYOND if state == "dead" else -BEYOND
        arguments: dict[str, Any] = {
            "outbox": self.name,
            "pattern": containing(request.search),
            "cut": request.cut,
            "number": request.number if request.id else first,
            "most": BROWSED,
        }
        if state == "dead":
            arguments["id"] = request.id
        elif state == "waiting":
            arguments["id"] = int(request.id or 0)
        rows = yield NamedQuery(f"outbox.browse_{state}", arguments).alone
        return page_of(rows, request.limit, _item)

    browse, abrowse = twins(_browse)

    def _inspect(self, id: str, *, payload: bool = True) -> Steps[WorkItem | None]:  # noqa: A002
        """Return an event with up to 64 KiB of its payload; None if it does not exist."""
        cut = OPENED if check.flag("payload", payload) else 0
        arguments = {"outbox": self.name, "id": text("id", id), "cut": cut}
        rows = yield NamedQuery("outbox.inspect", arguments)
        return _item(rows[0]) if rows else None

    inspect, ainspect = transaction_twins(_inspect)

    # Failures

    def _dead(self, limit: int = 100) -> Steps[list[DeadEvent]]:
        """Return the dead events, the oldest first."""
        bound = check.count("limit", limit, maximum=MOST_LISTED)
        rows = yield NamedQuery("outbox.dead", {"outbox": self.name, "most": bound})
        letters = []
        for row in rows:
            error, trace = split_report(row[9] or "")
            letters.append(DeadEvent(event_of(row[:8]), row[8], error, row[10] / 1e6, trace))
        return letters

    dead, adead = transaction_twins(_dead)

    def _blocked(self, limit: int = 100) -> Steps[list[BlockedAggregate]]:
        """Return the aggregates that wait for `unblock`."""
        bound = check.count("limit", limit, maximum=MOST_LISTED)
        rows = yield NamedQuery("outbox.blocked", {"outbox": self.name, "most": bound})
        return [
            BlockedAggregate(aggregate, aggregate_id, attempts, *split_report(error or ""))
            for aggregate, aggregate_id, attempts, error in rows
        ]

    blocked, ablocked = transaction_twins(_blocked)

    def _retry(self, id: str) -> Steps[bool]:  # noqa: A002
        """Retry an event that is dead or blocks its aggregate; return False if it is neither.

        A dead event is added again behind the others of its aggregate, with the same id.
        """
        key = {"outbox": self.name, "id": text("id", id)}
        rows = yield NamedQuery("outbox.exhume", key)
        if not rows:
            blocked = yield from self._blocked_by(id)
            return blocked is not None and (yield from self._unblock(*blocked))
        names = ("aggregate", "aggregate_id", "type", "payload", "headers")
        arguments = {**key, **dict(zip(names, rows[0], strict=True))}
        arguments["payload"] = bytes(arguments["payload"])
        yield from add_event(self.database.dialect, arguments)
        return True

    retry, aretry = transaction_twins(_retry)

    def _drop(self, id: str) -> Steps[bool]:  # noqa: A002
        """Delete an event that is dead or blocks its aggregate; return False if it is neither."""
        key = {"outbox": self.name, "id": text("id", id)}
        if (yield NamedQuery("outbox.exhume", key)):
            return True
        blocked = yield from self._blocked_by(id)
        if blocked is None or not (yield from self._unblock(*blocked, skip=True)):
            return False
        return bool((yield NamedQuery("outbox.exhume", key)))

    drop, adrop = transaction_twins(_drop)

    def _blocked_by(self, id_: str) -> Steps[tuple[str, str] | None]:
        """Return the aggregate that an event blocks, or None."""
        rows = yield NamedQuery("outbox.inspect", {"outbox": self.name, "id": id_, "cut": 0})
        return rows[0][4:6] if rows and rows[0][2] == "blocked" else None

    def _unblock(
        self, aggregate: str, aggregate_id: str | int | UUID, *, skip: bool = False
    ) -> Steps[bool]:
        """Resume a blocked aggregate; with `skip`, without the event that blocks it.

        A skipped event is dead: see `dead()` and `retry()`. Returns False if the aggregate is not
        blocked.
        """
        where = {
            "outbox": self.name,
            "aggregate": text("aggregate", aggregate),
            "aggregate_id": text("aggregate_id", aggregate_id),
        }
        if not check.flag("skip", skip):
            return bool((yield NamedQuery("outbox.unblock", where)))
        owner, dialect = new_id(), self.database.dialect
        rows = yield NamedQuery("outbox.hold_blocked", {**where, "owner": owner})
        for number, epoch, attempts, error in rows:
            head = yield NamedQuery("outbox.head", {"outbox": self.name, "lane": number})
            blocked = ClaimedAggregate(number, epoch, attempts, head[0][0] or 0, [])
            yield from fetch_events(dialect, self.name, [blocked], 1, 1, 0)
            action = "skip" if blocked.events else "done"
            ended = AggregateOutcome(blocked, 0, action, attempts, 0, error or "")
            yield from store_outcomes(dialect, self.name, owner, [ended], keep=False)
        return bool(rows)

    unblock, aunblock = transaction_twins(_unblock)

    # Cleanup

    def _cleanup(
        self,
        *,
        keep: float = 0.0,
        keep_dead: float = KEEP_DEAD,
        batch: int = CLEAN_AT_ONCE,
        within: float = 10.0,
    ) -> Steps[int]:
        """Delete delivered events older than `keep` seconds, dead ones older than `keep_dead`.

        Works in batches and returns how many were deleted. It ends after about `within` seconds,
        finished or not.
        """
        return cleaning_steps(batch, within, *self._to_clean(keep, keep_dead))

    cleanup, acleanup = twins(_cleanup)

    def _to_clean(self, keep: float, keep_dead: float) -> list[NamedQuery]:
        ages = {
            False: check.seconds("keep", keep, zero=True),
            True: check.seconds("keep_dead", keep_dead, zero=True),
        }
        return [
            NamedQuery("outbox.clean", {"outbox": self.name, "dead": dead, "age": round(age * 1e6)})
            for dead, age in ages.items()
        ]

    async def _aclean_some(self, *, keep: float) -> bool:
        """Delete one batch; return whether there may be more. For callers with other work to do."""
        removals = [one.of_batch(CLEAN_AT_ONCE) for one in self._to_clean(keep, KEEP_DEAD)]
        deleted = [len(await self.database.arun(one.alone)) for one in removals]
        return max(deleted) >= CLEAN_AT_ONCE

    def _forget(
        self, *, idle: float, batch: int = CLEAN_AT_ONCE, within: float = 10.0
    ) -> Steps[int]:
        """Delete the counters of aggregates that had no event for `idle` seconds.

        Only aggregates without any remaining event are affected. Their sequence numbers start at 1
        again; ids do not repeat. `idle` must be longer than any transaction that adds events. Works
        in batches for about `within` seconds, as `cleanup` does.
        """
        age = round(check.seconds("idle", idle) * 1e6)
        forgetting = NamedQuery("outbox.forget", {"outbox": self.name, "age": age})
        return cleaning_steps(batch, within, forgetting)

    forget, aforget = twins(_forget)

    # Statistics

    def _survey(self) -> Steps[dict[str, Any]]:
        """Return the numbers of pending, dead and blocked, and the age of the oldest event.

        Counts stop at 100 000; the oldest is the oldest of those counted.
        """
        rows = yield NamedQuery("outbox.survey", {"outbox": self.name})
        pending, oldest, dead, blocked = rows[0]
        age = 0.0 if oldest is None else max(0, oldest) / 1e6
        found = {"pending": pending, "oldest_age": age, "dead": dead, "blocked": blocked}
        registry.answered(self, found)
        return found

    survey, asurvey = transaction_twins(_survey)


def listed_events(events: Iterable[NewEvent]) -> list[NewEvent]:
    """Return the events as a list, or raise if one is no `NewEvent`."""
    found = list(check.listed("events", events, "NewEvent('order', '7', 'paid', {})"))
    for event in found:
        if not isinstance(event, NewEvent):
            raise TypeError(f"{event!r}: pass NewEvent(aggregate, aggregate_id, type, payload)")
    return found


def _item(row: tuple[Any, ...]) -> WorkItem:
    # Before these is its position, of one column or two.
    id_, state, kind, aggregate, aggregate_id, attempts, error, *rest = row[-13:]
    created, ended, size, payload, _, now = rest
    error, trace = split_report(error or "")
    return WorkItem(
        id_,
        state,
        kind,
        f"{aggregate} {aggregate_id}",
        None,
        attempts,
        max(0, now - created) / 1e6,
        (now - (created if ended is None else ended)) / 1e6,
        error,
        size,
        bytes(payload),
        () if state == "waiting" else ("retry", "drop"),
        trace,
    )
