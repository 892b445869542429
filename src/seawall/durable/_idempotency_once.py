"""A key that is committed with the user's own rows, in the user's own transaction.

Promises: the record is there if and only if the transaction is committed. It is taken before the
block runs, so that a second transaction with the same key waits there, before it has done anything;
or is told so at once, without `wait`.
A block that raises leaves no record, even if the transaction is committed nevertheless. How a block
is entered and left is in `_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, Protocol
from weakref import WeakValueDictionary

from seawall import _checks as check
from seawall.durable import _idempotency_records as records
from seawall.durable._blocks import Block
from seawall.durable._connections import Connection
from seawall.durable._idempotency_records import Terms, Wanted
from seawall.durable._sql import Dialect, Names
from seawall.durable.database import Database
from seawall.errors import KeyInFlight, KeyReused
from seawall.models.idempotency import Fresh, KeyClaim, Mismatch, Pending, Replay
from seawall.runtime.stepping import Steps


class Outbox(Protocol):
    """What adds events: in a statement of ours (PostgreSQL), or in one of its own."""

    def rows_cte(self, events: Any, *, source: str | None = None) -> Any:
        """Return them as members of a WITH clause: text and arguments."""
        ...

    database: Database
    name: str
    max_payload: int

    def _adding_all(
        self, dialect: Dialect, events: Any, *, notify: bool, trail: str | None = None
    ) -> Steps[Any]:
        """Add them in the transaction that carries the steps out; their ids begin with `trail`."""
        ...

    def _notifying(self, dialect: Dialect) -> Steps[None]:
        """Tell dispatchers elsewhere, when it is committed; not too often."""
        ...

    def wake(self) -> None:
        """Have dispatchers look."""
        ...


_at_work: Final[WeakValueDictionary[tuple[Any, ...], Once]] = WeakValueDictionary()
"""The blocks that were the first with their key, by connection and key.

A repeat inside of one of them sees its record, which is not committed and has no answer yet."""


class Once(Block["Once"]):
    """One block: `first` tells whether to do it, `value` is what the first has answered.

    Made by `Idempotency.once`, and by nobody else.
    """

    def __init__(
        self,
        connection: Connection,
        wanted: Wanted,
        terms: Terms,
        count: Callable[[str], None],
        *,
        wait: bool = True,
    ) -> None:
        super().__init__(connection)
        self._wait = wait
        self._wanted = wanted
        self._terms = terms
        self._count = count
        self._claim: KeyClaim | None = None
        self._answer: tuple[object] | None = None
        self._outbox: Outbox | None = None
        self._events: list[Any] = []
        self._notify = False
        self._known = False
        self.first = False
        """Whether nobody has done it before."""
        self.value: Any = None
        """What the first has answered."""
        self.kept = True
        """False where that was too large to be kept: then `value` is None, or without its body."""
        self.failed = False
        """Whether that was recorded as a failure, by `complete(..., failed=True)`."""

    def __repr__(self) -> str:
        state = "not entered" if not self._entered else "first" if self.first else "a repeat"
        return f"<Once of {self._wanted.operation!r}: {state}>"

    def answer(
        self,
        value: object,
        *,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        notify: bool = False,
    ) -> None:
        """Store `value` (what JSON has, bytes, or an `Answer`) for all who come again.

        `events` are added to `outbox` with it, at the end of the block: on PostgreSQL in the same
        statement, which saves a round trip. With `notify`, dispatchers that listen are told when it
        commits, as `Outbox.add` does it.
        """
        if not self.first:
            raise RuntimeError(
                "this is a repeat, it has its answer: write `if once.first:` around what is done"
            )
        if self._claim is None or self._events:
            raise RuntimeError("answer once, inside the block: this would be lost")
        records.check_storable(value)  # raises here, where the mistake is
        self._events = checked_events(outbox, events, self._connection.names)
        self._notify = check.flag("notify", notify)
        self._outbox = outbox
        self._answer = (value,)
        self.value = value

    def _begin(self) -> Steps[Once]:
        asked = self._connection
        names = asked.names if asked.dialect == "postgres" else None
        found = yield from records.reserve_once(self._wanted, self._terms, names, wait=self._wait)
        self._known = True
        match found:
            case Fresh(claim):
                self.first, self._claim = True, claim
                _at_work[self._place] = self
                self._count("taken_over" if claim.taken_over else "fresh")
            case Replay():
                self._refuse_nesting()
                self._count("replays")
                self.value, self.kept = records.value_of(found), found.answer.kept
                self.failed = found.failed
            case refused:
                refuse(refused, self._wanted.operation, self._count)
        return self

    @property
    def _place(self) -> tuple[Any, ...]:
        asked = self._connection
        return (id(asked.raw), asked.names, *self._wanted[:3])

    def _refuse_nesting(self) -> None:
        outer = _at_work.get(self._place)
        if outer is not None and not outer._left:
            raise RuntimeError(
                f"{self._wanted.operation!r}: this transaction is inside a block with the same key,"
                " which has no answer yet: leave that block first, or use another key"
            )

    def _end(self) -> Steps[None]:
        if self._claim is None:
            return
        if self._answer is None:
            there = (yield from records.held(self._claim)) is not None
        else:
            members: tuple[str, dict[str, Any]] = ("", {})
            if self._outbox is not None and self._events:
                trail = records.trail_of(self._claim.owner, self._claim.epoch)
                if self._connection.dialect == "postgres":
                    rows = self._outbox.rows_cte(self._events)
                    rows.follow(trail)
                    members = rows[:2]
                else:
                    own = self._outbox._adding_all
                    dialect = self._connection.dialect
                    yield from own(dialect, self._events, notify=False, trail=trail)
            there = yield from records.set_answer(
                self._claim, self._answer[0], self._terms, *members
            )
            if self._outbox is not None and self._events and self._notify and there:
                yield from self._outbox._notifying(self._connection.dialect)
        if not there:
            raise RuntimeError(
                f"the record of {self._wanted.operation!r} is gone: it was rolled back to a"
                " savepoint inside the block; let the error leave the block instead"
            )
        self._claim = None
        self._count("completed")

    def _undo(self) -> Steps[None]:
        if self._known and self._claim is None:
            return  # a repeat: it has taken nothing
        if self._claim is not None:
            self._claim = None
            self._count("abandoned")
        # By the owner alone: who was cancelled while asking does not know whether it has it.
        yield from records.withdraw(self._wanted)


def checked_events(outbox: Outbox | None, events: Iterable[Any], names: Names) -> list[Any]:
    """Return the events as a list, if `outbox` can have them beside a key in tables of `names`."""
    given = list(check.listed("events", events, "NewEvent('order', '7', 'paid', {})"))
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
    """Raise what says why it is not done."""
    if isinstance(found, Mismatch):
        count("reused")
        raise KeyReused(f"the key of {operation!r} was used before, with another payload")
    count("in_flight")
    raise KeyInFlight(
        f"the first {operation!r} with this key is still at work",
        retry_after=found.retry_after,
    )
