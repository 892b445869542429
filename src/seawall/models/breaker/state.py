"""State machine of the circuit breaker: when to stop calling a dependency, and how to recover.

`now` is any growing number, in the unit of the settings: seconds, or whole microseconds. Callers
must serialise access; only `calm`, `generation` and `success` may be used without a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

from seawall.models.breaker.probes import CallVerdict, Countdown, Probe, Trial
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.windows import (
    ENDED,
    FAILED,
    SLOW,
    CallCount,
    TimeWindow,
    Tracked,
    Window,
    new_window,
)


class BreakerState(Enum):
    """State of the breaker: admit calls, refuse them, admit probes, or refuse until `close()`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    ISOLATED = "isolated"


class BreakerCause(Enum):
    """Reason for a change of state."""

    TRIPPED = "tripped"
    BREAK_OVER = "break over"
    PROBES_PASSED = "probes passed"
    PROBES_FAILED = "probes failed"
    TRIP = "trip()"
    ISOLATE = "isolate()"
    CLOSE = "close()"


class RemoteCause(Enum):
    """Reason why the state of a shared breaker changes without a cause in this pod."""

    STORE = "reported by the store"


TRANSITIONS: dict[tuple[BreakerState, BreakerCause], BreakerState] = {
    (BreakerState.CLOSED, BreakerCause.TRIPPED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerCause.BREAK_OVER): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerCause.PROBES_PASSED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerCause.PROBES_FAILED): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerCause.TRIP): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerCause.TRIP): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerCause.ISOLATE): BreakerState.ISOLATED,
    (BreakerState.OPEN, BreakerCause.ISOLATE): BreakerState.ISOLATED,
    (BreakerState.HALF_OPEN, BreakerCause.ISOLATE): BreakerState.ISOLATED,
    (BreakerState.OPEN, BreakerCause.CLOSE): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerCause.CLOSE): BreakerState.CLOSED,
    (BreakerState.ISOLATED, BreakerCause.CLOSE): BreakerState.CLOSED,
}
"""All possible changes of state."""


class BreakerChange(NamedTuple):
    """One change of state. `generation` is the one that it started.

    `failure` is the failure that opened the breaker, in the caller's form; None if no call did.
    """

    before: BreakerState
    after: BreakerState
    cause: BreakerCause | RemoteCause
    at: float
    generation: int
    failure: Any = None


class BreakerRefusal(NamedTuple):
    """A refused call. `retry_after` is None where it cannot be known.

    The last two reasons belong to shared breakers: the store has to be asked first ("unknown"), or
    it is unreachable and no call may pass without it ("store").
    """

    reason: Literal["open", "probing", "isolated", "unknown", "store"]
    retry_after: float | None


Ticket: TypeAlias = int | Tracked | Probe
"""An admission. A plain one is just the number of its generation."""

_NO_BREAK = Countdown(0.0, 0.0)
_NO_TRIAL = Trial(0, 0.0)


class BreakerModel:
    """A circuit breaker: call `admit` before each call and `settle` once at its end.

    Every change of state starts a new generation; calls that were admitted in an older one no
    longer change anything. While `calm`, a caller may skip `admit` and use `generation` as its
    ticket, and may report a success of the current generation to `success` instead of `settle`.

    A call counts as slow as soon as it has run for `slow_after`, even if it is still running or is
    cancelled; this is noticed at the next `admit` or `settle`. Each change of state is appended to
    `changes`, for the caller to take away.

    Attempts of one call have one ticket each and share one `CallCount`. The first verdict counts
    immediately and a later one replaces it: the call is in the window once.
    """

    __slots__ = (
        *("_break", "_opened_at", "_opens", "_running", "_streak", "_trial", "_window", "calm"),
        *("changes", "counter", "failure", "generation", "settings", "state", "success"),
    )

    success: Callable[[float], None]  # count a success, as cheaply as these settings allow

    counter: TimeWindow  # to whose current bucket a success may be added: cheaper still

    _window: Window
    _streak: int

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = BreakerState.CLOSED
        self.generation = 1
        self.changes: list[BreakerChange] = []
        self.failure = ""
        self._opened_at: float | None = None  # when the breaker left CLOSED; None while closed
        self._opens = 0
        self._break = _NO_BREAK  # while open
        self._trial = _NO_TRIAL  # while half-open
        self._running: OrderedDict[Tracked, None] = OrderedDict()  # not slow yet, oldest first
        self._count_afresh()

    def __repr__(self) -> str:
        return f"<BreakerModel {self.state.value}, generation {self.generation}>"

    def admit(self, now: float) -> Ticket | BreakerRefusal:
        """Admit a call, or return the reason for the refusal."""
        if self.state is BreakerState.OPEN:
            left = self._break.left(now)
            if left > 0:
                return BreakerRefusal("open", left)
            self._move(BreakerCause.BREAK_OVER, now)
        if self.state is BreakerState.HALF_OPEN:
            self._conclude(self._trial.review(now), now)
        self._notice_slow(now)
        if self.state is BreakerState.HALF_OPEN:
            return self._trial.admit(now) or BreakerRefusal("probing", None)
        if self.state is BreakerState.OPEN:
            return BreakerRefusal("open", self._break.left(now))
        if self.state is BreakerState.ISOLATED:
            return BreakerRefusal("isolated", None)
        if self.settings.slow_after is None:
            return self.generation
        ticket = Tracked(self.generation, now + self.settings.slow_after)
        self._running[ticket] = None
        return ticket

    def settle(
        self, ticket: Ticket, verdict: CallVerdict, now: float, count: CallCount | None = None
    ) -> None:
        """Record how an admitted call ended, or an attempt of the call of `count`."""
        if isinstance(ticket, int):
            # A caller without a lock may have read the generation of a state other than closed.
            if ticket == self.generation and self.state is BreakerState.CLOSED:
                self._take(verdict, now, count)
        elif ticket.generation != self.generation:
            return
        elif isinstance(ticket, Probe):
            slow_after = self.settings.slow_after
            slow = slow_after is not None and now - ticket.started >= slow_after
            if slow and verdict is CallVerdict.SUCCESS:
                verdict = CallVerdict.FAILURE
            self._conclude(self._trial.settle(ticket, verdict, now), now)
        else:
            if count is not None:
                self.continue_call(ticket, count)
            self._notice_slow(now)
            # `_notice_slow` stops at the oldest ticket, whose time may be wrong.
            if ticket in self._running and now >= ticket.slow_at:
                self._count_slow(ticket, now)
            self._running.pop(ticket, None)
            if count is None and ticket.count.window is not None:
                count = ticket.count
            if ticket.generation == self.generation:
                self._take(verdict, now, count)

    def settle_failure(
        self, ticket: Ticket, failure: Any, now: float, count: CallCount | None = None
    ) -> bool:
        """Settle a failed call. Return whether it opened the breaker, and keep it in the change."""
        before = self.generation
        self.settle(ticket, CallVerdict.FAILURE, now, count)
        if self.generation == before or self.state is not BreakerState.OPEN:
            return False
        self.changes = [*self.changes[:-1], self.changes[-1]._replace(failure=failure)]
        return True

    def continue_call(self, ticket: Tracked, count: CallCount) -> None:
        """Treat `ticket` as an attempt of the call of `count`: the call is slow only once."""
        if ticket.count is count:
            return
        own, ticket.count = ticket.count, count
        if own.window is self._window and count.window is not self._window:
            count.window, count.place, count.marks = own.window, own.place, own.marks

    def retract_failure(self, count: CallCount, now: float) -> None:
        """Withdraw the failure of a call that has started to answer. Its end is counted later.

        The streak is reduced only by this failure, not reset: the call has not succeeded yet.
        """
        window = self._window
        marks = count.marks_in(window)
        if self.state is BreakerState.CLOSED and marks & FAILED and not count.over:
            count.mark(window, marks & ~FAILED, now)
            self._streak = max(0, self._streak - 1)

    def trip(self, now: float) -> None:
        """Open, as one failure too many would. Does nothing if open or isolated."""
        if (self.state, BreakerCause.TRIP) in TRANSITIONS:
            self._move(BreakerCause.TRIP, now)

    def isolate(self, now: float) -> None:
        """Refuse every call until `close`."""
        if self.state is not BreakerState.ISOLATED:
            self._move(BreakerCause.ISOLATE, now)

    def close(self, now: float) -> None:
        """Admit calls again and forget all history, even if already closed."""
        if self.state is not BreakerState.CLOSED:
            self._move(BreakerCause.CLOSE, now)
        else:
            self.generation += 1
            self._running.clear()
            self._count_afresh()

    def update(self, settings: BreakerSettings, now: float) -> None:
        """Continue under new settings, in the same state.

        A break or a trial that has begun ends as it began. The window is kept unless its own size
        changed.
        """
        self._notice_slow(now)
        old, self.settings, window = self.settings, settings, self._window
        if settings.slow_after is None or old.slow_after is None:
            self._running.clear()
        else:
            for ticket in self._running:
                ticket.slow_at += settings.slow_after - old.slow_after
        if (settings.window, settings.window_calls) != (old.window, old.window_calls):
            window = self._new_window()
        self._count_in(window)

    def retry_after(self, now: float) -> float | None:
        """Return the remaining time of the break, or None if the breaker is not open."""
        return self._break.left(now) if self.state is BreakerState.OPEN else None

    def open_for(self, now: float) -> float | None:
        """Return the time since the breaker left CLOSED, or None if it is closed."""
        return None if self._opened_at is None else max(0.0, now - self._opened_at)

    def wants_failure(self, _now: float, /) -> bool:
        """Return whether `note_failure` needs every failure, not only the opening one."""
        return False

    def note_failure(self, failure: str, _now: float, /) -> None:
        """Record a description of the failure that opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            self.failure = failure

    def snapshot(self, now: float) -> dict[str, str | float | None]:
        """Return the visible state. The totals are those of the latest closed generation."""
        return {
            "state": self.state.value,
            "generation": self.generation,
            **self._window.totals(now)._asdict(),
            "consecutive_failures": self._streak,
            "consecutive_opens": self._opens,
            "retry_after": self.retry_after(now),
            "open_for": self.open_for(now),
            "failure": self.failure or None,
        }

    def _move(self, cause: BreakerCause, now: float) -> None:
        """Change the state by the table. Only this method does."""
        after = TRANSITIONS[self.state, cause]
        if after is BreakerState.OPEN:
            # If the user's `break_for` function raises, nothing has changed yet.
            self._open(cause, now)
        else:
            opens = 0 if after is BreakerState.CLOSED else self._opens
            self._enter(after, cause, now, opens, self._break)

    def _open(self, cause: BreakerCause, now: float) -> None:
        opens = self._opens + 1
        pause = Countdown(self.settings.break_after(opens), now)
        self._enter(BreakerState.OPEN, cause, now, opens, pause)

    def _enter(
        self,
        after: BreakerState,
        cause: BreakerCause | RemoteCause,
        now: float,
        opens: int,
        pause: Countdown,
    ) -> None:
        """Start a generation in the state `after`, atomically.

        A signal handler may raise wherever a function is called. So everything is created first,
        and the assignments that follow call nothing and have no loop.
        """
        before, generation = self.state, self.generation + 1
        closed = after is BreakerState.CLOSED
        if closed:
            self._count_afresh()  # counts are not used in any other state
        calm = closed and self._is_simple()
        trial = self._new_trial(generation, now) if after is BreakerState.HALF_OPEN else self._trial
        change = BreakerChange(before, after, cause, now, generation)
        running: OrderedDict[Tracked, None] = OrderedDict()
        self.calm = False
        self._break, self._trial, self._running = pause, trial, running
        self._opens = opens
        if closed:
            self._opened_at, self.failure = None, ""
        elif self._opened_at is None:
            self._opened_at = now
        if before is not after:
            self.changes = [*self.changes, change]
        self.state = after
        self.generation = generation
        self.calm = calm

    def _new_trial(self, generation: int, now: float) -> Trial:
        s = self.settings
        timeout = min(s.probe_timeout, s.slow_after or s.probe_timeout)
        return s.probes.begin(generation, timeout, s.failure_ratio or 0.5, now)

    def _conclude(self, shown: CallVerdict, now: float) -> None:
        if shown is CallVerdict.SUCCESS:
            self._move(BreakerCause.PROBES_PASSED, now)
        elif shown is CallVerdict.FAILURE:
            self._move(BreakerCause.PROBES_FAILED, now)

    def _take(self, verdict: CallVerdict, now: float, count: CallCount | None) -> None:
        """Count the verdict of a call, or replace the one that was counted before."""
        window = self._window
        if verdict is CallVerdict.NONE or (count is not None and count.is_final_in(window)):
            return
        before = 0 if count is None else count.marks_in(window)
        failed = verdict is CallVerdict.FAILURE
        if not failed:
            self._streak = 0
        elif self.settings.consecutive is not None and not before & FAILED:
            self._streak += 1
        changed = True
        if count is not None:
            changed = count.mark(window, before & SLOW | (FAILED if failed else 0), now)
        elif failed:
            window.add(FAILED, now)
        else:
            self.success(now)
        if failed and changed:
            self._judge(now)

    def _notice_slow(self, now: float) -> None:
        while self._running:
            oldest = next(iter(self._running))
            if now < oldest.slow_at:
                break
            self._count_slow(oldest, now)

    def _count_slow(self, ticket: Tracked, now: float) -> None:
        del self._running[ticket]
        count, window = ticket.count, self._window
        if count.is_final_in(window):
            return
        if count.mark(window, count.marks_in(window) | SLOW, now):
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Trip if a rule says so."""
        if self._is_bad(now):
            self._move(BreakerCause.TRIPPED, now)

    def _is_bad(self, now: float) -> bool:
        s = self.settings
        if s.consecutive is not None and self._streak >= s.consecutive:
            return True
        if s.min_calls is None:
            return False
        # Divide instead of multiplying: 7 / 100 is 0.07, but 0.07 * 100 is more than 7.
        calls, failures, slow = self._window.totals(now)
        return calls >= s.min_calls and (
            (s.failure_ratio is not None and failures / calls >= s.failure_ratio)
            or (s.slow_ratio is not None and slow / calls >= s.slow_ratio)
        )

    def _new_window(self) -> Window:
        return new_window(self.settings.window, self.settings.window_calls)

    def _count_afresh(self) -> None:
        self._streak = 0
        self._count_in(self._new_window())

    def _count_in(self, window: Window) -> None:
        """Count calls in `window`, successes in the cheapest way that these settings allow."""
        s = self.settings
        counter = self._counter_of(window) if s.consecutive is None else ENDED
        calm = self.state is BreakerState.CLOSED and self._is_simple()
        # Nothing is called from here on; see `_enter`.
        if s.consecutive is None:
            self._streak = 0
            self.success = window.success
        elif s.min_calls is None:
            self.success = self._end_streak
        else:
            self.success = self._count_and_end_streak
        self._window, self.counter = window, counter
        self.calm = calm

    def _counter_of(self, window: Window) -> TimeWindow:
        return window if isinstance(window, TimeWindow) else ENDED

    def _is_simple(self) -> bool:
        """Return whether a call needs no other ticket than its generation while closed."""
        return self.settings.slow_after is None

    def _end_streak(self, _now: float, /) -> None:
        self._streak = 0

    def _count_and_end_streak(self, now: float, /) -> None:
        self._streak = 0
        self._window.success(now)
