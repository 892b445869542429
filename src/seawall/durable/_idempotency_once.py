"""A key that is committed with the user's own rows, in the user's own transaction.

Promises: the record is there if and only if the transaction is committed. It is taken before the
block runs, so that a second transaction with the same key waits there, before it has done anything.
A block that raises leaves no record, even if the transaction is committed nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, Protocol, Self

from seawall.durable import _idempotency_records as records
from seawall.durable._connections import Connection, in_transaction
from seawall.durable._idempotency_errors import KeyInFlight, KeyReused
from seawall.durable._idempotency_records import Terms, Wanted
from seawall.errors import LeaseLost
from seawall.models.idempotency import (
    Claim,
    Fresh,
    Mismatch,
    Pending,
    Replay,
    Reservation,
    State,
)
from seawall.runtime.stepping import Steps


class Outbox(Protocol):
    """What adds events: in a statement of ours (PostgreSQL), or in one of its own."""

    def rows_cte(self, events: Any, *, source: str | None = None) -> Any:
        """Return them as members of a WITH clause: text and arguments."""
        ...

    def add_all(self, connection: Any, events: Any) -> Any:
        """Add them in the connection's transaction."""
        ...

    def wake(self) -> None:
        """Have dispatchers look."""
        ...


class Once:
    """One block: `first` tells whether to do it, `value` is what the first has answered."""

    def __init__(
        self,
        connection: Connection,
        wanted: Wanted,
        terms: Terms,
        count: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._wanted = wanted
        self._terms = terms
        self._count = count
        self._claim: Claim | None = None
        self._answer: tuple[object] | None = None
        self._outbox: Outbox | None = None
        self._events: list[Any] = []
        self._entered = False
        self.first = False
        """Whether nobody has done it before."""
        self.value: Any = None
        """What the first has answered."""
        self.kept = True
        """False where that was too large to be kept."""

    def __repr__(self) -> str:
        state = "not entered" if not self._entered else "first" if self.first else "a repeat"
        return f"<Once of {self._wanted.operation!r}: {state}>"

    def answer(
        self, value: object, *, outbox: Outbox | None = None, events: Iterable[Any] = ()
    ) -> None:
        """Store `value` (what JSON has, bytes, or an `Answer`) for all who come again.

        `events` are added to `outbox` with it, at the end of the block: on PostgreSQL in the same
        statement, which saves a round trip.
        """
        if not self.first:
            raise RuntimeError(
                "this is a repeat, it has its answer: write `if once.first:` around what is done"
            )
        records.check_storable(value)  # raises here, where the mistake is
        self._outbox, self._events = outbox, list(events)
        if self._events and outbox is None:
            raise TypeError("events: say which outbox they are for, too: outbox=...")
        self._answer = (value,)
        self.value = value

    # Blocking and awaiting

    def __enter__(self) -> Self:
        if self._connection.kind.is_async:
            raise TypeError(f"{self._connection!r} is awaited: write `async with`")
        self._begin()
        self._found(self._connection.run(self._take()))
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        end = self._end(failed=kind is not None)
        if end is None:
            return
        if kind is None:
            if self._apart:
                self._apart.add_all(self._connection.raw, self._events)
            self._checked(self._connection.run(end))
            return
        # Where the transaction is broken this cannot be done, and is not needed: it rolls back.
        with suppress(Exception):
            self._connection.run(end)

    async def __aenter__(self) -> Self:
        if not self._connection.kind.is_async:
            raise TypeError(f"{self._connection!r} is not awaited: write `with`")
        self._begin()
        try:
            found = await self._connection.arun(self._take())
        except BaseException:
            # Who gives up may have taken it all the same: a thread of the driver's went on.
            with suppress(Exception):
                await self._connection.arun(records.withdraw(self._wanted))
            raise
        self._found(found)
        return self

    async def __aexit__(self, kind: object, *_exc: object) -> None:
        end = self._end(failed=kind is not None)
        if end is None:
            return
        if kind is None:
            if self._apart:
                await self._apart.add_all(self._connection.raw, self._events)
            self._checked(await self._connection.arun(end))
            return
        with suppress(Exception):
            await self._connection.arun(end)

    # What both do

    def _begin(self) -> None:
        if self._entered:
            raise RuntimeError("a block is entered once: call once(...) for each")
        if not in_transaction(self._connection):
            raise RuntimeError(
                f"{self._connection!r} has no transaction: begin one, so that the key is committed"
                " with what it stands for"
            )
        self._entered = True

    def _take(self) -> Steps[Reservation]:
        return records.reserve(self._wanted, self._terms, State.SUCCEEDED)

    def _found(self, found: Reservation) -> None:
        match found:
            case Fresh(claim):
                self.first, self._claim = True, claim
                self._count("taken_over" if claim.taken_over else "fresh")
            case Replay():
                self._count("replays")
                self.value, self.kept = records.value_of(found), found.answer.kept
            case refused:
                refuse(refused, self._wanted.operation, self._count)

    def _end(self, *, failed: bool) -> Steps[bool] | None:
        claim, self._claim = self._claim, None
        if claim is None:
            return None
        if failed:
            self._count("abandoned")
            return records.forget(claim, State.SUCCEEDED)
        self._count("completed")
        if self._answer is None:
            return None
        members: tuple[str, dict[str, Any]] = ("", {})
        if self._outbox and self._events and not self._apart:
            members = self._outbox.rows_cte(self._events)[:2]
        return records.set_answer(claim, self._answer[0], self._terms, *members)

    @property
    def _apart(self) -> Outbox | None:
        """Return where events go by statements of their own, if there are any."""
        together = self._connection.dialect == "postgres"
        return None if together or not self._events else self._outbox

    def _checked(self, there: bool) -> None:  # noqa: FBT001 - the one thing it is told
        if not there:
            raise LeaseLost(
                f"the record of {self._wanted.operation!r} is gone: the transaction was rolled"
                " back inside the block"
            )


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
