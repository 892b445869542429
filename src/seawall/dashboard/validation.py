"""Validation of views: other pods may send anything.

Promises:
- The result has only the keys of a `View`, with short texts free of control characters, finite
  numbers and bounded lists.
- A view of another shape is refused as a whole, with a ValueError that says where. Texts that are
  too long are truncated. Nothing else is raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    NotRequired,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from seawall.dashboard.bounds import HUGE, LONGEST_WORD, MOST_ROWS, shown
from seawall.dashboard.views import FORMAT, History, SettingChange, View

Read = Callable[[Any], Any]
"""Returns the cleaned value, or raises ValueError."""


def valid_view(view: object) -> View:
    """Return `view`, cleaned, if it is valid; otherwise raise ValueError."""
    raw = view if isinstance(view, dict) else {}
    if raw.get("format") != FORMAT or isinstance(raw.get("format"), bool):
        raise ValueError(f"the view is not of format {FORMAT}")
    try:
        cleaned = _VIEW(raw)
    except _WrongValue as wrong:
        raise wrong.at("view") from None
    rows = sum(len(section) for section in cleaned["sections"].values())
    if rows > MOST_ROWS:
        raise ValueError(f"view.sections: {rows} rows, at most {MOST_ROWS} are shown")
    return cast("View", cleaned)


def valid_history(history: object) -> History:
    """Return the history of a pod, cleaned, if it is valid; otherwise raise ValueError."""
    cleaned = _HISTORY(history)
    tracks = [*cleaned["rows"].values()]
    for guard in cleaned["guards"].values():
        tracks += guard.values()
    if any(len(track) != len(cleaned["at"]) for track in tracks):
        raise ValueError("history: lists of equal length are wanted")
    return cast("History", cleaned)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of strangers; raise ValueError, also for what only Python's dialect has."""

    def refused(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, parse_constant=refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _WrongValue(ValueError):
    """A value is invalid; the readers of the enclosing values add its path.

    Most values are valid, so building each path beforehand would be wasted work.
    """

    def __init__(self, wanted: str) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.place = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.wanted} is wanted"

    def at(self, place: str) -> Self:
        self.place = place + self.place
        return self


def _wrong(wanted: str) -> NoReturn:
    raise _WrongValue(wanted)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _wrong("an object")


def _text(longest: int) -> Read:
    def read(value: Any) -> str:
        return shown(value, longest) if isinstance(value, str) else _wrong("text")

    return read


def _number(lowest: float = -HUGE, highest: float = HUGE) -> Read:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _wrong("a number")
        if not lowest <= value <= highest:  # also excludes NaN
            _wrong(f"a number from {lowest:g} to {highest:g}")
        number: float = value
        return number

    return read


def _whole(highest: float = HUGE) -> Read:
    def read(value: Any) -> int:
        return value if type(value) is int and 0 <= value <= highest else _wrong("a whole number")

    return read


def _flag(value: Any) -> bool:
    return value if isinstance(value, bool) else _wrong("true or false")


def _one_of(*options: str) -> Read:
    def read(value: Any) -> str:
        known = isinstance(value, str) and value in options
        return cast("str", value) if known else _wrong(f"one of {', '.join(options)}")

    return read


def _or_none(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _list(read: Read, most: int) -> Read:
    def listed(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            _wrong(f"a list of at most {most}")
        cleaned: list[Any] = []
        try:
            for one in value:
                cleaned.append(read(one))  # noqa: PERF401 - the number of valid items is needed below
        except _WrongValue as wrong:
            raise wrong.at(f"[{len(cleaned)}]") from None
        return cleaned

    return listed


def _pair(first: Read, second: Read) -> Read:
    def read(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:  # noqa: PLR2004
            _wrong("a list of two values")
        return first(value[0]), second(value[1])

    return read


def _by_name(name_of: Read, read: Read, most: int) -> Read:
    def named(value: Any) -> dict[str, Any]:
        raw = _mapping(value)
        if len(raw) > most:
            _wrong(f"an object with at most {most} members")
        return {name_of(name): read(one) for name, one in raw.items()}

    return named


def _object(fields: Mapping[str, Any]) -> Read:
    needed = {name for name, hint in fields.items() if get_origin(hint) is not NotRequired}
    readers = {name: _reader(hint) for name, hint in fields.items()}

    def read(value: Any) -> dict[str, Any]:
        raw = _mapping(value)
        if not needed <= raw.keys():
            raise _WrongValue("a value").at(f".{min(needed - raw.keys())}")
        cleaned: dict[str, Any] = {}
        name = ""
        try:
            for name, field in readers.items():
                if name in raw:
                    cleaned[name] = field(raw[name])
        except _WrongValue as wrong:
            raise wrong.at(f".{name}") from None
        return cleaned

    return read


def _setting_change(read: Read) -> Read:
    word, number = _text(LONGEST_WORD), _number()

    def change(value: Any) -> dict[str, Any]:
        cleaned = read(value)
        typed = number if cleaned["kind"] == "number" else word
        return {**cleaned, "value": typed(cleaned["value"])}

    return change


def _reader(hint: Any) -> Read:
    """Return the reader of values of a type in `views`."""
    if is_typeddict(hint):
        read = _object(get_type_hints(hint, include_extras=True))
        return _setting_change(read) if hint is SettingChange else read
    limits: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *limits = get_args(hint)
    if get_origin(hint) is Literal:
        return _one_of(*get_args(hint))
    inner = [_reader(part) for part in get_args(hint) if part is not NoneType]
    return _READERS[get_origin(hint) or hint](*inner, *limits)


_READERS: Final[dict[Any, Callable[..., Read]]] = {
    str: _text,
    float: _number,
    int: _whole,
    bool: lambda: _flag,
    list: _list,
    dict: _by_name,
    tuple: _pair,
    Union: _or_none,
    UnionType: _or_none,
    NotRequired: lambda read: read,
    Any: lambda: lambda value: value,
}

_VIEW: Final = _reader(View)
_HISTORY: Final = _reader(History)
