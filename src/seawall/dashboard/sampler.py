"""Live operation of a dashboard in one event loop: sampling, and fetching the views of other pods.

Promises:
- A sample is taken each `every` seconds, whatever others do, and takes at most a tenth of the time.
  It is written as JSON only if there are viewers.
- With viewers, rare and important events cause an immediate sample (`debounce`), and stores are
  queried for what only they know (`StoreQueries`).
- While the source of other pods does not answer, that is a problem of this pod, and their last
  known views are shown with their age, for a minute.
- A view that cannot be written as JSON hides no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from seawall import registry
from seawall.dashboard.debounce import APART, EventDebounce
from seawall.dashboard.history import OtherHistories
from seawall.dashboard.responses import to_json
from seawall.dashboard.stream import Broadcast, Frame
from seawall.dashboard.summary import (
    PODS_UNKNOWN,
    PageLinks,
    service_events,
    service_troubles,
    service_verdict,
)
from seawall.dashboard.validation import valid_view
from seawall.dashboard.view_writer import ViewWriter, fit_view
from seawall.dashboard.views import PodTrouble, View
from seawall.telemetry import arefresh
from seawall.web.lifecycle.server_stop import ServerStop

if TYPE_CHECKING:
    from seawall.dashboard.watcher import Watcher

MOST_PODS: Final = 100
"""Maximum number of pods that are shown beside this one."""
LARGEST_HISTORY: Final = 1_000_000
"""Maximum size in bytes of all histories at the start of a stream; this pod's own is always sent.
"""

LARGEST_TOGETHER: Final = 3_000_000
"""Maximum size in bytes of the views of all other pods; views above their share lose detail."""
LOOKED_AT: Final = 15.0
"""Seconds for which a viewer counts after its last request; only then are other pods fetched."""
KEPT: Final = 60.0
"""Seconds for which the last known views of other pods are shown if there are no new ones."""
SHARE: Final = 0.1
"""Maximum share of the event loop's time for sampling: with much to show, samples are less frequent
than `every`.
"""

PODS_WITHIN: Final = 0.25
"""Seconds that a frame waits for views of other pods; later ones are in the next frame."""
PODS_FAIL_AFTER: Final = 5.0
"""Seconds after which a source of pods that does not answer is a problem."""
EXTRA_WITHIN: Final = 1.0

Report = Callable[..., None]


class PodSource(Protocol):
    """Source of the views of other pods; one with `act` can also act on them."""

    async def views(self) -> list[View]:
        """Return the last view of each other pod."""
        ...

    async def act(self, pod: str, act: dict[str, Any]) -> str:
        """Act on that pod and return a sentence about it; raise if that is not possible."""
        ...


class Sampler:
    """Samples while it is running, and publishes each sample as a frame."""

    def __init__(
        self,
        watcher: Watcher,
        pods: Any,
        *,
        title: str,
        every: float,
        operable: tuple[bool, bool],
        extra: Callable[[Any], Awaitable[dict[str, Any] | None]],
        report: Report,
        context: Context,
        shared: bool,
        shows_itself: bool,
        owner: Callable[[], object],
        links: PageLinks,
    ) -> None:
        """Start sampling.

        `operable`: whether an operator can act on this pod, and on the others. With `shared`,
        other loops use the watcher too, so it is not closed at the end, and the views of `pods`
        are valid already. Without `shows_itself`, only the other pods are shown. `extra(owner())`
        returns what is sent beside the pods; once `owner()` is None, sampling ends.
        """
        self.watcher = watcher
        self.pods = pods
        self.broadcast = Broadcast()
        self._title = to_json(title)
        self._every = every
        self._operable = operable
        self._extra = extra
        self._report = report
        self._shared = shared
        self._wake = asyncio.Event()
        self._number = 0
        self._sampling = False
        self._sampled_at = float("-inf")
        self._cost = 0.0
        self._writing = 0.0
        self._viewed_at = float("-inf")
        self._is_unwatched = False
        self._owner = owner
        self._links = links
        self._others: list[View] = []
        self._last_known: tuple[float, list[View]] = (0.0, [])
        self._history_json: tuple[int, bytes] = (-1, b"")
        self._shows_itself = shows_itself
        self._other_histories = OtherHistories()
        self._fetching: asyncio.Task[list[View]] | None = None
        self._fetch_began = 0.0
        self._pods_trouble: PodTrouble | None = None
        self._began_at = 0.0
        self._store_queries = StoreQueries(context)
        self._writer = ViewWriter()
        self._debounce = EventDebounce(self._seconds_to_next, self.sample_soon)
        self._server_stop = ServerStop.of_this_loop()
        self._task = asyncio.get_running_loop().create_task(self._run(), context=context)

    @property
    def on(self) -> bool:
        """Whether it is sampling."""
        return not self._task.done()

    def sample_soon(self) -> None:
        """Take the next sample now."""
        self._wake.set()

    def _seconds_to_next(self) -> float | None:
        """Return the seconds until the next sample is allowed; None if there are no viewers."""
        now = asyncio.get_running_loop().time()
        if not self._has_viewers(now):
            return None
        return self._began_at + max(APART, self._cost / SHARE) - now

    def end_with_server(self) -> None:
        """End the streams when the server starts to stop: it waits for them before it stops."""
        if self.on:
            self._server_stop.listen(self.cancel)

    def end_streams(self) -> None:
        """Disconnect the current viewers; sampling goes on for later ones."""
        before, self.broadcast = self.broadcast, Broadcast()
        self.broadcast.frame = before.frame
        before.end()

    def record_viewer(self) -> int:
        """Record a viewer; return the number of the last frame that is too old for it.

        Without viewers, other pods are not fetched, so a new viewer waits for a new frame.
        """
        now = asyncio.get_running_loop().time()
        fresh = self.pods is None or self._has_viewers(now)
        self._viewed_at = now
        if fresh:
            return -1
        self.sample_soon()
        return self._number + self._is_unwatched

    async def record_single_viewer(self) -> int:
        """Record a viewer of one frame; wait briefly until the stores have answered.

        A stream shows their answers in a later frame. This viewer gets no later one.
        """
        after = self.record_viewer()
        await self._store_queries.answered()
        answered_at = self._store_queries.answered_at
        if answered_at is None or answered_at < self._sampled_at:
            return after
        self.sample_soon()
        return max(after, self._number + self._sampling)

    def _has_viewers(self, now: float) -> bool:
        if self.broadcast.awaited:
            self._viewed_at = now
        return now - self._viewed_at < LOOKED_AT

    async def first(self, after: int = -1) -> Frame | None:
        """Wait for a frame `after` that number, and return it; None if there will be none."""
        while not self.broadcast.over:
            frame = self.broadcast.frame
            if frame is not None and frame.number > after:
                return frame
            await asyncio.wait({self.broadcast.beyond(after)})
        return None

    def history(self) -> bytes:
        """Return the histories of the pods as JSON, written once for all viewers of a frame."""
        if self._history_json[0] != self._number:
            self._history_json = self._number, self._write_history()
        return self._history_json[1]

    def hours(self, span: float, guard: str) -> dict[str, Any]:
        """Return the history of a guard over `span` seconds, by pod: its times and its values."""
        view = self.watcher.view
        pods = dict(self._other_histories.hours(span, guard))
        own = self.watcher.hours(span, guard) if view is not None and self._shows_itself else None
        if view is not None and own is not None:
            pods[view["pod"]["name"]] = own
        return {pod: {"at": at, "guard": track} for pod, (at, track) in pods.items()}

    def _write_history(self) -> bytes:
        view = self.watcher.view
        if view is None:
            return b"null"
        try:
            own = view["pod"]["name"], self.watcher.history
            members = [_member(*own)] if self._shows_itself else []
            room = LARGEST_HISTORY
            for name, history in self._other_histories.histories():
                member = _member(name, history)
                room -= len(member)
                if room < 0:
                    break
                members.append(member)
        except (TypeError, ValueError) as error:
            self._report("history", logging.ERROR, "the past cannot be shown: %r", error)
            return b"null"
        return b"{%b}" % b",".join(members)

    def cancel(self) -> None:
        """Start to stop."""
        self._task.cancel()

    async def stop(self) -> None:
        """Stop sampling, and end all streams."""
        self.cancel()
        await asyncio.wait([self._task])
        await self._end()  # a task that is cancelled before it starts does not run its `finally`

    async def _end(self) -> None:
        if self.broadcast.over:
            return  # it has ended already
        self._server_stop.ignore(self.cancel)
        self.broadcast.end()
        self._debounce.close()
        asking, self._fetching = self._fetching, None
        if asking is not None:
            asking.cancel()
        if not self._shared:
            self.watcher.close()
        await self._store_queries.end()

    async def _run(self) -> None:
        try:
            while self._owner() is not None and not self._is_stopping():
                self._wake.clear()
                self._sampling = True
                try:
                    await self._sample()
                except Exception as error:  # noqa: BLE001 - the next sample may succeed
                    self._report("sample", logging.ERROR, "no sample: %r", error)
                self._sampling = False
                try:
                    async with asyncio.timeout(max(self._every, self._cost / SHARE)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await self._end()

    def _is_stopping(self) -> bool:
        """Return whether this service is stopping: a server waits for its streams first."""
        for thing, entry in registry.entered():
            if entry.kind == "lifecycle" and getattr(thing, "state", "") == "draining":
                return True
        return self._server_stop.is_stopping()

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        began = self._began_at = loop.time()
        own = self.watcher.sample().copy()
        reading = getattr(self.pods, "cost", 0.0)
        self._cost, self._writing = loop.time() - began + self._writing + reading, 0.0
        own["operable"] = self._operable[0]
        self._is_unwatched = not self._has_viewers(began)
        if self._is_unwatched:
            self._others, self._pods_trouble = [], None
        else:
            self._store_queries.ask()
            await self._ask_pods(own["at"])
        if self._pods_trouble is not None:
            own["troubles"] = [*own["troubles"], self._pods_trouble]
        others = [{**view, "operable": self._operable[1]} for view in self._others]
        more = await self._more()
        self._number += 1
        self._sampled_at = began
        self._is_unwatched = False
        at = to_json(own["at"])
        views = partial(self._write, own, cast("list[View]", others))
        self.broadcast.publish(Frame(self._number, self._title, at, views, more))

    async def _write(self, own: View, others: list[View]) -> bytes:
        """Return the pods as JSON: a summary, and the views.

        This pod's view is complete; the others are limited to their share.
        """
        loop = asyncio.get_running_loop()
        part = LARGEST_TOGETHER // max(1, len(others))
        written: list[bytes] = []
        shown: list[View] = []
        self._writer.begin()
        for view in [own, *others] if self._shows_itself else others:
            began = loop.time()
            try:
                data = self._writer.write(view, whole=view is not own)
                if view is not own and len(data) > part:
                    data = to_json(fit_view(view, part)[0])
                written.append(data)
                shown.append(view)
            except (TypeError, ValueError) as error:
                self._report("view", logging.WARNING, "a pod's view is left out: %r", error)
            self._writing += loop.time() - began
            if view is not own:
                await asyncio.sleep(0)  # noqa: TID251 - lets other tasks run, as a large view takes a while
        began = loop.time()
        problems = service_troubles(shown, own["at"], self._links)
        summary = (
            _member("verdict", service_verdict(shown, problems)),
            _member("troubles", problems),
            _member("happened", service_events(shown, self._links)),
        )
        self._writing += loop.time() - began
        return b'%b,"views":[%b]' % (b",".join(summary), b",".join(written))

    async def _more(self) -> bytes:
        owner = self._owner()
        if owner is None:  # it was dropped during this sample, which is the last one
            return b"null"
        try:
            async with asyncio.timeout(EXTRA_WITHIN):
                return to_json(await self._extra(owner))
        except Exception as error:  # noqa: BLE001 - the rest is shown without it
            self._report("extra", logging.ERROR, "nothing extra is shown: %r", error)
            return b"null"

    # Other pods

    async def _ask_pods(self, at: float) -> None:
        if self.pods is None:
            return
        now = asyncio.get_running_loop().time()
        if self._fetching is None:
            self._fetch_began = now
            self._fetching = asyncio.create_task(self._fetch(self.pods))
        await asyncio.wait({self._fetching}, timeout=min(PODS_WITHIN, self._every))
        if not self._fetching.done():
            self._show_last_known(now)
            if now - self._fetch_began >= PODS_FAIL_AFTER:
                self._fetching.cancel()
            return
        task, self._fetching = self._fetching, None
        try:
            self._others = self._usable(task.result())
            self._other_histories.remember(self._others)
        except asyncio.CancelledError:
            self._show_last_known(now)
            self._pods_failed(at, TimeoutError("no answer"))
        except Exception as error:  # noqa: BLE001 - any error is logged and shown
            self._show_last_known(now)
            self._pods_failed(at, error)
        else:
            self._last_known = now, self._others
            self._pods_trouble = None

    async def _fetch(self, pods: Any) -> list[View]:
        views: list[View] = await pods.views()
        return views

    def _show_last_known(self, now: float) -> None:
        """Show the last known views of the others with their age; none if they are too old."""
        at, views = self._last_known
        passed = now - at
        self._others = [{**view, "age": view.get("age", 0.0) + passed} for view in views]
        if passed > KEPT:
            self._others = []

    def _pods_failed(self, at: float, error: Exception) -> None:
        self._report("pods", logging.WARNING, "the other pods are not known: %r", error)
        what = "What is shown of them is old." if self._others else "Only this pod is shown."
        since = at if self._pods_trouble is None else self._pods_trouble["since"]
        self._pods_trouble = PodTrouble(
            id=PODS_UNKNOWN,
            tone="warn",
            where="dashboard",
            what=f"The other pods cannot be asked for ({type(error).__name__}).",
            advice=f"{what} Look at the store that the pods share.",
            since=since,
        )
        store = getattr(self.pods, "store_name", None)
        if store is not None:
            self._pods_trouble["cause"] = f"store:{store}"

    def _usable(self, views: Any) -> list[View]:
        """Return the valid views, of pods other than this one, each pod once."""
        if not isinstance(views, list):
            raise TypeError(f"views() returned {type(views).__name__}, not a list")
        own = self.watcher.view
        names = {own["pod"]["name"]} if own is not None else set()
        usable: list[View] = []
        for raw in views[:MOST_PODS]:
            try:
                view = cast("View", raw) if self._shared else valid_view(raw)
            except ValueError as error:
                self._report("view", logging.WARNING, "a pod's view is left out: %s", error)
                continue
            name = view["pod"]["name"]
            if name not in names:
                names.add(name)
                usable.append(view)
        return sorted(usable, key=lambda view: view["pod"]["name"])


def _member(name: str, value: Any) -> bytes:
    return to_json(name) + b":" + to_json(value)


EVERY: Final = 5.0
"""Seconds between two rounds: stored counts change slowly, and each costs a query."""
WITHIN: Final = 2.0
"""Timeout in seconds of each query."""


class StoreQueries:
    """Runs the queries in the event loop in which it is called."""

    def __init__(self, context: Context) -> None:
        """Query in a copy of `context`, without the deadline of the current request."""
        self.answered_at: float | None = None
        """When the last round ended, by the clock of the event loop; None if none did."""
        self._context = context
        self._due = float("-inf")
        self._fetching: asyncio.Task[int] | None = None

    def ask(self) -> None:
        """Start a round if one is due, without waiting."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due or (self._fetching is not None and not self._fetching.done()):
            return
        # A sample is never exactly on time: one that is slightly early counts as on time.
        self._due = loop.time() + 0.95 * EVERY
        if any(entry.ask is not None for _, entry in registry.entered()):
            asked = arefresh(timeout=WITHIN)
            self._fetching = loop.create_task(asked, context=self._context.copy())
            self._fetching.add_done_callback(self._ended)

    async def answered(self) -> None:
        """Start a round if one is due, and wait briefly for the current one."""
        self.ask()
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=WITHIN)

    def _ended(self, asked: asyncio.Task[int]) -> None:
        self.answered_at = asked.get_loop().time()
        if not asked.cancelled():
            asked.exception()  # each object keeps its own failure

    async def end(self) -> None:
        """Stop querying; cancel the current round."""
        self._due = float("inf")
        asking, self._fetching = self._fetching, None
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])
