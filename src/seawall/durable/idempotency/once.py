"""A key that is committed together with the user's rows, in the user's transaction.

Promises:

- The record exists if and only if the transaction is committed.
- It is taken before the block runs. So a second transaction with the same key waits before it has
  done anything, or is refused at once without `wait`.
- A block that raises leaves no record, even if the transaction is committed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Self
from weakref import WeakValueDictionary

from seawall import _checks as check
from seawall.durable.database.connections import Connection
from seawall.durable.database.statements import Dialect, TableNames
from seawall.durable.database.transaction_block import TransactionBlock
from seawall.durable.idempotency import records
from seawall.durable.idempotency.records import KeyRequest, KeyTerms
from seawall.durable.outbox.outbox import Outbox, listed_events
from seawall.errors import KeyInFlight, KeyReused
from seawall.models.idempotency import Fresh, KeyClaim, Mismatch, Pending, Replay
from seawall.runtime.driver import Steps

_open_blocks: Final[WeakValueDictionary[tuple[Any, ...], Once]] = WeakValueDictionary()
"""The open blocks that were first with their key, by connection and key.

A repeat nested in one of them sees its record, which is not committed and has no answer yet.
"""


class Once(TransactionBlock["Once"]):
    """One block: `first` says whether to run it, `value` is the answer of the first one.

    Created by `Idempotency.once` only.
    """

    def __init__(
        self,
        connection: Connection,
        request: KeyRequest,
        terms: KeyTerms,
        count: Callable[[str], None],
        *,
        wait: bool = True,
    ) -> None:
        super().__init__(connection)
        self._wait = wait
        self._request = request
        self._terms = terms
        self._count = count
        self._claim: KeyClaim | None = None
        self._answer: tuple[object] | None = None
        self._events = KeyEvents()
        self._reserved = False
        self.first = False
        """Whether this is the first time, so that the block should do its work."""
        self.value: Any = None
        """The stored answer of the first one."""
        self.kept = True
        """False if the answer was too large to store: `value` is then None, or has no body."""
        self.failed = False
        """Whether the outcome was stored as a failure, by `complete(..., failed=True)`."""

    def __repr__(self) -> str:
        state = "not entered" if not self._entered else "first" if self.first else "a repeat"
        return f"<Once of {self._request.operation!r}: {state}>"

    def answer(
        self,
        value: object,
        *,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        notify: bool = False,
    ) -> None:
        """Store `value` (a JSON value, bytes, or an `Answer`) for all repeats.

        `events` are added to `outbox` with it, at the end of the block: on PostgreSQL in the same
        statement, which saves a round trip. With `notify`, listening dispatchers are notified at
        the commit, as by `Outbox.add`.
        """
        if not self.first:
            raise RuntimeError(
                "this is a repeat, it has its answer: write `if once.first:` around what is done"
            )
        if self._claim is None or self._events.events:
            raise RuntimeError("answer once, inside the block: this would be lost")
        records.check_storable(value)  # raise here, where the mistake is
        self._events = KeyEvents.checked(outbox, events, self._connection.names, notify=notify)
        self._answer = (value,)
        self.value = value

    def _begin(self) -> Steps[Once]:
        connection = self._connection
        names = connection.names if connection.dialect == "postgres" else None
        found = yield from records.reserve_once(self._request, self._terms, names, wait=self._wait)
        self._reserved = True
        match found:
            case Fresh(claim):
                self.first, self._claim = True, claim
                _open_blocks[self._place] = self
                self._count("taken_over" if claim.taken_over else "fresh")
            case Replay():
                self._refuse_nested()
                self._count("replays")
                self.value, self.kept = records.value_of(found), found.answer.kept
                self.failed = found.failed
            case refused:
                refuse(refused, self._request.operation, self._count)
        return self

    @property
    def _place(self) -> tuple[Any, ...]:
        connection = self._connection
        return (id(connection.raw), connection.names, *self._request[:3])

    def _refuse_nested(self) -> None:
        outer = _open_blocks.get(self._place)
        if outer is not None and not outer._left:
            raise RuntimeError(
                f"{self._request.operation!r}: this transaction is inside a block with the same"
                " key, which has no answer yet: leave that block first, or use another key"
            )

    def _end(self) -> Steps[None]:
        if self._claim is None:
            return
        if self._answer is None:
            stored = (yield from records.held(self._claim)) is not None
        else:
            storing = partial(records.set_answer, self._claim, self._answer[0], self._terms)
            dialect = self._connection.dialect
            stored = yield from self._events.commit_with(storing, self._claim, dialect)
        if not stored:
            raise RuntimeError(
                f"the record of {self._request.operation!r} is gone: it was rolled back to a"
                " savepoint inside the block; let the error leave the block instead"
            )
        self._claim = None
        self._count("completed")

    def _undo(self) -> Steps[None]:
        if self._reserved and self._claim is None:
            return  # a repeat has taken nothing
        if self._claim is not None:
            self._claim = None
            self._count("abandoned")
        # By owner: a caller that was cancelled while asking does not know whether it got the key.
        yield from records.withdraw(self._request)


class KeyEvents(NamedTuple):
    """The events that are committed with the answer of a key."""

    outbox: Outbox | None = None
    events: Sequence[Any] = ()
    notify: bool = False
    """Whether listening dispatchers are notified at the commit."""

    @classmethod
    def checked(
        cls, outbox: Outbox | None, events: Iterable[Any], names: TableNames, *, notify: bool
    ) -> Self:
        """Check the arguments of the user, with `names` of the key's tables."""
        check.flag("notify", notify)
        return cls(outbox, checked_events(outbox, events, names), notify)

    def commit_with(
        self,
        storing: Callable[[str, dict[str, Any]], Steps[bool]],
        claim: KeyClaim,
        dialect: Dialect,
        source: str | None = None,
    ) -> Steps[bool]:
        """Add the events in the transaction in which `storing` stores the answer.

        It is called with members of a WITH clause and their arguments: on PostgreSQL, the events
        are part of its statement. Return whether it stored the answer.
        """
        outbox, events, notify = self
        if outbox is None or not events:
            return (yield from storing("", {}))
        trail = records.trail_of(claim.owner, claim.epoch)
        by_id = {f"{trail}-{index}": event for index, event in enumerate(events)}
        if dialect == "postgres":
            stored = yield from storing(*outbox._members(by_id, source))
        else:
            stored = yield from storing("", {})
            if stored:
                yield from outbox._add_all_steps(by_id, notify=False)
        if stored and notify:
            yield from outbox._notify()
        return stored


def checked_events(outbox: Outbox | None, events: Iterable[Any], names: TableNames) -> list[Any]:
    """Return the events as a list, if `outbox` uses the same tables (`names`) as the key."""
    given = listed_events(events)
    if outbox is None:
        if given:
            raise TypeError("events: say which outbox they are for, too: outbox=...")
        return given
    if not hasattr(outbox, "rows_cte"):
        raise TypeError(f"outbox={outbox!r}: pass an Outbox")
    if outbox.database.names != names:
        raise ValueError(
            f"outbox: its tables are those of {outbox.database.names!r}, and the key's those of"
            f" {names!r}: make both with one Database"
        )
    return given


def refuse(found: Pending | Mismatch, operation: str, count: Callable[[str], None]) -> NoReturn:
    """Raise the exception for a key that cannot be used now."""
    if isinstance(found, Mismatch):
        count("reused")
        raise KeyReused(f"the key of {operation!r} was used before, with another payload")
    count("in_flight")
    raise KeyInFlight(
        f"the first {operation!r} with this key is still at work", retry_after=found.retry_after
    )
