"""A bounded queue between producers and consumers: threads and tasks of any loop, in any mixture.

Promises:
- It never holds more than `capacity` items, except for items that are given back.
- Each item is taken exactly once, or dropped and counted. Items of one producer keep their order.
- A put that was cancelled or timed out has put nothing; such a get has taken nothing.
- Waiters are served in order, and closing wakes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Final, Generic, Literal, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import give_up_at
from seawall.errors import (
    ChannelClosed,
    ChannelFull,
    DeadlineExceeded,
    Overloaded,
    Rejected,
    TimedOut,
)
from seawall.events import CallRejected, SettingsChanged
from seawall.events.bus import emit
from seawall.models.channel import Buffer, End, Line, check_capacity, take
from seawall.models.shedding.codel import QueueShed, check_queue_shed
from seawall.runtime.driver import wait_async, wait_sync
from seawall.runtime.layers import Wait
from seawall.runtime.mutex import LOCK_FREE, Mutex

T = TypeVar("T")
WhenFull = Literal["block", "drop_newest", "drop_oldest", "reject"]
WHEN_FULL: tuple[WhenFull, ...] = ("block", "drop_newest", "drop_oldest", "reject")


class Channel(Generic[T]):
    """Holds at most `capacity` items between producers and consumers."""

    def __init__(
        self,
        capacity: int,
        *,
        when_full: WhenFull = "block",
        demand: bool = False,
        on_drop: Callable[[T], object] | None = None,
        shed: QueueShed | None = None,
        name: str = "channel",
        clock: Clock | None = None,
    ) -> None:
        """Set the capacity; `when_full` decides what happens to an item beyond it.

        "block": its producer waits. "drop_newest": it is dropped. "drop_oldest": the oldest item is
        dropped instead. "reject": `ChannelFull`. With `demand`, there is room only for items that
        consumers requested by `request(n)`. `on_drop(item)` is called for each dropped item.

        `shed` decides when items have waited for too long: `codel()` or `adaptive_lifo()`, with
        times as given, since a channel does not know how long consumers take for an item. A new
        item is then refused with `Overloaded`, or dropped where `when_full` drops items; items that
        have waited for too long are dropped. The order does not change.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Channel(name={name!r}): write a name, such as 'orders'")
        check_capacity(capacity)
        check.flag("demand", demand)
        self.when_full: WhenFull = check.choice("when_full", when_full, WHEN_FULL)
        self.name = name
        self._on_drop = None if on_drop is None else check.plain_function("on_drop", on_drop)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._now = self._clock.now
        self._dropped = self._rejected = 0
        self._mutex = Mutex()
        self.shed = check_queue_shed(shed)
        self._discipline = None if shed is None else shed.start(_instant)
        lock_free = LOCK_FREE and shed is None
        self._buffer: Buffer[T] = Buffer(capacity, demanding=demand, lock_free=lock_free)
        survives_fork(self)
        registry.enter(self, "channel", name)

    def __repr__(self) -> str:
        extra = ", demand=True" if self._buffer.demanding else ""
        extra += "" if self.shed is None else f", shed={self.shed!r}"
        return f"Channel({self.capacity}, when_full={self.when_full!r}{extra}, name={self.name!r})"

    # For producers

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Put `item` in; return whether it is in (False: it was dropped).

        If producers wait, they do so for up to `timeout` seconds (0: not at all), then
        `ChannelFull` is raised. After `close`, `ChannelClosed` is raised.
        """
        try:
            return self._offer(item, timeout)
        except Wait as wait:
            waiter = wait.waiter
        wait_sync(waiter, self._clock)
        return True

    async def aput(self, item: T, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as `put`
        """Async twin of `put`."""
        try:
            return self._offer(item, timeout)
        except Wait as wait:
            waiter = wait.waiter
        await wait_async(waiter, self._clock)
        return True

    # For consumers

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item; wait for one up to `timeout` seconds (0: not at all).

        Raises `TimedOut` if none came, and `ChannelClosed` once it is closed and empty.
        """
        try:
            return self._take(timeout)
        except Wait as wait:
            waiter = wait.waiter
        item: T = wait_sync(waiter, self._clock)
        return item

    async def aget(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as `get`
        """Async twin of `get`."""
        try:
            return self._take(timeout)
        except Wait as wait:
            waiter = wait.waiter
        item: T = await wait_async(waiter, self._clock)
        return item

    def __iter__(self) -> Channel[T]:
        return self

    def __next__(self) -> T:
        try:
            return self.get()
        except ChannelClosed:
            raise StopIteration from None

    def __aiter__(self) -> Channel[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.aget()
        except ChannelClosed:
            raise StopAsyncIteration from None

    def give_back(self, items: Iterable[T]) -> None:
        """Put items that were taken but not used back in front of all others, in their order.

        There is always room for them: until they are taken again, nothing is put in beyond the
        capacity. They can also be taken after `close`.
        """
        returned = list(items)
        with self._mutex:
            self._buffer.put_back(returned, self._now())

    def request(self, n: int) -> None:
        """Ask producers for `n` more items; only with `demand=True`. Requests add up."""
        check.count("n", n)
        if not self._buffer.demanding:
            raise TypeError(f"{self!r} takes no requests: make it with demand=True")
        with self._mutex:
            self._buffer.requested += n
            self._buffer.serve()

    # Closing

    def close(self) -> None:
        """Accept no more items; those inside can still be taken. Idempotent."""
        with self._mutex:
            self._buffer.closed = self._buffer.attention = True
            self._buffer.serve()

    def drain(self, timeout: float | None = None) -> list[T]:
        """Close, wait until consumers have taken everything, and return [].

        After `timeout` seconds (0: immediately), or when the deadline passes, the remaining items
        are removed and returned instead, oldest first.
        """
        left: list[T] = wait_sync(self._closing(timeout), self._clock)
        return left

    async def adrain(self, timeout: float | None = None) -> list[T]:  # noqa: ASYNC109 - as `drain`
        """Async twin of `drain`."""
        left: list[T] = await wait_async(self._closing(timeout), self._clock)
        return left

    # State and settings

    @property
    def capacity(self) -> int:
        """The maximum number of items."""
        return self._buffer.capacity

    @property
    def depth(self) -> int:
        """The number of items inside."""
        return len(self._buffer.items)

    @property
    def demand(self) -> bool:
        """Whether there is room only for what consumers have requested."""
        return self._buffer.demanding

    @property
    def closed(self) -> bool:
        """Whether no more items can be put in."""
        return self._buffer.closed

    def update(self, *, capacity: int | None = None, when_full: WhenFull | None = None) -> None:
        """Change settings at run time. A lower capacity drops nothing; the excess is taken out."""
        changes: dict[str, Any] = {}
        if capacity is not None:
            changes["capacity"] = check_capacity(capacity)
        if when_full is not None:
            changes["when_full"] = check.choice("when_full", when_full, WHEN_FULL)
        if not changes:
            raise TypeError("Channel.update(): it takes capacity, when_full")
        with self._mutex:
            self.when_full = when_full or self.when_full
            self._buffer.attention = True
            self._buffer.resize(changes.get("capacity", self.capacity))
        emit(SettingsChanged, self.name, policy="channel", changes=changes)

    def snapshot(self) -> dict[str, Any]:
        """Return the items inside, the counts, and the waiters."""
        with self._mutex:
            shown = self._buffer.snapshot(self._now())
            counts = {"dropped": self._dropped, "rejected": self._rejected}
            return {"name": self.name, **shown, **counts}

    # Implementation: a fast path without the lock, otherwise in turn under the lock

    def _offer(self, item: T, timeout: float | None) -> bool:
        """Put without waiting, refuse, or raise `Wait`."""
        if timeout is not None:
            check.seconds("timeout", timeout, zero=True, infinite=True)
        buffer = self._buffer
        if not buffer.attention and buffer.admit(item, self._now()):
            # The order matters: a new waiter sets the flag first, and looks for tokens afterwards.
            if buffer.attention:
                self._serve()
            return True
        return self._offer_in_turn(item, timeout)

    def _serve(self) -> None:
        """Hand tokens to waiters, even if a signal interrupts the first try."""
        try:
            self._mutex.do(self._buffer.serve)
        except BaseException:
            self._mutex.do(self._buffer.serve)
            raise

    def _offer_in_turn(self, item: T, timeout: float | None) -> bool:
        with self._mutex:
            buffer = self._buffer
            buffer.serve()  # waiters come first
            if buffer.closed:
                raise self._closed_error()
            shed = self._refuses()
            if not shed and buffer.admit(item, self._now()):
                buffer.serve()
                return True
            policy = self.when_full
            refuses = policy == "reject" or (policy == "block" and (shed or timeout == 0))
            if policy == "block" and not refuses:
                raise Wait(_Putter(self, buffer.putters, timeout, item))
            newest = shed or policy == "drop_newest" or not buffer.items
            if not refuses:
                dropped = item if newest else buffer.exchange(item, self._now())
                self._dropped += 1
        # Callbacks and errors are called and raised without the lock.
        if refuses:
            raise self._refused(self._shed_error() if shed else self._full_error())
        self._tell_dropped(dropped)
        return not newest

    def _refuses(self) -> bool:
        discipline, ready = self._discipline, self._buffer.ready
        if discipline is None:
            return False
        now = self._now()
        if ready:
            return discipline.refuses(len(ready), max(0.0, now - ready[0]), now)
        discipline.emptied(now)
        return False

    def _take(self, timeout: float | None) -> T:
        if timeout is not None:
            check.seconds("timeout", timeout, zero=True, infinite=True)
        buffer = self._buffer
        if not buffer.attention and take(buffer.ready):
            room, free = buffer.room, _FREE
            try:
                item = buffer.items.popleft()
            except BaseException:  # a signal: the item is lost with this call, but not its place
                self._dropped += 1
                room += free
                raise
            room += free
            buffer.got += 1
            if buffer.attention:
                self._serve()
            return item
        return self._take_in_turn(timeout)

    def _take_in_turn(self, timeout: float | None) -> T:
        with self._mutex:
            buffer = self._buffer
            buffer.serve()
            stale = self._take_stale()
            if self._discipline is not None and buffer.ready:
                self._discipline.serves(self._now())
            try:
                item = buffer.take_out()
            except IndexError:
                if buffer.over:
                    raise self._closed_error() from None
                if timeout == 0:
                    message = f"channel {self.name!r} is empty"
                    raise TimedOut(message, guard=self.name, seconds=0.0) from None
                raise Wait(_Getter(self, buffer.getters, timeout)) from None
        for dropped in stale:
            self._tell_dropped(dropped)
        return item

    def _take_stale(self) -> list[T]:
        """Take out items that have waited for too long; never the last one."""
        discipline, buffer = self._discipline, self._buffer
        stale: list[T] = []
        if discipline is not None:
            now = self._now()
            while len(buffer.ready) > 1 and discipline.sheds(max(0.0, now - buffer.ready[0]), now):
                stale.append(buffer.take_out())
            self._dropped += len(stale)
        return stale

    def _closing(self, timeout: float | None) -> _Drainer:
        waiter = _Drainer(self, self._buffer.drainers, timeout)
        self.close()
        return waiter

    def _tell_dropped(self, item: T) -> None:
        try:
            if self._on_drop is not None:
                self._on_drop(item)
        except Exception:  # noqa: BLE001 - logged
            log_failure("on_drop of channel %r failed", self.name)

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"channel {self.name!r} is closed")

    def _full_error(self, why: str = "") -> ChannelFull:
        unasked = self._buffer.demanding and self.depth < self.capacity
        state = "nothing more is requested" if unasked else f"all {self.capacity} places are taken"
        return ChannelFull(f"channel {self.name!r}: {state}{why}")

    def _shed_error(self) -> Overloaded:
        error = Overloaded(f"channel {self.name!r}: shed from a queue that does not drain")
        error.reason = "shed_by_queue_time"
        return error

    def _refused(self, error: Rejected) -> Rejected:
        """Count a refusal, emit its event, and return its error. Call without the lock."""
        with self._mutex:
            self._rejected += 1
        emit(CallRejected, self.name, policy="channel", reason=error.reason, enforced=True)
        error.guard = self.name
        error.policy = "channel"
        return error

    def _after_fork(self) -> None:
        """Start empty in a child process: the items belong to the parent's consumers."""
        old = self._buffer
        self._mutex = Mutex()
        self._buffer = Buffer(old.capacity, demanding=old.demanding, lock_free=old.lock_free)
        self._discipline = None if self.shed is None else self.shed.start(_instant)
        self._buffer.closed, self._buffer.attention = old.closed, True
        self._buffer.serve()
        self._dropped = self._rejected = 0


class _ChannelWaiter:
    """A caller that waits for a channel. Its state changes only under the channel's lock."""

    def __init__(
        self, channel: Channel[Any], line: Line, timeout: float | None, item: Any = None
    ) -> None:
        self._channel = channel
        self._buffer = channel._buffer
        self._line = line
        self._item = item
        self._timeout = timeout
        self._state: Literal["waiting", "gone"] | End = "waiting"
        self._since = 0.0
        seconds = inf if timeout is None else timeout
        check.seconds("timeout", seconds, zero=True, infinite=True)
        self.until, self._late = give_up_at(channel._clock.now(), seconds)

    def publish(self, wake: Callable[[], bool]) -> None:
        self._wake = wake
        with self._channel._mutex:
            self._buffer.attention = True
            self._line[self] = None
            self._buffer.serve()

    def end(self, state: End, since: float = 0.0) -> bool:
        """Record the outcome; return False if the caller is no longer there."""
        there = self._wake()
        self._state, self._since = (state if there else "gone"), since
        return there

    def revoke(self) -> None:
        """Revoke what was granted but not yet claimed, as if the channel had closed first."""
        self._give_back()
        self._state = "closed"

    def abandon(self) -> None:
        # After a fork the channel has another buffer; what the old one gets back is lost.
        self._channel._mutex.do(self._withdraw)

    def _withdraw(self) -> None:
        self._line.pop(self, None)
        if self._state == "granted":
            self._give_back()
        self._buffer.serve()

    def _give_back(self) -> None:
        """Return the token, as if it had never been granted."""

    def _settle(self) -> str:
        self._line.pop(self, None)
        return self._state

    def _refuse(self, error: Exception) -> Exception:
        if self._late:
            message = f"channel {self._channel.name!r}: the deadline passed while waiting"
            error = DeadlineExceeded(message)
        return self._channel._refused(error) if isinstance(error, Rejected) else error


class _Putter(_ChannelWaiter):
    """Waits for room."""

    def _give_back(self) -> None:
        self._buffer.room.append(None)

    def claim(self) -> None:
        channel = self._channel
        with channel._mutex:
            state = self._settle()
            if state == "granted" and not self._buffer.closed:
                return self._buffer.add(self._item, channel._now())
            if state != "waiting":
                self._withdraw()
                raise channel._closed_error()
        raise self._refuse(channel._full_error(f", waited {self._timeout} s"))


class _Getter(_ChannelWaiter):
    """Waits for an item."""

    def end(self, state: End, since: float = 0.0) -> bool:
        """Record the outcome; until the item is claimed, it can be revoked."""
        there = super().end(state, since)
        if there and state == "granted":
            self._buffer.promised[self] = None
        return there

    def _settle(self) -> str:
        self._buffer.promised.pop(self, None)
        return super()._settle()

    def _give_back(self) -> None:
        self._buffer.promised.pop(self, None)
        self._buffer.ready.appendleft(self._since)

    def claim(self) -> Any:
        channel = self._channel
        with channel._mutex:
            state = self._settle()
            if state == "granted":
                return self._buffer.remove()
            if state == "closed":
                raise channel._closed_error()
        message = f"channel {channel.name!r}: nothing came, waited {self._timeout} s"
        raise self._refuse(TimedOut(message, guard=channel.name, seconds=self._timeout))


class _Drainer(_ChannelWaiter):
    """Waits until all items are taken."""

    def claim(self) -> list[Any]:
        with self._channel._mutex:
            return self._buffer.clear() if self._settle() == "waiting" else []


_FREE: Final = (None,)  # a token of room; `+=` lets no signal handler run, unlike `append`


def _instant(_now: float) -> float:
    """Return the time that an item takes, which a channel does not know."""
    return 0.0
