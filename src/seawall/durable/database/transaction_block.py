"""Blocks inside a transaction of the user: `with` or `async with`, as the connection requires.

Promises:

- The final work of a block is done before the block is left.
- If the block raises (also by a cancellation, or because its final work fails), it undoes its first
  work, and the exception propagates: a caller that catches it may commit.
- If the transaction was ended inside the block, there is nothing to undo: it was rolled back, or it
  is committed with its effect.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Generic, TypeVar

from seawall.durable.database.connections import (
    Connection,
    arequire_transaction,
    require_transaction,
    still_open,
)
from seawall.runtime.driver import Steps, adrive, drive

T = TypeVar("T")

TOGETHER: Final = "what is noted is committed with its effect"


class TransactionBlock(Generic[T]):
    """A block whose parts are steps on the connection."""

    def __init__(self, connection: Connection) -> None:
        """Create a block in the current transaction of the connection."""
        self._connection = connection
        self._entered = False
        self._left = False

    def _begin(self) -> Steps[T]:
        """Do the first work; its result is the value of `as`."""
        raise NotImplementedError

    def _end(self) -> Steps[None]:
        """Do the final work."""
        raise NotImplementedError

    def _undo(self) -> Steps[None]:
        """Undo the work of `_begin`: the user may catch the exception and commit."""
        return
        yield  # pragma: no cover - a generator without steps

    def _check(self, *, awaited: bool) -> None:
        if self._connection.kind.is_async is not awaited:
            write = "with" if awaited else "async with"
            raise TypeError(f"{self._connection!r}: write `{write}` here")
        if self._entered:
            raise RuntimeError("a block is entered once: make another")

    def _is_over(self) -> bool:
        """Return whether the transaction was ended inside; if so, only count the undoing."""
        try:
            over = not still_open(self._connection)
        except Exception:  # noqa: BLE001 - from any driver, if the connection itself is broken
            over = True
        if over:
            self._only_count()
        return over

    def _only_count(self) -> None:
        next(self._undo(), None)

    # The rules of a block: they yield steps, which the connection runs

    def _enter(self) -> Steps[T]:
        self._entered = True
        try:
            begun: T = yield self._begin()
        except Exception:  # a failed statement has left nothing
            self._only_count()
            raise
        except BaseException:
            # The work may have been done all the same, if the driver's thread went on.
            yield from self._take_back()
            raise
        return begun

    def _leave(self, error: BaseException | None) -> Steps[None]:
        self._left = True
        if error is not None:
            if not self._is_over():
                yield from self._take_back()
            return
        if not still_open(self._connection):
            raise RuntimeError(
                f"{self._connection!r}: the transaction was ended inside the block: commit after it"
            )
        try:
            yield self._end()
        except BaseException:
            yield from self._take_back()
            raise

    def _take_back(self) -> Steps[None]:
        # In a broken transaction this fails, and is not needed: it will be rolled back.
        with suppress(Exception):
            yield self._undo()

    def __enter__(self) -> T:
        self._check(awaited=False)
        require_transaction(self._connection, TOGETHER)
        return drive(self._enter(), self._connection.run)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        drive(self._leave(error), self._connection.run)

    async def __aenter__(self) -> T:
        self._check(awaited=True)
        await arequire_transaction(self._connection, TOGETHER)
        return await adrive(self._enter(), self._connection.arun)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await adrive(self._leave(error), self._connection.arun)
