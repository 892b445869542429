"""What acquiring a lease waits for: an answer, an instant, or the news that the lease is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seawall.errors import StoreUnavailable

if TYPE_CHECKING:
    from seawall.leases.store import LeaseShare
    from seawall.models.lease import Busy, Granted
    from seawall.runtime.store import StoreQuestion


def sooner(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two instants; None means never."""
    return other if one is None else one if other is None else min(one, other)


class Question:
    """A waiter for the store's answer. A failure is an answer too: its text."""

    def __init__(self, asking: StoreQuestion, until: float | None = None) -> None:
        """Wait for `asking`, but not beyond `until`."""
        self._asking = asking
        self.until = sooner(asking.until, until)
        self.publish = asking.publish
        self.abandon = asking.abandon

    def claim(self) -> Granted | Busy | str:
        """Return the answer, or the text of the failure."""
        try:
            answer: Granted | Busy = self._asking.claim()
        except StoreUnavailable as error:
            return str(error)
        return answer


class Bell:
    """Rings when the lease was released, or when a message about a release may have been lost."""

    def __init__(self, share: LeaseShare) -> None:
        """Stay silent until `listen`."""
        self._share = share
        self._stop: Callable[[], None] | None = None
        self._wakers: list[Callable[[], bool]] = []
        self.rung = False

    def listen(self) -> None:
        """Start to ring. Further calls do nothing."""
        if self._stop is None:
            self._stop = self._share.listen(self._hear)
            self._share.start()

    def close(self) -> None:
        """Stop ringing."""
        if self._stop is not None:
            self._stop()

    def await_by(self, wake: Callable[[], bool]) -> None:
        """Call `wake` once, at the next ring; immediately if the bell has already rung."""
        self._wakers.append(wake)
        if self.rung:
            self._ring()

    def leave(self) -> None:
        """Remove the waiter, if there is one."""
        self._wakers.clear()

    def _hear(self) -> None:
        self.rung = True
        self._ring()

    def _ring(self) -> None:
        try:
            wake = self._wakers.pop()  # atomic: two rings never call the same `wake`
        except IndexError:
            return
        wake()


class Pause:
    """A waiter for an instant or for a bell. Its result is whether the bell has rung."""

    def __init__(self, until: float, bell: Bell | None = None) -> None:
        """Wait until `until` at the latest."""
        self.until: float | None = until
        self._bell = bell

    def publish(self, wake: Callable[[], bool]) -> None:
        """Start to wait."""
        if self._bell is not None:
            self._bell.await_by(wake)

    def claim(self) -> bool:
        """Return whether the bell has rung."""
        self.abandon()
        return self._bell is not None and self._bell.rung

    def abandon(self) -> None:
        """Stop waiting."""
        if self._bell is not None:
            self._bell.leave()
