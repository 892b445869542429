"""A bounded queue between producers and consumers: threads and tasks of any loop, in any mixture.

Promises: never more than `capacity` inside; what was put is taken exactly once, or dropped and
counted; what one producer put comes out in its order; a put that was cancelled or late has put
nothing, such a get has taken nothing; who waits is served in order; closing wakes everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Generic, Literal, TypeVar

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import give_up_at
from seawall.errors import ChannelClosed, ChannelFull, DeadlineExceeded, TimedOut
from seawall.models.channel import Buffer, End, Line, take
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.layers import Wait
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.runners import wait_async, wait_sync

T = TypeVar("T")
WhenFull = Literal["block", "drop_newest", "drop_oldest", "reject"]
WHEN_FULL: tuple[WhenFull, ...] = ("block", "drop_newest", "drop_oldest", "reject")


class Channel(Generic[T]):
    """Hold at most `capacity` items between those who put and those who get."""

    def __init__(
        self,
        capacity: int,
        *,
        when_full: WhenFull = "block",
        demand: bool = False,
        on_drop: Callable[[T], object] | None = None,
        name: str = "channel",
        clock: Clock | None = None,
    ) -> None:
        """Have room for `capacity`; `when_full` says what becomes of an item beyond that.

        "block": its producer waits. "drop_newest": it is dropped. "drop_oldest": the oldest inside
        is dropped for it. "reject": `ChannelFull`. With `demand`, there is room only for what
        consumers asked for by `request(n)`. `on_drop(item)` is told of each dropped item.
        """
        check.count("capacity", capacity)
        check.flag("demand", demand)
        self.when_full: WhenFull = check.choice("when_full", when_full, WHEN_FULL)
        self.name = name
        self._on_drop = None if on_drop is None else check.function("on_drop", on_drop)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._now = self._clock.now
        self._dropped = self._rejected = 0
        self._mutex = Mutex()
        self._buffer: Buffer[T] = Buffer(capacity, demanding=demand, lock_free=LOCK_FREE)
        survives_fork(self)

    def __repr__(self) -> str:
        demand = ", demand=True" if self._buffer.demanding else ""
        return f"Channel({self.capacity}, when_full={self.when_full!r}{demand}, name={self.name!r})"

    # What producers do

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Put `item` in; tell whether it is in (False: it was dropped).

        Where producers wait, they do so for up to `timeout` seconds (0: not at all), then
        `ChannelFull` is raised. After `close` it is `ChannelClosed`.
        """
        try:
            return self._offer(item, timeout)
        except Wait as wait:
            waiter = wait.waiter
        wait_sync(waiter, self._clock)
        return True

    async def aput(self, item: T, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as `put`
        """Put `item` in, as `put` does; the task waits, not the thread."""
        try:
            return self._offer(item, timeout)
        except Wait as wait:
            waiter = wait.waiter
        await wait_async(waiter, self._clock)
        return True

    # What consumers do

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
        """Take the oldest item, as `get` does; the task waits, not the thread."""
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

    def request(self, n: int) -> None:
        """Ask producers for `n` items more; only with `demand=True`. Requests add up."""
        check.count("n", n)
        if not self._buffer.demanding:
            raise TypeError(f"{self!r} takes no requests: make it with demand=True")
        with self._mutex:
            self._buffer.requested += n
            self._buffer.serve()

    # The end

    def close(self) -> None:
        """Let nothing in any more; what is inside can still be taken. Again does nothing."""
        with self._mutex:
            self._buffer.closed = self._buffer.attention = True
            self._buffer.serve()

    def drain(self, timeout: float | None = None) -> list[T]:
        """Close, wait until consumers have taken everything, and return [].

        After `timeout` seconds (0: at once), or when the deadline passes, what is left is taken
        out and returned instead, oldest first.
        """
        left: list[T] = wait_sync(self._closing(timeout), self._clock)
        return left

    async def adrain(self, timeout: float | None = None) -> list[T]:  # noqa: ASYNC109 - as `drain`
        """Close and wait, as `drain` does; the task waits, not the thread."""
        left: list[T] = await wait_async(self._closing(timeout), self._clock)
        return left

    # What can be seen and changed

    @property
    def capacity(self) -> int:
        """How many items there is room for."""
        return self._buffer.capacity

    @property
    def depth(self) -> int:
        """How many items are inside."""
        return len(self._buffer.items)

    @property
    def closed(self) -> bool:
        """Whether nothing can be put in any more."""
        return self._buffer.closed

    def update(self, *, capacity: int | None = None, when_full: WhenFull | None = None) -> None:
        """Change settings at run time. A lower capacity drops nothing: it is reached by taking."""
        capacity = self.capacity if capacity is None else check.count("capacity", capacity)
        if when_full is not None:
            check.choice("when_full", when_full, WHEN_FULL)
        with self._mutex:
            self.when_full = when_full or self.when_full
            self._buffer.attention = True
            self._buffer.resize(capacity)

    def snapshot(self) -> dict[str, Any]:
        """Return what is inside, what went through, and who waits."""
        with self._mutex:
            shown = self._buffer.snapshot(self._now())
            return {**shown, "dropped": self._dropped, "rejected": self._rejected}

    # How it is done: at once without the lock if all is well, else in turn

    def _offer(self, item: T, timeout: float | None) -> bool:
        """Put at once, refuse, or raise `Wait`."""
        if timeout is not None:
            check.seconds("timeout", timeout, zero=True, infinite=True)
        buffer = self._buffer
        if not buffer.attention:
            try:
                buffer.room.popleft()
            except IndexError:
                pass
            else:
                buffer.items.append(item)
                buffer.ready.append(self._now())
                buffer.put += 1
                # In this order: who begins to wait sets the flag first, and looks for tokens after.
                if buffer.attention:
                    self._mutex.do(buffer.serve)
                return True
        return self._offer_in_turn(item, timeout)

    def _offer_in_turn(self, item: T, timeout: float | None) -> bool:
        with self._mutex:
            buffer = self._buffer
            buffer.serve()  # who waits comes first
            if buffer.closed:
                raise self._closed_error()
            if take(buffer.room):
                buffer.add(item, self._now())
                return True
            policy = self.when_full
            if policy == "reject" or (policy == "block" and timeout == 0):
                self._rejected += 1
                raise self._full_error()
            if policy == "block":
                raise Wait(_Putter(self, buffer.putters, timeout, item))
            newest = policy == "drop_newest" or not buffer.items
            dropped = item if newest else buffer.exchange(item, self._now())
            self._dropped += 1
        self._tell_dropped(dropped)
        return not newest

    def _take(self, timeout: float | None) -> T:
        """Take at once, refuse, or raise `Wait`."""
        if timeout is not None:
            check.seconds("timeout", timeout, zero=True, infinite=True)
        buffer = self._buffer
        if not buffer.attention:
            try:
                buffer.ready.popleft()
            except IndexError:
                pass
            else:
                item = buffer.items.popleft()
                buffer.room.append(None)
                buffer.got += 1
                if buffer.attention:
                    self._mutex.do(buffer.serve)
                return item
        return self._take_in_turn(timeout)

    def _take_in_turn(self, timeout: float | None) -> T:
        with self._mutex:
            buffer = self._buffer
            buffer.serve()
            if take(buffer.ready):
                return buffer.remove()
            if buffer.over:
                raise self._closed_error()
            if timeout == 0:
                raise TimedOut(f"channel {self.name!r} is empty", seconds=0.0)
            raise Wait(_Getter(self, buffer.getters, timeout))

    def _closing(self, timeout: float | None) -> _Drainer:
        waiter = _Drainer(self, self._buffer.drainers, timeout)
        self.close()
        return waiter

    def _tell_dropped(self, item: T) -> None:
        try:
            if self._on_drop is not None:
                self._on_drop(item)
        except Exception:
            import logging

            logging.getLogger("seawall").exception("on_drop of channel %r failed", self.name)

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"channel {self.name!r} is closed")

    def _full_error(self, why: str = "") -> ChannelFull:
        unasked = self._buffer.demanding and self.depth < self.capacity
        state = "nothing more is requested" if unasked else f"all {self.capacity} places are taken"
        return ChannelFull(f"channel {self.name!r}: {state}{why}", policy="channel")

    def _after_fork(self) -> None:
        """Be usable in a child process: what was inside belongs to the parent's consumers."""
        old = self._buffer
        self._mutex = Mutex()
        self._buffer = Buffer(old.capacity, demanding=old.demanding, lock_free=LOCK_FREE)
        self._buffer.closed, self._buffer.attention = old.closed, True
        self._buffer.serve()
        self._dropped = self._rejected = 0


class _Waiter:
    """Somebody who waits for a channel. Its state changes under the channel's lock only."""

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
        there = self._wake()
        self._state, self._since = (state if there else "gone"), since
        return there

    def abandon(self) -> None:
        # After a fork the buffer is another one, and what is given back to the old one is gone.
        self._channel._mutex.do(self._withdraw)

    def _withdraw(self) -> None:
        self._line.pop(self, None)
        if self._state == "granted":
            self._give_back()
        self._buffer.serve()

    def _give_back(self) -> None:
        """Return the token, as if it had never been granted."""

    def _settle(self) -> str:
        """Leave the line, if still in it; return what became of it."""
        self._line.pop(self, None)
        return self._state

    def _refuse(self, error: Exception) -> Exception:
        message = f"channel {self._channel.name!r}: the deadline passed while waiting"
        return DeadlineExceeded(message, policy="channel") if self._late else error


class _Putter(_Waiter):
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
            channel._rejected += 1
            raise self._refuse(channel._full_error(f", waited {self._timeout} s"))


class _Getter(_Waiter):
    def _give_back(self) -> None:
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
            raise self._refuse(TimedOut(message, seconds=self._timeout))


class _Drainer(_Waiter):
    def claim(self) -> list[Any]:
        left: list[Any] = []
        with self._channel._mutex:
            if self._settle() == "waiting":
                while take(self._buffer.ready):
                    left.append(self._buffer.remove())
        return left
