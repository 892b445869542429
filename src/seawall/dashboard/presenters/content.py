"""What presenters produce: the content of a row, and troubles; and how they read snapshots.

A snapshot may be that of a user's own object: values that are missing or have another shape are
omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import (
    LONGEST_KEY,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_FACTS,
    MOST_KEYS,
    number,
    shown,
)
from seawall.dashboard.counters import Counters
from seawall.dashboard.views import Pipes, Tone

Seen = Mapping[str, Any]


Facts = list[tuple[str, str]]


class RowContent(NamedTuple):
    """Description of an object."""

    state: str = ""
    tone: Tone = "ok"
    facts: Facts = []  # noqa: RUF012 - never changed in place
    gauge: float | None = None
    track: float | None = None
    figures: dict[str, float] | None = None
    pipes: Pipes | None = None


class FoundTrouble(NamedTuple):
    """A problem, without its time.

    `began` is the key of the event that starts it, `cause` the id of the problem that causes it.
    """

    id: str
    tone: Tone
    where: str
    what: str
    advice: str = ""
    began: str = ""
    cause: str = ""
    degrades: bool = False
    lasted: float = 0.0
    """Minimum number of seconds that it has lasted, if the snapshot has it."""


Troubles = Iterator[FoundTrouble]


def found_by(rule: Troubles) -> list[FoundTrouble]:
    """Return what a rule finds before it fails on data of another shape."""
    found: list[FoundTrouble] = []
    try:
        for one in rule:
            found.append(one)  # noqa: PERF402 - keeps what was found before an exception
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        pass  # a user's own policy may show anything
    return found


def mapping(value: Any) -> Seen:
    """Return `value` if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def time_of(seen: Seen, key: str) -> float | None:
    """Return a duration in seconds, if there is one."""
    value = number(seen.get(key), -1.0)
    return round(value, 6) if value >= 0 else None


def full(seen: Seen) -> bool:
    """Return whether all slots are taken and callers wait."""
    slots = number(seen.get("limit", seen.get("workers")))
    return 0 < slots <= number(seen.get("in_flight")) and number(seen.get("waiting")) > 0


Snapshot = Mapping[str, Iterable[Seen]]


def things(seen: Seen, name: str) -> list[Seen]:
    """Return the readable ones of a list: objects of a kind, policies of a guard..."""
    known = seen.get(name)
    if not isinstance(known, (list, tuple)):
        return []
    return [thing for thing in known if isinstance(thing, (dict, Mapping))]


def share_of(used: Any, of: Any) -> float | None:
    """Return the used share of something, from 0 on; None if it has no size."""
    most = number(of)
    return number(used) / most if most > 0 else None


def fact(label: str, value: str) -> tuple[str, str]:
    """Return a label and its value, shortened and sanitized."""
    return shown(label, LONGEST_WORD), shown(value, LONGEST_TEXT)


def counted(seen: Seen, keys: Iterable[str]) -> Facts:
    """Return the counters among `keys` that are not 0."""
    return [(say.plainly(key), say.amount(seen[key])) for key in keys if number(seen.get(key))]


def listed(keys: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    named = ", ".join(shown(key, LONGEST_KEY) for key in keys[:MOST_KEYS])
    more = len(keys) - MOST_KEYS
    return f"{named} and {more} more" if more > 0 else named


def plain_facts(seen: Seen, leave_out: Iterable[str] = ()) -> Facts:
    """Return values that are plain numbers or bools; texts may come from anyone."""
    left = frozenset(leave_out)
    facts = [
        (say.plainly(str(key)), say.truth(value) if isinstance(value, bool) else say.amount(value))
        for key, value in seen.items()
        if key not in left and isinstance(value, (bool, int, float))
    ]
    return facts[:MOST_FACTS]


def plain_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    """Describe an object by its plain numbers."""
    return RowContent(facts=plain_facts(seen, ("stored_age",)))


class Presenter(NamedTuple):
    """How a kind of object is shown: its row, and its troubles.

    Both get the kind, the name and the snapshot of the object.
    """

    row: Callable[[str, str, Seen, Counters], RowContent] = plain_row
    troubles: Callable[[str, str, Seen, Counters], Troubles] | None = None
