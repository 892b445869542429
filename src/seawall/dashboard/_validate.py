"""Whether something is a view: for what other pods sent, which may be anything.

Promises: what is returned has the keys of a `View` and none beside, with texts that are short and
free of control characters, finite numbers and bounded lists. What has another shape is refused
whole, with a ValueError that says where; texts that are too long are cut. Nothing else is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeVar, cast

from seawall.dashboard._bounds import (
    HUGE,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_ACTS,
    MOST_CHANGES,
    MOST_FACTS,
    MOST_GUARDS,
    MOST_HAPPENINGS,
    MOST_LAYERS,
    MOST_ROWS,
    MOST_SECTIONS,
    MOST_TROUBLES,
    MOST_VERBS,
    TONES,
    shown,
)
from seawall.dashboard.views import FORMAT, View

T = TypeVar("T")
Read = Callable[[Any, str], Any]
"""From a value and where it stands to what it is, or a ValueError."""


def valid_view(view: object) -> View:
    """Return `view`, cleaned, if it is one; raise ValueError if not."""
    told = _mapping(view, "view")
    if told.get("format") != FORMAT or isinstance(told.get("format"), bool):
        raise ValueError(f"the view is not of format {FORMAT}")
    cleaned = _VIEW(view, "view")
    rows = sum(len(section) for section in cleaned["sections"].values())
    if rows > MOST_ROWS:
        raise ValueError(f"view.sections: {rows} rows, at most {MOST_ROWS} are shown")
    return cast("View", cleaned)


# What a value may be


def _wrong(where: str, wanted: str) -> NoReturn:
    raise ValueError(f"{where}: {wanted} is wanted")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _wrong(where, "an object")


def _text(longest: int) -> Read:
    def read(value: Any, where: str) -> str:
        return shown(value, longest) if isinstance(value, str) else _wrong(where, "text")

    return read


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _wrong(where, "a number")
    if (isinstance(value, float) and not isfinite(value)) or not -HUGE <= value <= HUGE:
        _wrong(where, "a finite number")
    return value


def _amount(value: Any, where: str) -> float:
    told = _number(value, where)
    return told if told >= 0 else _wrong(where, "a number of 0 or more")


def _share(value: Any, where: str) -> float:
    told = _number(value, where)
    return told if 0 <= told <= 1 else _wrong(where, "a number from 0 to 1")


def _whole(value: Any, where: str) -> int:
    return value if type(value) is int and 0 <= value <= HUGE else _wrong(where, "a whole number")


def _flag(value: Any, where: str) -> bool:
    return value if isinstance(value, bool) else _wrong(where, "true or false")


def _one_of(*options: str) -> Read:
    def read(value: Any, where: str) -> str:
        known = isinstance(value, str) and value in options
        return cast("str", value) if known else _wrong(where, f"one of {', '.join(options)}")

    return read


def _or_none(read: Read) -> Read:
    return lambda value, where: None if value is None else read(value, where)


def _list(read: Read, most: int) -> Read:
    def listed(value: Any, where: str) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            _wrong(where, f"a list of at most {most}")
        return [read(one, f"{where}[{place}]") for place, one in enumerate(value)]

    return listed


def _object(optional: frozenset[str] = frozenset(), /, **fields: Read) -> Read:
    def read(value: Any, where: str) -> dict[str, Any]:
        told = _mapping(value, where)
        for name in fields:
            if name not in told and name not in optional:
                _wrong(f"{where}.{name}", "a value")
        return {
            name: field(told[name], f"{where}.{name}")
            for name, field in fields.items()
            if name in told
        }

    return read


def _fact(value: Any, where: str) -> tuple[str, str]:
    pair = _list(_text(LONGEST_TEXT), 2)(value, where)
    if len(pair) != 2:  # noqa: PLR2004 - a label and what it says
        _wrong(where, "a label and its value")
    return pair[0], pair[1]


def _sections(value: Any, where: str) -> dict[str, list[Any]]:
    told = _mapping(value, where)
    if len(told) > MOST_SECTIONS:
        _wrong(where, f"at most {MOST_SECTIONS} sections")
    rows = _list(_ROW, MOST_ROWS)
    return {_WORD(title, where): rows(section, f"{where}.rows") for title, section in told.items()}


def _counts(value: Any, where: str) -> dict[str, int]:
    told = _mapping(value, where)
    if len(told) > MOST_VERBS:
        _wrong(where, f"at most {MOST_VERBS} counts")
    return {_WORD(verb, where): _whole(times, where) for verb, times in told.items()}


def _change(value: Any, where: str) -> dict[str, Any]:
    change: dict[str, Any] = _CHANGE(value, where)
    read = _number if change["kind"] == "number" else _WORD
    return {**change, "value": read(change["value"], f"{where}.value")}


# What a view is made of

_WORD = _text(LONGEST_WORD)
_NAME = _text(LONGEST_NAME)
_SENTENCE = _text(LONGEST_TEXT)
_TONE = _one_of(*TONES)
_FACTS = _list(_fact, MOST_FACTS)

_CHANGE = _object(name=_WORD, value=lambda value, _where: value, kind=_one_of("number", "text"))

_LAYER = _object(
    policy=_WORD,
    title=_WORD,
    settings=_SENTENCE,
    tone=_TONE,
    state=_WORD,
    facts=_FACTS,
    sharing=_WORD,
    acts=_list(_WORD, MOST_ACTS),
    changes=_list(_change, MOST_CHANGES),
)

_RATES = _object(
    succeeded=_amount,
    degraded=_amount,
    failed=_amount,
    rejected=_amount,
    cancelled=_amount,
    retries=_amount,
)

_GUARD = _object(
    frozenset({"last_error"}),
    name=_NAME,
    tone=_TONE,
    state=_WORD,
    edge=_flag,
    breaker=_or_none(_WORD),
    rates=_RATES,
    error_ratio=_share,
    last_error=_SENTENCE,
    p50=_or_none(_amount),
    p95=_or_none(_amount),
    p99=_or_none(_amount),
    stack=_list(_LAYER, MOST_LAYERS),
)

_ROW = _object(
    kind=_WORD,
    name=_NAME,
    tone=_TONE,
    state=_WORD,
    facts=_FACTS,
    gauge=_or_none(_share),
    track=_or_none(_number),
)

_TROUBLE = _object(
    frozenset({"cause", "degrades", "trace"}),
    id=_SENTENCE,
    tone=_TONE,
    where=_NAME,
    what=_SENTENCE,
    advice=_SENTENCE,
    since=_number,
    cause=_SENTENCE,
    degrades=_flag,
    trace=_WORD,
)

_HAPPENING = _object(
    frozenset({"trace"}),
    at=_number,
    began=_number,
    tone=_TONE,
    where=_NAME,
    what=_SENTENCE,
    about=_SENTENCE,
    counts=_counts,
    trace=_WORD,
)

_VIEW = _object(
    frozenset({"age", "all_guards", "gone"}),
    format=_whole,
    pod=_object(name=_NAME, host=_NAME, pid=_whole, version=_WORD, up_seconds=_amount),
    at=_number,
    every=_amount,
    load=_amount,
    operable=_flag,
    troubles=_list(_TROUBLE, MOST_TROUBLES),
    guards=_list(_GUARD, MOST_GUARDS),
    all_guards=_whole,
    sections=_sections,
    happenings=_list(_HAPPENING, MOST_HAPPENINGS),
    age=_amount,
    gone=_number,
)
