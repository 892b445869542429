"""The statements of `sql/`, rendered for each database and driver.

A file is a list of statements, each below a line `-- name: its_name`: in `both/` if they are the
same for both databases, else in the folder of each. In the text, `{table}` stands for one of our
tables, quoted and with its schema; `{now}` for the database's own time in whole microseconds;
`:value` for a parameter. The only user input in the text are the names of schema and tables, and
these are quoted.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple, Self

Dialect = Literal["postgres", "sqlite"]
Style = Literal["dollar", "pyformat", "named", "escaped"]
"""The parameter style of a driver: $1, %(name)s, :name, or :name with other colons escaped."""

Arguments = dict[str, Any]

NOW: Final[dict[Dialect, str]] = {
    "postgres": "CAST(date_part('epoch', clock_timestamp()) * 1000000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
}

LONGEST_NAME: Final = 63
"""Maximum significant bytes of a name in PostgreSQL."""

LONGEST_STORED_NAME: Final = 200
"""Maximum characters of a name in a column, such as that of a queue or a consumer."""

LONGEST_REMEMBERED: Final = 16_384
"""Maximum length of cached texts: longer ones are built for many rows and rarely repeat."""

_PARAMETER: Final = re.compile(
    r"""
      (?<!\w)[eE]'(?:[^'\\]|\\.|'')*'  # text, in which a colon is one, as in what follows
    | '(?:[^']|'')*'
    | "(?:[^"]|"")*"
    | (?<!\w)(\$(?:[A-Za-z_]\w*)?\$).*?\1
    | --[^\n]* | /\*.*?\*/
    | (?<![:\w]):(?P<name>[A-Za-z_]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAME_LINE: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
"""Comment lines; a word in them may look like a parameter."""
_LONGEST_TABLE: Final = 24


class _SchemaAndPrefix(NamedTuple):
    schema: str | None
    prefix: str


class TableNames(_SchemaAndPrefix):
    """The location of the tables: their schema, and the prefix of their names."""

    __slots__ = ()

    def __new__(cls, schema: str | None = None, prefix: str = "seawall_") -> Self:
        """Prefix each table's name with `prefix`; without a schema, use the database's default."""
        for name, given in (("schema", schema), ("prefix", prefix)):
            if not isinstance(given, str) and (given is not None or name == "prefix"):
                raise TypeError(f"{name}={given!r}: write a name, such as {name}='seawall_'")
            if given is not None and ("\0" in given or not given.isprintable()):
                raise ValueError(f"{name}={given!r}: write letters, digits and underscores")
            if given is not None and len(given.encode()) > LONGEST_NAME - _LONGEST_TABLE:
                raise ValueError(
                    f"{name}={given!r}: write at most {LONGEST_NAME - _LONGEST_TABLE} bytes"
                )
        if schema == "":
            raise ValueError("schema='': write a name, or None for the database's usual schema")
        return super().__new__(cls, schema, prefix)

    def table(self, name: str) -> str:
        """Return a table's name for a statement: quoted, with its schema."""
        own = quoted(self.prefix + name)
        return own if self.schema is None else f"{quoted(self.schema)}.{own}"

    def channel(self, name: str) -> str:
        """Return the NOTIFY channel by which processes with these tables announce changes."""
        channel = f"{self.schema or ''}.{self.prefix}{name}"
        if len(channel.encode()) < LONGEST_NAME:
            return channel
        return "seawall." + blake2b(channel.encode(), digest_size=20).hexdigest()


def quoted(name: str) -> str:
    """Return a name quoted for SQL, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def stored_name(what: str, value: Any) -> str:
    """Return `value` if it is a name that every database can store, or raise."""
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r}: write a name, such as {what}='billing'")
    if not value or len(value) > LONGEST_STORED_NAME or not value.isprintable():
        raise ValueError(
            f"{what}: write 1 to {LONGEST_STORED_NAME} printable characters, not {value[:50]!r}"
        )
    return value


def containing(text: str) -> str:
    """Return a LIKE pattern, with ! as its ESCAPE, for text that contains `text`."""
    escaped = text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
    return f"%{escaped}%"


class StatementText(NamedTuple):
    """A statement for one driver: its text, and its parameters in order."""

    sql: str
    order: tuple[str, ...]

    def positional(self, arguments: Arguments) -> list[Any]:
        """Return the arguments in the order of $1, $2..."""
        return [arguments[name] for name in self.order]


class _Filling(dict[str, str]):
    """The replacements for words in braces."""

    def __init__(self, dialect: Dialect, names: TableNames, now: str | None) -> None:
        super().__init__(now=now or NOW[dialect], schema=quoted(names.schema or "public"))
        self._names = names

    def __missing__(self, word: str) -> str:
        if word.startswith("index_"):  # without a schema: it is in the schema of its table
            return quoted(self._names.prefix + word.removeprefix("index_"))
        return self._names.table(word)


@cache
def statements(dialect: Dialect, file: str) -> dict[str, str]:
    """Return the statements of a file by name: the shared ones and the dialect's own."""
    found: dict[str, str] = {}
    for folder in ("both", dialect):
        source = files("seawall.durable").joinpath("sql", folder, f"{file}.sql")
        if source.is_file():
            parts = _NAME_LINE.split(source.read_text("utf-8"))[1:]
            for name, body in zip(parts[::2], parts[1::2], strict=True):
                found[name] = _COMMENT.sub("", body).strip().rstrip(";")
    return found


@cache
def statement(
    dialect: Dialect, style: Style, names: TableNames, which: str, now: str | None = None
) -> StatementText:
    """Return a statement, named "file.name", for one database and driver.

    `now` is an SQL expression that replaces the time, for tests.
    """
    file, _, name = which.partition(".")
    return rendered(statements(dialect, file)[name], dialect, style, names, now)


def rendered(
    text: str, dialect: Dialect, style: Style, names: TableNames, now: str | None = None
) -> StatementText:
    """Return `text` with tables and time inserted, and parameters in the driver's style."""
    render = _rendered if len(text) <= LONGEST_REMEMBERED else _rendered.__wrapped__
    return render(text, dialect, style, names, now)


@lru_cache(maxsize=512)
def _rendered(
    text: str, dialect: Dialect, style: Style, names: TableNames, now: str | None
) -> StatementText:
    text = text.format_map(_Filling(dialect, names, now))
    order: list[str] = []

    def plain(text: str) -> str:
        if style == "pyformat":
            return text.replace("%", "%%")
        return text.replace(":", "\\:") if style == "escaped" else text

    def parameter(name: str) -> str:
        if name not in order:
            order.append(name)
        if style == "dollar":
            return f"${order.index(name) + 1}"
        return f"%({name})s" if style == "pyformat" else f":{name}"

    parts, end = [], 0
    for match in _PARAMETER.finditer(text):
        if match["name"] is not None:
            parts += [plain(text[end : match.start()]), parameter(match["name"])]
            end = match.end()
    return StatementText("".join([*parts, plain(text[end:])]), tuple(order))
