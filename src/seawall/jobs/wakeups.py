"""Waiters for news of a queue: a job may be available, or a job has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from seawall._forks import survives_fork
from seawall.runtime.mutex import Mutex

READY: Final = ""
"""The topic of waiters for any job. Waiters for the end of a job use the job's id as topic."""


class Wakeups:
    """The waiters by topic: threads, and tasks of any event loop."""

    def __init__(self) -> None:
        self.mutex = Mutex()
        self._wakeups: dict[str, dict[Wakeup, None]] = {}
        survives_fork(self)

    def ring(self, topic: str) -> None:
        """Wake all waiters for `topic`, so that they look again."""
        with self.mutex:
            wakes = [waiter.notify() for waiter in self._wakeups.get(topic, ())]
        for wake in wakes:
            if wake is not None:
                wake()

    def ring_all(self) -> None:
        """Wake all waiters of all topics."""
        with self.mutex:
            topics = list(self._wakeups)
        for topic in topics:
            self.ring(topic)

    def add(self, waiter: Wakeup) -> None:
        """Register `waiter`."""
        with self.mutex:
            self._wakeups.setdefault(waiter.topic, {})[waiter] = None

    def remove(self, waiter: Wakeup) -> None:
        """Unregister `waiter`."""
        self.mutex.do(lambda: self._remove(waiter))

    def _remove(self, waiter: Wakeup) -> None:
        wakeups = self._wakeups.get(waiter.topic, {})
        wakeups.pop(waiter, None)
        if not wakeups:
            self._wakeups.pop(waiter.topic, None)

    def _after_fork(self) -> None:
        self.mutex = Mutex()
        self._wakeups = {}


class Wakeup:
    """A waiter that waits repeatedly inside a `with` block.

    Call `reset()` before asking the queue: news between the question and the wait then ends the
    wait at once.
    """

    def __init__(
        self, wakeups: Wakeups, topic: str, callback: Callable[[], bool] | None = None
    ) -> None:
        """Wait for news of `topic`; or call `callback` at any news, instead of waiting."""
        self._callback = callback
        self.until: float | None = None
        self.topic = topic
        self._wakeups = wakeups
        self._notified = False
        self._wake: Callable[[], bool] | None = None

    def __enter__(self) -> Self:
        self._wakeups.add(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._wakeups.remove(self)

    def reset(self) -> None:
        """Forget the news until now."""
        self._notified = False

    def notify(self) -> Callable[[], bool] | None:
        """Note news, under the lock; return the function that wakes the waiter, if there is one."""
        self._notified = True
        wake, self._wake = self._wake, None
        return self._callback or wake

    def publish(self, wake: Callable[[], bool]) -> None:
        """Register `wake` for the next news; call it at once if there is news already."""
        with self._wakeups.mutex:
            notified = self._notified
            self._wake = None if notified else wake
        if notified:
            wake()

    def claim(self) -> None:
        """Stop waiting for this news."""
        with self._wakeups.mutex:
            self._wake = None

    def abandon(self) -> None:
        """Do nothing: leaving the `with` block unregisters the waiter."""
