"""Waiters of a channel: for room, for an item, or for the end."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from seawall import _checks as check
from seawall.context import give_up_at
from seawall.errors import DeadlineExceeded, Rejected, TimedOut
from seawall.models.channel import End, Line

if TYPE_CHECKING:
    from seawall.resources.channel.channel import Channel


class ChannelWaiter:
    """A caller that waits for a channel. Its state changes only under the channel's lock."""

    def __init__(
        self, channel: Channel[Any], line: Line, timeout: float | None, item: Any = None
    ) -> None:
        """Wait in `line`, for up to `timeout` seconds and not beyond the deadline."""
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
        """Join the queue."""
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
        """Stop waiting, and give back what was granted."""
        # After a fork the channel has another buffer, and what is given back to the old one is
        # lost.
        self._channel._mutex.do(self._withdraw)

    def _withdraw(self) -> None:
        self._line.pop(self, None)
        if self._state == "granted":
            self._give_back()
        self._buffer.serve()

    def _give_back(self) -> None:
        """Return the token, as if it had never been granted."""

    def _settle(self) -> str:
        """Leave the queue, if still in it; return the outcome."""
        self._line.pop(self, None)
        return self._state

    def _refuse(self, error: Exception) -> Exception:
        if self._late:
            message = f"channel {self._channel.name!r}: the deadline passed while waiting"
            error = DeadlineExceeded(message)
        return self._channel._refused(error) if isinstance(error, Rejected) else error


class Putter(ChannelWaiter):
    """Waits for room."""

    def _give_back(self) -> None:
        self._buffer.room.append(None)

    def claim(self) -> None:
        """Put the item in if there is room, otherwise raise the reason."""
        channel = self._channel
        with channel._mutex:
            state = self._settle()
            if state == "granted" and not self._buffer.closed:
                return self._buffer.add(self._item, channel._now())
            if state != "waiting":
                self._withdraw()
                raise channel._closed_error()
        raise self._refuse(channel._full_error(f", waited {self._timeout} s"))


class Getter(ChannelWaiter):
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
        """Take the item out, or raise the reason why there is none."""
        channel = self._channel
        with channel._mutex:
            state = self._settle()
            if state == "granted":
                return self._buffer.remove()
            if state == "closed":
                raise channel._closed_error()
        message = f"channel {channel.name!r}: nothing came, waited {self._timeout} s"
        raise self._refuse(TimedOut(message, guard=channel.name, seconds=self._timeout))


class Drainer(ChannelWaiter):
    """Waits until all items are taken."""

    def claim(self) -> list[Any]:
        """Return the remaining items."""
        with self._channel._mutex:
            return self._buffer.clear() if self._settle() == "waiting" else []
