"""Those who wait for news of a queue: that there may be a job, or that a job has ended."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from seawall.runtime.mutex import Mutex, survives_fork

READY: Final = ""
"""The topic of those who wait for a job; of those who wait for its end it is the job's id."""


class Bells:
    """Who waits for which topic. Threads and tasks of any loop."""

    def __init__(self) -> None:
        """Have nobody who waits."""
        self.mutex = Mutex()
        self._bells: dict[str, dict[Bell, None]] = {}
        survives_fork(self)

    def ring(self, topic: str) -> None:
        """Let all who wait for `topic` look again."""
        with self.mutex:
            wakes = [bell.hear() for bell in self._bells.get(topic, ())]
        for wake in wakes:
            if wake is not None:
                wake()

    def ring_all(self) -> None:
        """Let everybody look again."""
        with self.mutex:
            topics = list(self._bells)
        for topic in topics:
            self.ring(topic)

    def add(self, bell: Bell) -> None:
        """Let `bell` be rung."""
        with self.mutex:
            self._bells.setdefault(bell.topic, {})[bell] = None

    def remove(self, bell: Bell) -> None:
        """Let it be rung no more."""
        self.mutex.do(lambda: self._forget(bell))

    def _forget(self, bell: Bell) -> None:
        bells = self._bells.get(bell.topic, {})
        bells.pop(bell, None)
        if not bells:
            self._bells.pop(bell.topic, None)

    def _after_fork(self) -> None:
        self.mutex = Mutex()
        self._bells = {}


class Bell:
    """Somebody who waits, again and again, inside a `with` block.

    `reset()` before asking: news that come between the question and the wait end the wait at once.
    """

    def __init__(self, bells: Bells, topic: str) -> None:
        """Wait for news of `topic`."""
        self.until: float | None = None
        self.topic = topic
        self._bells = bells
        self._heard = False
        self._wake: Callable[[], bool] | None = None

    def __enter__(self) -> Self:
        self._bells.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bells.remove(self)

    def reset(self) -> None:
        """Have heard nothing yet."""
        self._heard = False

    def hear(self) -> Callable[[], bool] | None:
        """Have news, under the lock; return how to wake who waits, if somebody does."""
        self._heard = True
        wake, self._wake = self._wake, None
        return wake

    def publish(self, wake: Callable[[], bool]) -> None:
        """Be woken by news; at once, if there are."""
        with self._bells.mutex:
            heard = self._heard
            self._wake = None if heard else wake
        if heard:
            wake()

    def claim(self) -> None:
        """Look again."""
        with self._bells.mutex:
            self._wake = None

    def abandon(self) -> None:
        """Wait no more: whoever leaves the block is not rung again."""
