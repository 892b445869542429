"""Paged lists of work for operators: jobs, dead letters, outbox events.

A `WorkList` shows items of one state, one page at a time. A page starts after the position of the
last item of the previous page, so it stays correct while items come and go. One page examines a
bounded number of items: a search may return fewer than requested, with a position to continue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from seawall import _checks as check
from seawall.jobs.encoding import read_reason
from seawall.models.queue.jobs import BROWSED, Browsed

MOST_LISTED: Final = 100
"""Maximum items per page."""
LONGEST_SEARCH: Final = 200
"""Maximum characters of a search."""
PREVIEW: Final = 512
"""Bytes of each payload that a page includes."""
OPENED: Final = 65_536
"""Maximum bytes of the payload of an inspected item."""
BEYOND: Final = 2**62
"""A position after every item of a list that a database sorts."""
_PLACE: Final = re.compile(r"(-?[0-9]{1,18}):([^\x00-\x1f\x7f]{0,255})")
_ACTS: Final = {
    "dead": ("retry", "drop"),
    "waiting": ("drop",),
    "delayed": ("drop",),
    "claimed": ("drop",),
}
"""The actions that an operator has for a job, by its state."""


class WorkItem(NamedTuple):
    """A job or an event, as shown to an operator. Times are in seconds."""

    id: str
    state: str
    kind: str
    """The kind of the job or the type of the event; "" if there is none."""
    owner: str
    """The scope of the job or the aggregate of the event; "" if there is none."""
    priority: int | None
    attempts: int
    age: float
    """Seconds since it was added."""
    since: float
    """Seconds since it entered its state; negative until it is due, or until its lease expires."""
    error: str
    """Why the last attempt failed."""
    size: int
    """Size of the payload in bytes."""
    payload: bytes
    """The start of the payload; empty if it was not requested."""
    acts: tuple[str, ...]
    """The possible actions: "retry", "drop"."""
    traceback: str = ""
    """Traceback of the last attempt, if it was stored."""


class WorkPage(NamedTuple):
    """One page of items, and where the next one starts."""

    items: list[WorkItem]
    next: str | None
    """The `after` of the next page; None if this is the last."""


class WorkList(Protocol):
    """What the dashboard needs from a job queue and from an outbox."""

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
        """Return the items of a state that contain the search text."""

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return one item; None if it does not exist."""

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Run a failed item again; return False if it has not failed."""

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Give up an item for good; return False if it does not exist or has ended."""


class PageRequest(NamedTuple):
    """A checked request for a page."""

    state: str
    search: str
    number: int
    id: str
    limit: int
    cut: int
    """Bytes of each payload to return; with 0, payloads are not searched either."""


def page_request(
    states: tuple[str, ...], state: str, search: str, after: str | None, limit: int, payloads: Any
) -> PageRequest:
    """Return the checked request, or raise an error that says what to write instead."""
    if state not in states:
        raise ValueError(f"state={state!r}: write one of {', '.join(map(repr, states))}")
    if not isinstance(search, str):
        raise TypeError(f"search={search!r}: write text, such as search='timeout'")
    if len(search) > LONGEST_SEARCH or "\0" in search:
        raise ValueError(f"search: write at most {LONGEST_SEARCH} characters, without NUL")
    search.encode()  # raises ValueError for a lone surrogate
    check.count("limit", limit, maximum=MOST_LISTED)
    number, id_ = _read_place(after)
    cut = PREVIEW if check.flag("payloads", payloads) else 0
    return PageRequest(state, search, number, id_, limit, cut)


def place_after(number: int, id_: str) -> str:
    """Return the position after an item, for `after`."""
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
    """Return the matching rows of a `BROWSED` query as items, and where to continue.

    A row starts with its position; the last column but one says whether it matches.
    """
    items: list[WorkItem] = []
    for looked, row in enumerate(rows):
        if len(items) == limit:
            return WorkPage(items, place_after(*rows[looked - 1][:2]))
        if row[-2]:
            items.append(item(row))
    more = len(rows) >= BROWSED
    return WorkPage(items, place_after(*rows[-1][:2]) if more else None)


def job_item(found: Browsed) -> WorkItem:
    """Return a job of a queue as an item."""
    reason, trace = read_reason(found.reason)
    return WorkItem(
        found.id,
        found.state,
        "",
        "",
        found.priority,
        found.attempts,
        found.age / 1e6,
        found.since / 1e6,
        reason,
        found.size,
        found.payload,
        _ACTS.get(found.state, ()),
        trace,
    )
