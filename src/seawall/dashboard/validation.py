"""Validation of views: other pods may send anything.

Promises:
- The result has only the keys of a `View`, with short texts free of control characters, finite
  numbers and bounded lists.
- A view of another shape is refused as a whole, with a ValueError that says where. Texts that are
  too long are truncated. Nothing else is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, cast

from seawall.dashboard.bounds import (
    HUGE,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_ACTS,
    MOST_AT_WORK,
    MOST_CAUSES,
    MOST_CHANGES,
    MOST_FACTS,
    MOST_GUARDS,
    MOST_HAPPENINGS,
    MOST_LAYERS,
    MOST_NODES,
    MOST_READINGS,
    MOST_ROWS,
    MOST_SECTIONS,
    MOST_TROUBLES,
    MOST_VERBS,
    TONES,
    shown,
)
from seawall.dashboard.views import FORMAT, View

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


# Readers of values


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
        """Prepend `place` to the path."""
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


def _number(value: Any) -> float:
    kind = type(value)
    if kind is not float and kind is not int and not isinstance(value, (int, float)):
        _wrong("a number")
    if kind is bool:
        _wrong("a number")
    if not -HUGE <= value <= HUGE:  # also excludes NaN
        _wrong("a finite number")
    number: float = value
    return number


def _amount(value: Any) -> float:
    amount = _number(value)
    return amount if amount >= 0 else _wrong("a number of 0 or more")


def _share(value: Any) -> float:
    share = _number(value)
    return share if 0 <= share <= 1 else _wrong("a number from 0 to 1")


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= HUGE else _wrong("a whole number")


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


def _object(optional: frozenset[str] = frozenset(), /, **fields: Read) -> Read:
    needed = fields.keys() - optional
    readers = list(fields.items())

    def read(value: Any) -> dict[str, Any]:
        raw = _mapping(value)
        if not needed <= raw.keys():
            raise _WrongValue("a value").at(f".{min(needed - raw.keys())}")
        cleaned: dict[str, Any] = {}
        name = ""
        try:
            for name, field in readers:
                if name in raw:
                    cleaned[name] = field(raw[name])
        except _WrongValue as wrong:
            raise wrong.at(f".{name}") from None
        return cleaned

    return read


def _fact(value: Any) -> tuple[str, str]:
    pair = _PAIR(value)
    if len(pair) != 2:  # noqa: PLR2004 - a label and its value
        _wrong("a label and its value")
    return pair[0], pair[1]


def _sections(value: Any) -> dict[str, list[Any]]:
    raw = _mapping(value)
    if len(raw) > MOST_SECTIONS:
        _wrong(f"at most {MOST_SECTIONS} sections")
    try:
        return {_WORD(title): _ROWS(section) for title, section in raw.items()}
    except _WrongValue as wrong:
        raise wrong.at(".rows") from None


def _place(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MOST_NODES else _wrong("a place of a node")


def _cause(value: Any) -> tuple[str, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:  # noqa: PLR2004 - a cause and its count
        _wrong("a cause and how often")
    return _NAME(value[0]), _whole(value[1])


def _numbers(value: Any) -> dict[str, float]:
    raw = _mapping(value)
    if len(raw) > MOST_FACTS:
        _wrong(f"at most {MOST_FACTS} numbers")
    return {_WORD(name): _amount(one) for name, one in raw.items()}


def _counts(value: Any) -> dict[str, int]:
    raw = _mapping(value)
    if len(raw) > MOST_VERBS:
        _wrong(f"at most {MOST_VERBS} counts")
    return {_WORD(verb): _whole(times) for verb, times in raw.items()}


def _change(value: Any) -> dict[str, Any]:
    change: dict[str, Any] = _CHANGE(value)
    read = _number if change["kind"] == "number" else _WORD
    try:
        return {**change, "value": read(change["value"])}
    except _WrongValue as wrong:
        raise wrong.at(".value") from None


# Parts of a view

_WORD = _text(LONGEST_WORD)
_NAME = _text(LONGEST_NAME)
_SENTENCE = _text(LONGEST_TEXT)
_TONE = _one_of(*TONES)
_PAIR = _list(_SENTENCE, 2)
_FACTS = _list(_fact, MOST_FACTS)

_CHANGE = _object(name=_WORD, value=lambda value: value, kind=_one_of("number", "text"))

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

_FIGURES = _object(
    frozenset({"round_trip"}),
    seconds=_number,
    level=_number,
    threshold=_number,
    round_trip=_number,
)

_READING = _object(name=_WORD, state=_WORD, seconds=_amount, cause=_SENTENCE)

_AT_WORK = _object(item=_WORD, items=_whole, since=_amount, waits_for=_WORD)

_NODE = _object(
    name=_WORD,
    kind=_one_of("source", "stage", "branch", "sink"),
    tone=_TONE,
    state=_SENTENCE,
    to=_list(_place, MOST_NODES),
    rate=_amount,
    waiting=_amount,
    capacity=_amount,
    busy=_amount,
    workers=_amount,
    oldest=_amount,
    p50=_or_none(_amount),
    p99=_or_none(_amount),
    counts=_numbers,
    waits_for=_SENTENCE,
    failures=_list(_cause, MOST_CAUSES),
    at_work=_list(_AT_WORK, MOST_AT_WORK),
    readings=_list(_READING, MOST_READINGS),
    facts=_FACTS,
)

_PIPES = _object(
    oldest=_or_none(_object(item=_WORD, age=_amount, stage=_WORD)),
    nodes=_list(_NODE, MOST_NODES),
    slow=_or_none(_place),
    more=_whole,
)

_ROW = _object(
    frozenset({"figures", "pipes"}),
    kind=_WORD,
    name=_NAME,
    tone=_TONE,
    state=_WORD,
    facts=_FACTS,
    gauge=_or_none(_share),
    track=_or_none(_number),
    figures=_FIGURES,
    pipes=_PIPES,
)

_ROWS = _list(_ROW, MOST_ROWS)

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
