"""A list of work that an operator looks through: jobs, dead letters, events of an outbox.

A `WorkList` shows items of one state, a page at a time. A page is found by the place of the item
before it, so it stays right while items come and go. One page looks at a bounded number of items:
a search may return fewer than asked for, and a place from which it goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from seawall import _checks as check
from seawall.models.queue.jobs import BROWSED

MOST_LISTED: Final = 100
"""Items of one page."""
LONGEST_SEARCH: Final = 200
"""Characters of a search."""
PREVIEW: Final = 512
"""Bytes of each payload that a page has."""
OPENED: Final = 65_536
"""Bytes of the payload of an item that is opened."""
BEYOND: Final = 2**62
"""Behind every place of a list that a database sorts."""

_PLACE: Final = re.compile(r"(-?[0-9]{1,18}):([^\x00-\x1f\x7f]{0,255})")


class WorkItem(NamedTuple):
    """A job or an event, as an operator sees it. Times are in seconds."""

    id: str
    state: str
    kind: str
    """The kind of the job or the type of the event; "" where there is none."""
    owner: str
    """The scope of the job, or the aggregate of the event; "" where there is none."""
    priority: int | None
    attempts: int
    age: float
    """Since it was added."""
    since: float
    """Since it is in its state; below 0 until it is due, or until its lease is over."""
    error: str
    """Why the last attempt failed."""
    size: int
    """Bytes of the payload."""
    payload: bytes
    """The beginning of it; empty if it was not asked for."""
    acts: tuple[str, ...]
    """What may be done with it: "retry", "drop"."""
    traceback: str = ""
    """Of the last attempt, where it is kept."""


class WorkPage(NamedTuple):
    """Some items, and from where to go on."""

    items: list[WorkItem]
    next: str | None
    """What to pass as `after` for the next page; None if there is none."""


class WorkList(Protocol):
    """What the dashboard needs of a queue, of jobs and of an outbox."""

    name: str
    WORK_STATES: tuple[str, ...]
    """The states that can be listed, the most important first."""

    async def abrowse(
        self,
        state: str = ...,
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return the items of a state that contain a text."""
        ...

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return one item; None if there is none."""
        ...

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Run a failed item again; False if it has not failed."""
        ...

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Give an item up for good; False if it is not there, or over."""
        ...


class Asked(NamedTuple):
    """A page that is asked for, checked."""

    state: str
    search: str
    number: int
    id: str
    limit: int
    cut: int
    """Bytes of payloads that are wanted; with 0 they are not searched."""


def asked_page(
    states: tuple[str, ...], state: str, search: str, after: str | None, limit: int, payloads: Any
) -> Asked:
    """Return what `browse` was asked for, or raise and say what to write instead."""
    if state not in states:
        raise ValueError(f"state={state!r}: write one of {', '.join(map(repr, states))}")
    if not isinstance(search, str):
        raise TypeError(f"search={search!r}: write text, such as search='timeout'")
    if len(search) > LONGEST_SEARCH or "\0" in search:
        raise ValueError(f"search: write at most {LONGEST_SEARCH} characters, without NUL")
    search.encode()  # half a surrogate pair is no text: a ValueError
    check.count("limit", limit, maximum=MOST_LISTED)
    number, id_ = _read_place(after)
    cut = PREVIEW if check.flag("payloads", payloads) else 0
    return Asked(state, search, number, id_, limit, cut)


def place_after(number: int, id_: str) -> str:
    """Return the place behind an item, for `after`."""
    return f"{number}:{id_}"


def _read_place(after: str | None) -> tuple[int, str]:
    if after is None:
        return 0, ""
    found = _PLACE.fullmatch(after) if isinstance(after, str) else None
    if found is None:
        raise ValueError(f"after={after!r:.50}: write None, or `next` of the page before")
    found[2].encode()
    return int(found[1]), found[2]


def page_of(
    rows: list[tuple[Any, ...]], limit: int, item: Callable[[tuple[Any, ...]], WorkItem]
) -> WorkPage:
    """Return those of `BROWSED` rows that match as items, and the place from which to go on.

    A row begins with its place; the last but one column says whether it matches.
    """
    items: list[WorkItem] = []
    for looked, row in enumerate(rows):
        if len(items) == limit:
            return WorkPage(items, place_after(*rows[looked - 1][:2]))
        if row[-2]:
            items.append(item(row))
    more = len(rows) >= BROWSED
    return WorkPage(items, place_after(*rows[-1][:2]) if more else None)
