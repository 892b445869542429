"""Statistics of calls: counts, recent latency and error rate; numbers of them that are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall._failures import described, reason_of
from seawall._forks import survives_fork
from seawall.errors import TimedOut
from seawall.models.histogram import USUAL, LatencyWindow, Tally

if TYPE_CHECKING:
    from seawall.runtime.layers import Host

FOLD_EVERY: Final = 0.25  # seconds between two folds of raw samples into the histogram

FOLD_AT_MOST: Final = 512
"""Maximum samples used of one fold: at high rates latency is sampled, counts stay exact."""

ENOUGH_SAMPLES: Final = 20  # minimum number of known calls before the typical latency is used
RATE_SPAN: Final = 10.0  # the error rate covers the last 10 to 20 seconds
DESCRIBE_EVERY: Final = 0.1  # seconds for which the text of the last error is reused, by name
MOST_UNREAD: Final = 4096  # samples that are not folded in; beyond it, some of the oldest are lost
REREAD: Final = 0.25  # seconds for which a cached number is good enough


COUNTS: Final = (
    "succeeded",
    "failed",
    "rejected",
    "cancelled",
    "timed_out",
    "retries",
    "degraded",
    "stale",
)
"""Names of the counts that only grow."""


class LastError(NamedTuple):
    """The error of the latest failed attempt, as text: no exception is kept alive."""

    reason: str  # its name, as in events
    text: str
    described_at: float
    at: float
    times: int  # number of failures with this name since one with another name


class Stats:
    """Counts and one histogram. A success costs one append, folded in four times a second."""

    def __init__(self, now: float) -> None:
        survives_fork(self)
        self.began = now
        self.samples: list[float] = []
        self.due = now
        self.watch: Callable[[], None] | None = None
        """Called from inside a call, at the first success and then at most four times a second."""
        self.latency = LatencyWindow()
        self.succeeded = 0
        self.succeeded_blocks = 0  # those that were `hold` blocks, which have no flow around them
        self.failed = 0
        self.rejected = 0
        self.cancelled = 0
        self.timed_out = 0
        self.retries = 0
        self.degraded = 0  # calls with a lesser answer; `stale` of them got an old answer
        self.stale = 0
        self.abandoned = 0  # worker threads whose caller gave up and which still run
        self.waits = Tally()  # waits at gates that then admitted the call
        self.last_error: LastError | None = None
        self._lock = Lock()
        self._cut_off: list[float] = []
        self._quantiles: dict[float, float | None] = {}
        self._tally = Tally()
        self._rate_since = now
        self._rate_base = (0, 0)
        self._rate_previous = (0, 0)
        self._rate_previous_since = now

    def fold(self, now: float) -> None:
        """Move the samples into histogram and counts, from any thread, unless one does so."""
        if self._lock.acquire(blocking=False):
            try:
                self._fold(now)
            finally:
                self._lock.release()

    def fold_in_call(self, now: float) -> None:
        """Fold, and let `watch` inspect the call that has just succeeded."""
        self.fold(now)
        if self.watch is not None:
            self.watch()

    def _fold(self, now: float) -> None:
        self.due = now + FOLD_EVERY
        batch = take_all(self.samples)
        self.succeeded += len(batch)
        stride = -(-len(batch) // FOLD_AT_MOST) or 1
        self.latency.add_all(batch[::stride], now, stride)
        self.latency.add_all(take_all(self._cut_off), now)
        if now - self._rate_since >= RATE_SPAN:
            ended = (self.succeeded, self.failed)
            fresh = now - self._rate_since < 2 * RATE_SPAN
            self._rate_previous = self._rate_base if fresh else ended
            self._rate_previous_since = self._rate_since if fresh else now
            self._rate_base, self._rate_since = ended, now

    def fail(self, error: BaseException | None, now: float) -> None:
        """Count a failed attempt, and remember its error."""
        self.failed += 1
        if error is None:
            return
        # An attempt cut off by one of our timeouts is cancelled; further out it becomes a TimedOut.
        late = not isinstance(error, Exception)
        reason = TimedOut.reason if late else reason_of(error)
        last = self.last_error
        if last is not None and last.reason == reason:
            if 0 <= now - last.described_at < DESCRIBE_EVERY:
                self.last_error = last._replace(at=now, times=last.times + 1)
                return
            times = last.times + 1
        else:
            times = 1
        text = TimedOut.__name__ if late else described(error)
        self.last_error = LastError(reason, text, now, now, times)

    def cut_off(self, elapsed: float) -> None:
        """Record an attempt that ran out of time: it took at least this long."""
        self._cut_off.append(elapsed)

    def quantile(self, p: float, now: float) -> float | None:
        """Return the quantile `p` of recent latency, or None."""
        return self._ask((p,), now)[0]

    def typical(self, now: float) -> float:
        """Return the median of recent latency; 0.0 while there are too few samples."""
        median = self.quantile(0.5, now)
        return 0.0 if median is None or self.latency.count < ENOUGH_SAMPLES else median

    def tally(self, now: float) -> Tally:
        """Return the durations of all attempts that succeeded or timed out, by bucket."""
        if self._lock.acquire(blocking=False):
            try:
                self._fold(now)
                self._tally = self.latency.tally(now)
            finally:
                self._lock.release()
        return self._tally

    def _ask(self, shares: tuple[float, ...], now: float) -> list[float | None]:
        # In the middle of a fold (a signal handler, a finaliser) the last known values are read.
        if self._lock.acquire(blocking=False):
            try:
                self._fold(now)
                known = self.latency.quantiles(shares, now)
                self._quantiles.update(zip(shares, known, strict=True))
            finally:
                self._lock.release()
        return [self._quantiles.get(p) for p in shares]

    def error_rate(self, now: float) -> float:
        """Return the share of recent attempts that failed."""
        succeeded, failed = self.recent(now)
        return failed / (succeeded + failed) if failed else 0.0

    def recent(self, now: float) -> tuple[int, int]:
        """Return how many recent attempts succeeded and failed."""
        self.fold(now)
        return self.succeeded - self._rate_previous[0], self.failed - self._rate_previous[1]

    def recent_rate(self, now: float) -> float:
        """Return how many recent attempts there were a second."""
        ended = sum(self.recent(now))
        seconds = now - self._rate_previous_since
        return ended / seconds if seconds > 0 else 0.0

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return all counts, the error rate, p50, p95, p99 of recent latency, and histograms."""
        p50, p95, p99 = self._ask(USUAL, now)
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "abandoned": self.abandoned,
            "error_rate": self.error_rate(now),
            "last_error": last_error_of([self], now),
            "p50": p50,
            "p95": p95,
            "p99": p99,
            "histogram": self.tally(now).snapshot(),
            "waits": self.waits.snapshot(),
        }

    def _after_fork(self) -> None:
        self._lock = Lock()
        self.abandoned = 0


def last_error_of(stats: Iterable[Stats], now: float) -> dict[str, Any] | None:
    """Return the latest error of some guards, as in a snapshot; None if there was none."""
    known = [one.last_error for one in stats if one.last_error is not None]
    if not known:
        return None
    last = max(known, key=lambda one: one.at)
    age = max(0.0, now - last.at)
    return {"reason": last.reason, "text": last.text, "age": age, "count": last.times}


def take_all(samples: list[float]) -> list[float]:
    """Empty a list that other threads append to at the same time."""
    taken = samples[:]
    del samples[: len(taken)]
    return taken


CachedNumber = Callable[[float], float | None]  # takes `now`; None without enough samples


def cached(read: CachedNumber) -> CachedNumber:
    """Return `read` with its result kept for `REREAD` seconds. Two threads may read at once."""
    due = float("-inf")
    value: float | None = None

    def number(now: float) -> float | None:
        nonlocal due, value
        if now >= due:
            due = now + REREAD
            value = read(now)
        return value

    return number


def service_time(host: Host, quantile: float = 0.5) -> CachedNumber:
    """Return a cached `quantile` of the guard's latency; it is None if unknown."""
    return cached(lambda now: host.stats.quantile(quantile, now))


class ResponseTimes:
    """How long calls took from this gate on, waits included; folded when it is read."""

    def __init__(self, window: float) -> None:
        self.samples: list[float] = []
        self._latency = LatencyWindow(window)
        self._lock = Lock()
        survives_fork(self)

    def add(self, seconds: float) -> None:
        """Record the duration of a call."""
        samples = self.samples
        samples.append(seconds)
        if len(samples) > MOST_UNREAD:  # not read for a long time, and need not be
            del samples[: MOST_UNREAD // 2]

    def quantile(self, p: float) -> CachedNumber:
        """Return a cached quantile `p` of the durations; None without samples."""
        known: list[float | None] = [None]

        def read(now: float) -> float | None:
            # If another thread is folding already, the last known value is good enough.
            if self._lock.acquire(blocking=False):
                try:
                    self._latency.add_all(take_all(self.samples), now)
                    known[0] = self._latency.quantile(p, now)
                finally:
                    self._lock.release()
            return known[0]

        return cached(read)

    def _after_fork(self) -> None:
        self._lock = Lock()
