"""Databases: rows of a table as a source, and effects that happen once as a sink.

Promises:
- Each row that was committed is read, in the order of its position, also if it was committed after
  rows with larger numbers. A resumed run repeats at most what was read since the last checkpoint.
- The function of an `InboxSink` has one effect for each item, however often the item comes: its
  rows and the note that the item was handled are committed together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, overload

from seawall import _checks as check
from seawall.durable import Database, Inbox, Sqlite
from seawall.durable.database.database import checked_database, in_thread
from seawall.durable.database.table_reader import DatabaseCheckpoint, TableReader
from seawall.models.fifo import Positions
from seawall.pipeline.checkpoint import SavedPlace, wait_for_oldest
from seawall.pipeline.item import CURRENT_BATCH, Item, current_item
from seawall.pipeline.source import checked_name
from seawall.pipeline.stage import BatchFailed
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of

T = TypeVar("T")

GAP_PAUSE: Final = 0.2
"""Maximum seconds between two looks at a gap that a transaction may still fill."""


class TableSource:
    """See `table`."""

    keeps_ids = True
    """The number of a row is its own for ever."""

    def __init__(
        self,
        reader: TableReader,
        *,
        name: str,
        after: int,
        place: SavedPlace,
        follow: bool,
        poll: float,
    ) -> None:
        self.name = name
        self._reader = reader
        self._place = place
        self._follow = follow
        self._poll = poll
        self._last = after
        """The number of the row that was handed out last."""
        self._positions: Positions | None = None

    async def pull(self, most: int) -> Sequence[tuple[dict[str, Any], int]]:
        """Return the next rows; wait for more at the end if the table is followed."""
        positions = self._positions
        if positions is None:
            positions = await self._resume()
        await wait_for_oldest(positions, self.name)
        while True:
            rows, more = await self._reader.read(self._last, most)
            if rows:
                for row in rows:
                    positions.begin(row.position)
                self._last = rows[-1].position
                return [(row.values, row.position) for row in rows]
            if not more and not self._follow:
                return ()
            await sleep_async(min(self._poll, GAP_PAUSE) if more else self._poll)

    async def _resume(self) -> Positions:
        saved = await self._place.load(lambda place: type(place) is int)
        if saved is not None:
            self._last = saved
        self._positions = Positions(self._last)
        return self._positions

    async def acknowledge(self, handles: Sequence[int]) -> None:
        """Move the checkpoint, and save it now and then."""
        positions = self._positions
        if positions is not None:
            for position in handles:
                positions.finish(position)
            await self._place.save_if_due(lambda: positions.checkpoint)

    async def give_back(self, handles: Sequence[int]) -> None:
        """Do nothing: the checkpoint stays before them."""

    async def close(self) -> None:
        """Save the checkpoint."""
        if self._positions is not None:
            await self._place.save(self._positions.checkpoint)
            self._positions = None  # another run begins there

    def snapshot(self) -> dict[str, Any]:
        """Return the last row that was handed out, and whether later ones wait for a gap."""
        return {"kind": "table", "place": self._last, "held_back": self._reader.held_back}


def table(
    database: Database,
    name: str,
    *,
    position: str = "id",
    checkpoint: str | None = None,
    columns: Iterable[str] | None = None,
    after: int = 0,
    every: float = 1.0,
    follow: bool = False,
    poll: float = 1.0,
    source: str | None = None,
) -> TableSource:
    """Read the rows of the table `name`, or "schema.name", as dictionaries of `columns`, or of all.

    `position` is a column of unique whole numbers that grow, drawn by the INSERT itself, as those
    of a serial or identity key are. Rows behind `after` are read in its order. With `checkpoint`, a
    name, the place is kept in the database, in a table that `migrate` makes: it is saved `every`
    few seconds. With `follow` it looks for more every `poll` seconds. `source` is the name of the
    source, unless given that of the table.
    """
    checked = checked_database("table", database)
    checked_name(name)
    checked_name(position, "position", "id")
    listed = () if isinstance(columns, str) else tuple(columns or ())
    are_names = all(isinstance(column, str) and column for column in listed)
    if columns is not None and not (listed and are_names):
        raise TypeError(f"columns={columns!r}: write names, such as ['id', 'total']")
    kept = None if checkpoint is None else DatabaseCheckpoint(checked, checkpoint)
    return TableSource(
        TableReader(checked, name, position, listed or None),
        name=name if source is None else checked_name(source),
        after=check.count("after", after, minimum=0),
        place=SavedPlace(kept, every),
        follow=check.flag("follow", follow),
        poll=check.seconds("poll", poll),
    )


class InboxSink(Generic[T]):
    """A sink whose effect happens once for each item, in a transaction with a note of it."""

    def __init__(
        self,
        inbox: Inbox,
        consumer: str,
        function: Callable[[Any, T], Awaitable[Any]] | Callable[[Any, T], Any],
        *,
        id: Callable[[T], str] | None = None,  # noqa: A002 - it is one
    ) -> None:
        """Call `function(conn, value)` in a transaction of the inbox's database.

        It is async where connections are awaited, and plain for a `Sqlite` or a pool of blocking
        connections. Items are distinguished by the id of their source, or by `id(value)`, within
        `consumer`. Of a sink with `batch=`, the function is called with each value in turn, all in
        one transaction; if one of them fails, each has a transaction of its own.
        """
        if not isinstance(inbox, Inbox):
            raise TypeError(f"InboxSink({inbox!r}, ...): pass an Inbox")
        check.function("function", function)
        database = inbox.database
        if kind_of(function) != ("async" if database.is_async else "sync"):
            wanted = "an async" if database.is_async else "a plain"
            raise TypeError(f"function={function!r}: {database!r} wants {wanted} function here")
        self._inbox = inbox
        self._consumer = checked_name(consumer, "consumer", "billing")
        self._function: Callable[[Any, T], Any] = function
        self._id = None if id is None else check.plain_function("id", id)
        self.__name__ = consumer

    @overload
    async def __call__(self, value: T) -> None: ...
    @overload
    async def __call__(self, value: list[T]) -> None: ...
    async def __call__(self, value: Any) -> None:
        """Have the effect, unless this item had it before; of a batch, in one transaction."""
        items = CURRENT_BATCH.get()
        if items is None:
            await self._do([self._effect(current_item(), value)])
            return
        effects = [self._effect(item, one) for item, one in zip(items, value, strict=True)]
        try:
            await self._do(effects)
        except Exception as error:
            if len(effects) == 1 or not any(effect.failure is error for effect in effects):
                raise  # of the only one, or of the database
            await self._do_one_by_one(effects)

    async def _do_one_by_one(self, effects: list[_Effect]) -> None:
        """Have each effect in a transaction of its own; without a database, those left fail."""
        failures: dict[int, Exception] = {}
        for place, effect in enumerate(effects):
            try:
                await self._do([effect])
            except Exception as error:  # noqa: BLE001 - of the user's function, or of the database
                failures[place] = error
                if effect.failure is not error:
                    failures |= dict.fromkeys(range(place, len(effects)), error)
                    break
        if failures:
            raise BatchFailed(failures)

    def _effect(self, item: Item, value: T) -> _Effect:
        return _Effect(value, item.id if self._id is None else self._id(value))

    async def _do(self, effects: list[_Effect]) -> None:
        """Have all effects in one transaction, but for those that were had before."""
        database = self._inbox.database
        if database.is_async:
            await database.guard.acall(self._aonce, effects)
        elif isinstance(database.source, Sqlite):
            await database.source.arun(lambda conn: self._once(conn, effects))
        else:
            await in_thread(database.guard.call, self._once_in_transaction, effects)

    async def _aonce(self, effects: list[_Effect]) -> None:
        inbox = self._inbox
        async with inbox.database.atransaction() as conn:
            for effect in effects:
                async with inbox.once(conn, self._consumer, effect.message) as first:
                    if first:
                        with effect:
                            await self._function(conn, effect.value)

    def _once_in_transaction(self, effects: list[_Effect]) -> None:
        with self._inbox.database.transaction() as conn:
            self._once(conn, effects)

    def _once(self, conn: Any, effects: list[_Effect]) -> None:
        for effect in effects:
            with self._inbox.once(conn, self._consumer, effect.message) as first:
                if first:
                    with effect:
                        self._function(conn, effect.value)


@dataclass(slots=True)
class _Effect:
    """What an `InboxSink` does with one item; around the call of the function, a context."""

    value: Any
    message: str
    """The id under which the inbox knows it."""
    failure: BaseException | None = None
    """What the user's function has raised last."""

    def __enter__(self) -> None:
        self.failure = None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.failure = error
