"""Functions and HTTP resources that are asked again and again, as sources.

Promises:
- The next page is asked for when the one before is handed out, and not before its time.
- With a checkpoint, a cursor is saved when everything that was read before it has ended: a resumed
  run repeats at most the pages that were on their way, and those of the last interval.
- A cancelled read loses nothing: the call goes on, and the next read has its answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from seawall import _checks as check
from seawall.clock import current_clock, epoch_of
from seawall.models.fifo import Positions
from seawall.pipeline.checkpoint import CheckpointTarget, SavedPlace, wait_for_oldest
from seawall.pipeline.source import FaultyItem, checked_name, name_for
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of
from seawall.wire.retries import read_retry_after

T = TypeVar("T")

NOT_MODIFIED: Final = 304
COME_LATER: Final = frozenset({429, 503})
"""Answers whose `Retry-After` says when to ask again."""


class Page(NamedTuple, Generic[T]):
    """What one call has brought, and where to go on."""

    items: Iterable[T]
    cursor: Any = None
    """What the function is called with next; with a checkpoint, something that JSON can hold."""
    more: bool = False
    """Whether the next page is there already: it is asked for at once."""
    wait: float | None = None
    """Seconds until the next call, instead of `every`."""
    id: str | None = None
    """Names the page, so that its items have the same ids if it is read again; unless given, the
    cursor that it was asked with."""


class PageItem(NamedTuple):
    """An item of a page: its number since the start, and its id."""

    number: int
    id: str

    def __str__(self) -> str:
        return self.id


class PageSource(Generic[T]):
    """See `calls`, `pages` and `poll`."""

    def __init__(
        self,
        ask: Callable[[Any], Awaitable[Page[T] | None]],
        kind: str,
        *,
        start: Any,
        every: float,
        checkpoint: CheckpointTarget,
        save_every: float,
        name: str,
    ) -> None:
        self.name = checked_name(name)
        self._ask = ask
        self._kind = kind
        self._every = check.seconds("every", every)
        self._place = SavedPlace(checkpoint, save_every)
        self._now = current_clock().now
        self._cursor = self._ended = start
        """Where the next page is; and where it was before the first item that has not ended."""
        self._is_resumed = False
        self._next_at = self._now()
        self._asking: asyncio.Task[Page[T] | None] | None = None
        self._ready: deque[tuple[T, PageItem]] = deque()
        self._positions = Positions(0)
        self._numbers = 0
        self._pages: deque[tuple[int, Any]] = deque()
        """The number of the last item of each page that has not ended, and the cursor behind it."""

    async def pull(self, most: int) -> Sequence[tuple[T, PageItem]]:
        """Return the items of a page; wait for the next one if there are none left."""
        if not self._is_resumed:
            await self._resume()
        await wait_for_oldest(self._positions, self.name)
        while not self._ready:
            if self._asking is None:
                await sleep_async(max(0.0, self._next_at - self._now()))
                self._next_at = self._now() + self._every
                self._asking = asyncio.create_task(self._call(), name=f"page of {self.name}")
            await asyncio.wait([self._asking])
            asked, self._asking = self._asking, None
            self._take(asked.result())
        pulled = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        for _, item in pulled:
            self._positions.begin(item.number)
        return pulled

    async def _resume(self) -> None:
        saved = await self._place.load(lambda place: isinstance(place, dict) and "cursor" in place)
        if saved is not None:
            self._cursor = self._ended = saved["cursor"]
        self._is_resumed = True

    async def _call(self) -> Page[T] | None:
        return await self._ask(self._cursor)

    def _take(self, page: Page[T] | None) -> None:
        """Make the items of a page ready to be handed out."""
        if page is None:
            return
        asked = "start" if self._cursor is None else self._cursor
        named = f"{asked}" if page.id is None else page.id
        if self._place.checkpoint is not None:
            json.dumps(page.cursor)  # raises now, and not when it is to be saved
        for index, value in enumerate(list(page.items)):
            self._numbers += 1
            self._ready.append((value, PageItem(self._numbers, f"{named}-{index}")))
        if self._pages and self._pages[-1][0] == self._numbers:
            self._pages.pop()  # no item has come since
        self._pages.append((self._numbers, page.cursor))
        self._cursor = page.cursor
        self._move()
        if page.more:
            self._next_at = self._now()
        elif page.wait is not None:
            self._next_at = self._now() + page.wait

    def _move(self) -> None:
        while self._pages and self._pages[0][0] <= self._positions.checkpoint:
            self._ended = self._pages.popleft()[1]

    def _saved(self) -> dict[str, Any] | None:
        return None if self._ended is None else {"cursor": self._ended}

    async def acknowledge(self, handles: Sequence[PageItem]) -> None:
        """Move the checkpoint when a page has ended, and save it now and then."""
        for item in handles:
            self._positions.finish(item.number)
        self._move()
        await self._place.save_if_due(self._saved)

    async def give_back(self, handles: Sequence[PageItem]) -> None:
        """Do nothing: the checkpoint stays before them."""

    async def close(self) -> None:
        """Save the checkpoint, and end a call that is under way."""
        asking, self._asking = self._asking, None
        try:
            await self._place.save(self._saved())
            if self._kind != "calls":  # another run begins at the checkpoint
                self._cursor = self._ended
                self._ready.clear()
                self._pages.clear()
                self._positions = Positions(self._numbers)
        finally:
            if asking is not None:
                await end([asking])
                if not asking.cancelled() and asking.done():
                    asking.exception()  # retrieved, so that asyncio does not log it

    def snapshot(self) -> dict[str, Any]:
        """Return the seconds until the next call."""
        return {"kind": self._kind, "next_call": max(0.0, self._next_at - self._now())}


def calls(
    function: Callable[[], Iterable[T] | Awaitable[Iterable[T] | None] | None],
    *,
    every: float = 1.0,
    name: str | None = None,
) -> PageSource[T]:
    """Read what `function()` returns, called `every` so many seconds: items, or None for none.

    It is plain or async; a plain one runs in the event loop, so it must not block. What was
    returned and has not ended is lost with the process: for a place to go on from, see `pages`.
    """
    called = _awaited(function)
    numbers = count(1)

    async def ask(_cursor: Any) -> Page[T] | None:
        items = await called()
        return None if items is None else Page(items, id=f"{next(numbers)}")

    return PageSource(
        ask,
        "calls",
        start=None,
        every=every,
        checkpoint=None,
        save_every=1.0,
        name=name_for(function, name),
    )


def pages(
    function: Callable[[Any], Page[T] | Awaitable[Page[T] | None] | None],
    *,
    every: float = 1.0,
    start: Any = None,
    checkpoint: CheckpointTarget = None,
    save_every: float = 1.0,
    name: str | None = None,
) -> PageSource[T]:
    """Read pages by `function(cursor)`: it returns a `Page` with the next cursor, or None for none.

    The first cursor is `start`. It is called `every` so many seconds, or at once where a page says
    that there is `more`. With `checkpoint`, the path of a file or a `DatabaseCheckpoint`, a resumed
    run goes on at the cursor before which all items have ended; it is saved every `save_every`
    seconds. The function is plain or async; a plain one must not block.
    """
    called = _awaited(function)

    async def ask(cursor: Any) -> Page[T] | None:
        page = await called(cursor)
        if page is not None and not isinstance(page, Page):
            raise TypeError(
                f"{function!r} returned {page!r:.80}: write Page(items, cursor), or None"
            )
        return page

    return PageSource(
        ask,
        "pages",
        start=start,
        every=every,
        checkpoint=checkpoint,
        save_every=save_every,
        name=name_for(function, name),
    )


def _awaited(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return an async function that calls a plain or async one."""
    check.function("function", function)
    if kind_of(function) == "async":
        return function

    async def called(*arguments: Any) -> Any:
        return function(*arguments)

    return called


def poll(
    client: Any,
    url: str,
    *,
    every: float = 60.0,
    items: Callable[[Any], Iterable[Any]] | None = None,
    following: Callable[[Any], str | None] | None = None,
    checkpoint: CheckpointTarget = None,
    save_every: float = 1.0,
    name: str | None = None,
) -> PageSource[Any]:
    """Read `url` by GET, `every` so many seconds, by an `httpx.AsyncClient` with a guard.

    An answer is one item, its JSON, or those that `items(response)` returns. `following(response)`
    returns the URL of the next page, which is read at once; None asks the same one again later.
    What has not changed since (by its ETag) brings no item, and `Retry-After` is respected. An
    answer that cannot be read is a dead letter. The settings are else those of `pages`.
    """
    get = getattr(client, "get", None)
    if not callable(get) or kind_of(get) != "async":
        raise TypeError(f"poll({client!r}, ...): pass a client such as httpx.AsyncClient")
    if not isinstance(url, str) or not url:
        raise TypeError(
            f"url={url!r}: write where to read, such as 'https://vendor.example/orders'"
        )
    for argument, function in (("items", items), ("following", following)):
        if function is not None:
            check.plain_function(argument, function)

    async def ask(cursor: dict[str, str]) -> Page[Any]:
        headers = {"If-None-Match": cursor["etag"]} if "etag" in cursor else {}
        response = await get(cursor["url"], headers=headers)
        if response.status_code == NOT_MODIFIED:
            return Page((), cursor)
        if response.status_code in COME_LATER:
            today = current_clock()
            now = today.now() - epoch_of(today)
            pause = read_retry_after(response.headers.get("retry-after", ""), now)
            if pause is not None:
                return Page((), cursor, wait=max(every, pause))
        response.raise_for_status()
        return _page_of(response, cursor["url"], items, following)

    return PageSource(
        ask,
        "http",
        start={"url": url},
        every=every,
        checkpoint=checkpoint,
        save_every=save_every,
        name=(urlsplit(url).hostname or "poll") if name is None else name,
    )


def _page_of(
    response: Any,
    url: str,
    items: Callable[[Any], Iterable[Any]] | None,
    following: Callable[[Any], str | None] | None,
) -> Page[Any]:
    """Return the items of an answer to `url`, and where to ask next."""
    further = None
    try:
        found = [response.json()] if items is None else list(items(response))
        further = None if following is None else following(response)
    except Exception as error:  # noqa: BLE001 - of the user's functions, or no JSON
        found = [FaultyItem(response.text, error)]
    etag = response.headers.get("etag")
    cursor = {"url": url if further is None else further}
    if further is None and etag is not None:
        cursor["etag"] = etag
    # Not the URL itself: ids are seen in logs.
    known = f"{url} ".encode() + (response.content if etag is None else etag.encode())
    named = blake2b(known, digest_size=8).hexdigest()
    return Page(found, cursor, more=further is not None, id=named)
