"""Pods side by side: each publishes its view in the shared store, and reads those of others.

    pods = StorePods(store, Watcher())  # what Dashboard(shared=store) does
    others = await pods.views()

Promises:
- A pod costs the store one script call per second while there are viewers, and one in five seconds
  otherwise. Rare, important events are published immediately.
- Nothing here delays a call: publishing is done in the background, and takes at most a fiftieth of
  a processor's time, or two fiftieths while much happens.
- While the store is away nothing is published, and `views` raises `StoreUnavailable`.
- A pod that closes its store is gone immediately; one that is killed is reported as gone for a
  minute, and then dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import thread_time
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clock import SYSTEM
from seawall.dashboard.debounce import APART, RARE, TOGETHER
from seawall.dashboard.pods.wire import (
    LARGEST,
    PodReading,
    PodsReply,
    arrange_views,
    is_urgent,
    left_out,
    pack,
    read_reply,
    unpack,
)
from seawall.errors import StoreUnavailable
from seawall.events import subscribe
from seawall.redis.store import RedisStore, core_of

if TYPE_CHECKING:
    from seawall.dashboard.views import View
    from seawall.dashboard.watcher import Watcher
    from seawall.runtime.background import Handle

MOST: Final = 64
"""Maximum number of other pods that are shown; of more, only the number is."""
KNOWN: Final = 1000
"""Maximum number of pods that are remembered in the store."""
REMEMBERED: Final = 75_000_000
"""Microseconds for which a silent pod is remembered: long enough to report that it is gone."""
ALTOGETHER: Final = 2 * 1024 * 1024
"""Maximum number of bytes of all views that are read at a time."""
LOOKED_AT: Final = 15_000
"""Milliseconds for which a viewer counts after its last request."""
UNSEEN: Final = 5.0
"""Seconds between two views while there are no viewers."""
SHARE: Final = 0.02
"""Maximum share of one processor's time for this."""
HEAVY: Final = 0.002
"""Seconds beyond which work is done outside the background thread."""
PATIENCE: Final = 1.0
"""Timeout in seconds of the store when publishing: no caller waits for it."""
LEAVING: Final = 0.3
"""The same at the end, when others wait to be closed."""
READING: Final = 0.5
"""Minimum timeout in seconds of the store when reading: an answer of this size may take longer than
a small one, and a late one would count as a failure of the store, also for its other users.
"""

READ_FOR: Final = 0.004
"""Seconds of processor time for parsing changed views: beyond that, pods are read in turn, but
rare, important events immediately.
"""

SETTLING: Final = 3.0
"""Seconds after an outage in which no pod counts as gone: they have to reconnect first."""

_of_parents: list[object] = []
"""Tasks of a parent process's loop, which must not be collected in the child."""


class StorePods:
    """The other pods, through the store that is shared with them."""

    def __init__(self, store: RedisStore, watcher: Watcher, *, every: float = 1.0) -> None:
        """Start publishing the views of `watcher`, one each `every` seconds."""
        if not isinstance(store, RedisStore):
            raise TypeError(f"StorePods({store!r}, ...): pass the RedisStore that the pods share")
        if not callable(getattr(watcher, "sample", None)):
            raise TypeError(f"StorePods(..., {watcher!r}): pass the Watcher of this pod")
        self._every = check.seconds("every", every)
        self._store = core = core_of(store)
        self._watcher = watcher
        self._keys = [core.key("views", "all", *part) for part in ((), ("told",), ("looked",))]
        self._closed = False
        self.cost = 0.0
        """Seconds of processor time that the last reading took."""
        self._known: dict[str, tuple[bytes, View | str]] = {}
        self._unread_since = self._more_since = 0.0
        self._settled_at = 0.0
        self._reset()
        self._stops: list[Callable[[], object]] = []
        self._handle: Handle = core.every(self._every, self._tick)
        self._stops += [subscribe(self._on_event, *RARE), core.watch(self._on_store)]
        core.at_close(self._at_close)
        survives_fork(self)
        self._start()

    def _reset(self) -> None:
        self._running = self._is_urgent = self._published = self._has_viewers = False
        self._due = 0.0
        self._cost = HEAVY  # seconds of processor time of the last sample; not yet known
        self._urgent_at = 0.0
        self._last = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._request: asyncio.Task[Any] | None = None
        self._published_view: View | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "viewed" if self._has_viewers else "without viewers"
        return f"<StorePods of {self._store!r}: {state}>"

    @property
    def store_name(self) -> str:
        """The name of the store: while it is lost, the other pods are unknown."""
        return self._store.name

    # Reading

    async def views(self) -> list[View]:
        """Return the last views of the other pods, by name; from any event loop.

        Each has its `age`, and a pod that is gone has its time. Pods that cannot be read or have no
        place are reported in the problems of a separate view. Raises `StoreUnavailable`.
        """
        self._start()
        args: list[str | int] = ["read", self._store.pod, REMEMBERED, MOST]
        args += [LARGEST, ALTOGETHER, LOOKED_AT]
        patience = max(READING, self._store.timeout)
        reply = read_reply(await self._store.acall("views", self._keys, args, patience))
        seen, unread = await self._read(reply)
        own = self._watcher.view
        views = arrange_views(
            seen,
            reply.now,
            None if own is None else own["pod"]["name"],
            is_settling=SYSTEM.now() < self._settled_at,
        )
        return [*self._left_out(reply, unread), *views]

    async def _read(self, reply: PodsReply) -> tuple[list[PodReading], list[str]]:
        """Return the readable views, and the reasons why others are not.

        Unchanged views are not parsed again. Once `READ_FOR` is spent, the remaining pods keep
        their last views, and are read first the next time.
        """
        known = self._known
        places = {pod: place for place, pod in enumerate(known)}
        newest = sorted(
            reply.pods[:MOST],
            key=lambda one: -1 if is_urgent(one.data) else places.get(one.pod, -1),
        )
        kept: dict[str, tuple[bytes, View | str]] = {}
        fresh: dict[str, tuple[bytes, View | str]] = {}
        cost = 0.0
        for pod, _at, data in newest:
            last = known.get(pod)
            if last is not None and (last[0] == data or (cost > READ_FOR and not is_urgent(data))):
                kept[pod] = last
                continue
            began = thread_time()
            fresh[pod] = data, _view_or_reason(data)
            cost += thread_time() - began
            await asyncio.sleep(0)  # noqa: TID251 - lets other tasks run, as a large view takes a while
        self._known, self.cost = {**kept, **fresh}, cost
        seen: list[PodReading] = []
        unread: list[str] = []
        for pod, at, _data in reply.pods[:MOST]:
            view = self._known[pod][1]
            if isinstance(view, str):
                unread.append(view)
            else:
                seen.append(PodReading(pod, at, view))
        return seen, unread

    def _left_out(self, reply: PodsReply, unread: list[str]) -> list[View]:
        """Return a view that reports pods that are not shown, if there are any."""
        now, more = reply.now / 1e6, max(0, reply.others - len(reply.pods[:MOST]))
        self._unread_since = (self._unread_since or now) if unread else 0.0
        self._more_since = (self._more_since or now) if more else 0.0
        if not unread and not more:
            return []
        return [left_out(now, unread, more, (self._unread_since, self._more_since))]

    # Publishing

    def close(self) -> None:
        """Report this pod as gone to the others, and stop; the store stays open."""
        self._closed = True
        self._stop_listening()
        self._handle.soon()  # it leaves in turn, after the current publication

    def _stop_listening(self) -> None:
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()

    def _start(self) -> None:
        """Start the background thread, also in a child process."""
        if not self._running and not self._closed:
            try:
                self._store.start()
            except StoreUnavailable:
                return  # the store was closed
            self._running = True

    def _on_event(self, _event: object) -> None:
        self._start()
        if not self._is_urgent:
            self._urgent_at = SYSTEM.now()
            self._is_urgent = True
            self._handle.soon()

    def _on_store(self, up: bool, _cause: str) -> None:  # noqa: FBT001 - signature of a store's watcher
        if up:
            self._settled_at = SYSTEM.now() + SETTLING
            self._due = 0.0
            self._handle.soon()

    async def _tick(self) -> None:
        """Publish this pod's view if it is due; in the background loop."""
        if self._closed:
            try:
                await self._leave()
            finally:
                self._handle.stop()
            return
        wait = self._wait()
        if wait <= 0:
            if self._store.up:
                await self._publish()
        elif self._is_urgent:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(wait, self._handle.soon)

    def _wait(self) -> float:
        """Return the seconds until the view is due."""
        due = self._due
        if self._is_urgent:
            # Events that happen together are published together, and not too soon after the last
            # view.
            apart = max(APART if self._has_viewers else self._every, self._cost / SHARE / 2)
            due = min(due, max(self._urgent_at + TOGETHER, self._last + apart))
        return due - SYSTEM.now()

    async def _publish(self) -> None:
        began = self._last = SYSTEM.now()
        urgent, self._is_urgent = self._is_urgent, False  # later events cause the next one
        pace = max(self._every, self._cost / SHARE, 0.0 if self._has_viewers else UNSEEN)
        # A tick is never exactly on time: one that is slightly early counts as on time.
        early = self._every / 4
        self._due = began + pace - early
        data = await self._packed_view(pace, afresh=urgent)
        if self._closed:
            return
        self._published = True
        self._has_viewers = await self._run_script("tell", PATIENCE, data) == 1
        if self._has_viewers:
            self._due = min(self._due, began + max(self._every, self._cost / SHARE) - early)

    async def _packed_view(self, pace: float, *, afresh: bool) -> bytes:
        """Return the data to publish; computed in a separate thread if that takes long."""

        def look() -> bytes:
            began = thread_time()
            view = self._watcher.view
            if (
                fresh := afresh or view is None or view is self._published_view
            ):  # no other sample was taken
                view = self._watcher.sample()
            self._published_view = view
            data = pack(view, pace, urgent=afresh)
            if fresh:
                self._cost = thread_time() - began
            return data

        return look() if self._cost < HEAVY else await asyncio.to_thread(look)

    async def _leave(self, patience: float = PATIENCE) -> None:
        if self._published:
            self._published = False
            await self._run_script("leave", patience)

    async def _run_script(self, what: str, patience: float, *more: bytes) -> Any:
        """Run the script as a separate task, which is not cancelled with this one."""
        args: list[str | int | bytes] = [what, self._store.pod, REMEMBERED, KNOWN, *more]
        asked = self._store.acall("views", self._keys, args, patience)
        self._request = task = asyncio.get_running_loop().create_task(asked)
        task.add_done_callback(_ended)
        await asyncio.wait({task})
        return task.result()

    async def _at_close(self) -> None:
        """Leave after the current publication: otherwise this pod would reappear afterwards."""
        self._closed = True
        self._stop_listening()
        if self._request is not None:
            await asyncio.wait({self._request}, timeout=LEAVING)
        await self._leave(LEAVING)

    def _after_fork(self) -> None:
        """Become another pod, which is not yet published."""
        _of_parents.append((self._request, self._timer))
        self._reset()


def _view_or_reason(data: bytes) -> View | str:
    try:
        return unpack(data)
    except ValueError as error:
        return str(error)


def _ended(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as retrieved: the waiter gets it too
