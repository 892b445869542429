"""The store's own small breaker: a dead store costs its timeout a few times, then nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from seawall._failures import log_failure
from seawall.clock import SYSTEM
from seawall.models.breaker.probes import CallVerdict, growing
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerState
from seawall.runtime.mutex import Mutex

FAILURES: Final = 3
"""Number of consecutive failures after which the store counts as down."""

STEADY: Final = 10.0
"""Seconds the store must stay up; otherwise the next break continues to grow."""

NOTED: Final = 16
"""Maximum number of different mistakes that are logged, each once."""

_PAUSES: Final = growing(0.1, cap=1.0)

Watcher = Callable[..., object]


class Watchers:
    """Functions that are called at every change. They may be added and removed by any thread."""

    def __init__(self, subject: str) -> None:
        """Name the `subject` of the changes, for the log."""
        self._subject = subject
        self._all: tuple[Watcher, ...] = ()
        self._mutex = Mutex()

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` at every change; return a function that ends that."""
        with self._mutex:
            self._all = (*self._all, watcher)

        def remove() -> None:
            self._all = tuple(kept for kept in self._all if kept is not watcher)

        return lambda: self._mutex.do(remove)  # the garbage collector may call it at any moment

    def notify(self, *news: object) -> None:
        """Call all of them. An error of one is logged."""
        for watcher in self._all:
            try:
                watcher(*news)
            except Exception:  # noqa: BLE001 - logged
                log_failure("a watcher of the %s failed", self._subject)

    def after_fork(self) -> None:
        """Replace the lock in a child process; watchers stay."""
        self._mutex = Mutex()


class StoreHealth:
    """Whether the store answers. Any thread may read `up`.

    `watchers` get every change, as `(up, cause)`.
    """

    def __init__(self) -> None:
        self.up = True
        self.full = False
        """Whether it is down only because it is out of memory: what needs none still works."""
        self.outages = 0
        """Number of times the store was found to be down."""
        self._mutex = Mutex()
        self._returns = 0
        self._missed = 0
        self._back_since = float("-inf")
        self._late_until = float("-inf")
        self._model = self._new_model()
        self.watchers = Watchers("store")
        self._news: deque[tuple[bool, str]] = deque()
        self._notifying = False
        self._noted: set[str] = set()

    def _new_model(self) -> BreakerModel:
        def pause(opens: int) -> float:
            return _PAUSES(opens + self._returns)

        return BreakerModel(
            BreakerSettings(consecutive=FAILURES, break_for=pause, probe_timeout=5.0)
        )

    def ok(self) -> None:
        """Record that the store has answered in time."""
        if self.up:
            self._model.success(0.0)  # ends the row of failures; nothing else is counted
        else:
            self._missed = 0

    def late(self, seconds: float, began: float) -> None:
        """Record that a call which began at `began` had no answer in `seconds`.

        Concurrent calls met the same moment of slowness and are no row of failures: of those that
        overlap by more than half, one counts.
        """
        with self._mutex:
            if began < self._late_until:
                return
            self._late_until = began + seconds / 2
        self.failed(f"no answer in {seconds:g} s")

    def failed(self, cause: str, *, certain: bool = False, full: bool = False) -> None:
        """Record that the store has failed; `certain`: it reports itself that it is down.

        `full`: it reports that it is out of memory, which is as certain.
        """
        if not self.up:
            with self._mutex:  # stop asking a full store, too, once it does not even answer
                self._missed = 0 if full else self._missed + 1
                self.full = self.full and self._missed < FAILURES
            return
        now = SYSTEM.now()
        with self._mutex:
            if now - self._back_since > STEADY:
                self._returns = 0
            self.full, self._missed = full, 0
            for _ in range(FAILURES if certain or full else 1):
                self._model.settle(self._model.generation, CallVerdict.FAILURE, now)
                if self._model.state is not BreakerState.CLOSED:
                    break
        self._publish(cause)

    def note(self, mistake: str) -> None:
        """Log a failure of one call only: the store answers, so it is up."""
        self.ok()
        if mistake not in self._noted and len(self._noted) < NOTED:
            self._noted.add(mistake)
            logging.getLogger("seawall").error("a question to the store failed: %s", mistake)

    def left(self) -> float:
        """Return how long to wait before the store may be tried again; 0 while it is up."""
        with self._mutex:
            return self._model.retry_after(SYSTEM.now()) or 0.0

    def tried(self, cause: str | None, *, full: bool = False) -> None:
        """Record the result of an attempt to reach a store that is down; None: success."""
        now = SYSTEM.now()
        with self._mutex:
            self.full, self._missed = full, 0
            permit = self._model.admit(now)
            if not isinstance(permit, BreakerRefusal):
                verdict = CallVerdict.SUCCESS if cause is None else CallVerdict.FAILURE
                self._model.settle(permit, verdict, now)
        self._publish(cause or "it answers again")

    def assume_up(self, cause: str) -> None:
        """Let callers try the store themselves again, since nothing else would."""
        with self._mutex:
            self.full = False
            self._model.close(SYSTEM.now())
        self._publish(cause)

    def _publish(self, cause: str) -> None:
        """Notify the watchers, if the store has gone away or come back.

        One thread at a time does so, for all: so watchers get the changes in the order in which
        they happened.
        """
        with self._mutex:
            up = self._model.state is BreakerState.CLOSED
            if up == self.up:
                return
            self.up = up
            self.outages += not up
            if up:
                self._returns += 1
                self._back_since = SYSTEM.now()
            self._news.append((up, cause))
            if self._notifying:
                return
            self._notifying = True
        while True:
            with self._mutex:
                if not self._news:
                    self._notifying = False
                    return
                news = self._news.popleft()
            try:
                self.watchers.notify(*news)
            except BaseException:  # a signal: the next change is published by another thread
                self._notifying = False
                raise

    def after_fork(self) -> None:
        """Start over in a child process; watchers stay."""
        self._mutex = Mutex()
        self.watchers.after_fork()
        self._model = self._new_model()
        self._news.clear()
        self._notifying = False
        self.up = True
        self.full = False
