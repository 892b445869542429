"""What taking a lease waits for: an answer, an instant, or the word that the lease is free."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from seawall.errors import StoreUnavailable
from seawall.runtime.runners import wait_async, wait_sync

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.leases.store import LeaseShare
    from seawall.models.lease import Busy, Granted
    from seawall.runtime.asking import Asking

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""Questions and pauses, written once; carried out by blocking or by awaiting."""


def run(steps: Steps[T], clock: Clock) -> T:
    """Carry `steps` out in this thread."""
    answer: Any = None
    try:
        while True:
            answer = wait_sync(steps.send(answer), clock)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(steps: Steps[T], clock: Clock) -> T:
    """Carry `steps` out in this task."""
    answer: Any = None
    try:
        while True:
            answer = await wait_async(steps.send(answer), clock)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def sooner(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two instants; None: never."""
    return other if one is None else one if other is None else min(one, other)


class Question:
    """A waiter for the store's answer; a failure is an answer too: its text."""

    def __init__(self, asking: Asking, until: float | None = None) -> None:
        """Wait for `asking`, and no longer than `until`."""
        self._asking = asking
        self.until = sooner(asking.until, until)
        self.publish = asking.publish
        self.abandon = asking.abandon

    def claim(self) -> Granted | Busy | str:
        """Return the answer, or what went wrong."""
        try:
            answer: Granted | Busy = self._asking.claim()
        except StoreUnavailable as error:
            return str(error)
        return answer


class Bell:
    """Rings when the lease was released, and when a message about that may have been missed."""

    def __init__(self, share: LeaseShare) -> None:
        """Be silent until `listen`."""
        self._share = share
        self._stop: Callable[[], None] | None = None
        self._wakers: list[Callable[[], bool]] = []
        self.rung = False

    def listen(self) -> None:
        """Ring from now on; again does nothing."""
        if self._stop is None:
            self._stop = self._share.listen(self._hear)
            self._share.start()

    def close(self) -> None:
        """Ring no more."""
        if self._stop is not None:
            self._stop()

    def await_by(self, wake: Callable[[], bool]) -> None:
        """Call `wake` at the next ring, once; at once if it has rung meanwhile."""
        self._wakers.append(wake)
        if self.rung:
            self._ring()

    def leave(self) -> None:
        """Wake nobody any more."""
        self._wakers.clear()

    def _hear(self) -> None:
        self.rung = True
        self._ring()

    def _ring(self) -> None:
        try:
            wake = self._wakers.pop()  # atomic: two rings never wake the same one
        except IndexError:
            return
        wake()


class Pause:
    """A waiter for an instant, or for a bell; tells whether it has rung."""

    def __init__(self, until: float, bell: Bell | None = None) -> None:
        """Wait until then at the latest."""
        self.until: float | None = until
        self._bell = bell

    def publish(self, wake: Callable[[], bool]) -> None:
        """Begin to wait."""
        if self._bell is not None:
            self._bell.await_by(wake)

    def claim(self) -> bool:
        """Tell whether the bell has rung."""
        self.abandon()
        return self._bell is not None and self._bell.rung

    def abandon(self) -> None:
        """Wait no more."""
        if self._bell is not None:
            self._bell.leave()
