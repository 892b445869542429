"""The table of libraries: their waits, retries and clients, read from `libraries.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")

Kind = Literal["forever", "long", "bounded"]


class WaitingCall(NamedTuple):
    """A call that waits; the fields are explained in `libraries.toml`."""

    library: str
    calls: tuple[str, ...]
    keywords: tuple[str, ...]
    waits: str
    write: str
    kind: Kind = "forever"
    position: int | None = None
    unless: tuple[str, ...] = ()
    address: int | None = None
    schemes: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    set_by: tuple[str, ...] = ()
    zero: bool = False


class Sdk(NamedTuple):
    """An SDK that retries by itself."""

    library: str
    clients: tuple[str, ...]
    keyword: str
    attempts: int  # attempts in total by default; 0 if it depends
    off: str


class Paths(Generic[T]):
    """Values by path, where a path may have `*` for one name and `**` for several."""

    def __init__(self, values: Mapping[str, T]) -> None:
        self._exact = {path: value for path, value in values.items() if "*" not in path}
        self._patterns = [
            (path.split(".")[0], _pattern(path), value)
            for path, value in values.items()
            if "*" in path
        ]

    def get(self, path: str) -> T | None:
        """Return the value of `path`, or None."""
        value = self._exact.get(path)
        if value is not None or not path:
            return value
        root = path.split(".", 1)[0]
        for start, pattern, candidate in self._patterns:
            if ("*" in start or start == root) and pattern.fullmatch(path):
                return candidate
        return None


class Libraries:
    """The whole table."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.timeouts = _by_call(table["timeouts"])
        self.waits = _by_call(table["waits"])
        self.blocking: Paths[str] = Paths(table["blocking"])
        self.bounds = {kind: frozenset(paths) for kind, paths in table["bounds"].items()}
        self.queues: Mapping[str, str] = table["queues"]
        self.effects = frozenset(table["effects"]["calls"])
        self.clients: Mapping[str, str] = table["clients"]
        self.sdks = [Sdk(**_frozen(sdk)) for sdk in table["sdks"]]
        self.names = sorted({entry["library"] for entry in table["timeouts"] + table["waits"]})
        """The libraries whose waits are known."""
        self._aliases: Mapping[str, str] = table["aliases"]
        self._roots = {alias.split(".")[0] for alias in self._aliases}

    def canonical(self, path: str) -> str:
        """Return the usual path of what `path` names."""
        if path.split(".", 1)[0] not in self._roots:
            return path
        for alias, usual in self._aliases.items():
            if path == alias or path.startswith((f"{alias}.", f"{alias}(")):
                return self.canonical(usual + path[len(alias) :])
        return path


@cache
def libraries() -> Libraries:
    """Return the table, which is read once."""
    text = files("seawall.audit").joinpath("libraries.toml").read_text("utf-8")
    return Libraries(tomllib.loads(text))


def _pattern(path: str) -> re.Pattern[str]:
    regex = re.escape(path).replace(r"\*\*", ".*").replace(r"\*", "[^.()]*")
    return re.compile(regex)


def _by_call(entries: list[dict[str, Any]]) -> Paths[WaitingCall]:
    waits = (WaitingCall(**_frozen(entry)) for entry in entries)
    return Paths({path: wait for wait in waits for path in wait.calls})


def _frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in entry.items()}
