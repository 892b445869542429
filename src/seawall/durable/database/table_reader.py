"""Tables of the user, read in the order of an integer column; and stored checkpoints.

Numbers are drawn in one order and committed in another: when row 6 is visible, row 5 may not be
committed yet, and a reader that continues behind 6 would never see it. So a reader that finds a gap
before a row waits until every transaction has ended that had written to the table when the row was
seen: the one that drew the smaller number is among them. After that the gap is filled, or stays
forever. In SQLite there is one writer at a time, and no such gap.

Promises:

- Each committed row is read once, in the order of its position.
- A gap holds up the rows behind it only while a transaction is open that may fill it.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import quoted, stored_name
from seawall.runtime.driver import Steps

INTEGERS: Final = frozenset({"smallint", "integer", "bigint", "int"})
"""Column types by which a table can be read."""


class DatabaseCheckpoint:
    """A position stored in a database, for `checkpoint=` of any pipeline source."""

    def __init__(self, database: Database, name: str) -> None:
        """Store it under `name`, which only one reader may use at a time."""
        self.database = checked_database("DatabaseCheckpoint", database)
        self.name = stored_name("name", name)

    def __str__(self) -> str:
        return f"checkpoint {self.name!r} in {self.database!r}"

    async def load(self) -> Any:
        """Return the last saved position, None if there is none."""
        rows = await self.database.arun(NamedQuery("checkpoints.load", {"name": self.name}).alone)
        return json.loads(rows[0][0]) if rows else None

    async def save(self, place: Any) -> None:
        """Replace the saved position by `place`."""
        asked = {"name": self.name, "place": json.dumps(place)}
        await self.database.arun(NamedQuery("checkpoints.save", asked).alone)


class TableRow(NamedTuple):
    """A row and its position."""

    position: int
    values: dict[str, Any]


class TableReader:
    """Reads a table from a position on."""

    def __init__(
        self, database: Database, table: str, position: str, columns: tuple[str, ...] | None
    ) -> None:
        """Read `table`, or "schema.table", by the column `position`."""
        self.database = database
        self._shown = table
        parts = table.split(".")
        self._table = ".".join(_literal(part) for part in parts)
        self._name = table if database.dialect == "sqlite" else ".".join(map(quoted, parts))
        """The name as a parameter, without placeholders."""
        self._position = position
        self._columns = columns
        self._select = ""
        self._settled = 0
        """No row up to this position can be committed any more."""
        self._open_gap: _OpenGap | None = None

    @property
    def held_back(self) -> int | None:
        """Return up to which position rows wait for transactions that may fill an earlier gap."""
        return None if self._open_gap is None else self._open_gap.until

    async def read(self, after: int, most: int) -> tuple[list[TableRow], bool]:
        """Return the rows after `after` up to the first open gap, and whether there are more."""
        if not self._select:
            describing = NamedQuery("tables.columns", {"table": self._name})
            self._select = self._select_text(await self.database.arun(describing.alone))
        while True:
            seen, held = await self.database.arun(lambda: self._read_steps(after, most))
            rows = self._up_to_gap(seen, after)
            if rows or not seen:
                if self._open_gap is not None and (
                    not seen or rows[-1].position >= self._open_gap.until
                ):
                    self._open_gap = None
                return rows, bool(seen)
            if self._open_gap is None:
                self._open_gap = held
            else:
                self._open_gap = _OpenGap(
                    self._open_gap.until, self._open_gap.writers & held.writers
                )
            if self._open_gap.writers:
                return [], True
            # A transaction that begins now sees the rows committed since: read again.
            self._settled, self._open_gap = self._open_gap.until, None

    def _up_to_gap(self, rows: list[TableRow], after: int) -> list[TableRow]:
        sure: list[TableRow] = []
        for row in rows:
            if row.position > max(self._settled, after + 1) and self.database.dialect != "sqlite":
                break
            if row.position == after:
                raise ValueError(
                    f"table {self._shown!r} has two rows with {self._position} {after}: read it by"
                    " a column whose values are unique"
                )
            sure.append(row)
            after = row.position
        return sure

    # Queries

    def _select_text(self, found: list[tuple[Any, ...]]) -> str:
        """Return the statement that reads rows, or raise if the table cannot be read."""
        shown, types = self._shown, {name: kind for _, _, name, kind in found}
        if not found:
            raise ValueError(f"there is no table {shown!r}: write its name, or 'schema.name'")
        kind, follows = found[0][:2]
        if kind not in ("r", "p"):
            raise ValueError(f"{shown!r} is a view or the like: read the table that it shows")
        if follows:
            raise ValueError(
                f"{self.database!r} follows another server, and does not know who writes there:"
                f" read {shown!r} on that one"
            )
        columns = tuple(types) if self._columns is None else self._columns
        for name in (self._position, *columns):
            if name not in types:
                raise ValueError(f"table {shown!r} has no column {name!r}, but {', '.join(types)}")
        if types[self._position] not in INTEGERS:
            raise ValueError(
                f"position={self._position!r} is of type {types[self._position]}: read the table by"
                " a column of whole numbers that grow, such as its serial key"
            )
        self._columns = columns
        listed = ", ".join(_literal(name) for name in (self._position, *columns))
        position = _literal(self._position)
        return (
            f"SELECT {listed} FROM {self._table} WHERE {position} > :after"  # noqa: S608 - quoted
            f" ORDER BY {position} LIMIT :most"
        )

    def _read_steps(self, after: int, most: int) -> Steps[tuple[list[TableRow], _OpenGap]]:
        columns = self._columns or ()
        found = yield TextQuery(self._select, {"after": after, "most": most})
        rows = [TableRow(row[0], dict(zip(columns, row[1:], strict=True))) for row in found]
        if not rows or self._up_to_gap(rows[:1], after):
            return rows, _NO_GAP
        # The order matters: a transaction that drew a smaller number than the largest visible one
        # had the table lock before. So it is among the writers now, or has ended.
        position = _literal(self._position)
        text = f"SELECT max({position}) FROM {self._table}"  # noqa: S608 - quoted
        largest = yield TextQuery(text, {})
        writers = yield NamedQuery("tables.writers", {"table": self._name})
        until = max(rows[-1].position, largest[0][0] or 0)
        return rows, _OpenGap(until, frozenset(writer for (writer,) in writers))


class _OpenGap(NamedTuple):
    """Rows that wait: up to which position, and for which transactions."""

    until: int
    writers: frozenset[str]


_NO_GAP: Final = _OpenGap(0, frozenset())


def _literal(name: str) -> str:
    """Return a quoted name for a text in which words in braces are replaced."""
    return quoted(name).replace("{", "{{").replace("}", "}}")
