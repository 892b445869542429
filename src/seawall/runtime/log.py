"""Lines of the log on the logger `seawall`: bounded, redacted, and never an error of the caller's.

Promises: a failure of a handler is a line with its traceback at each attempt (WARNING) and at its
end (ERROR); in a flood some are left out, and the next line says how many. The text of the
traceback is redacted; `exc_info` of the record is the error itself, for tools that read it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from threading import Lock
from typing import Final

from seawall._failures import described, reason_of, traceback_of
from seawall._redaction import printable, safe_line
from seawall.clock import Clock
from seawall.runtime.mutex import survives_fork

MOST_SORTS: Final = 1000
"""Sorts of lines that are bounded each by itself; all others are bounded together."""

FAILURES_PER_SECOND: Final = 5.0
FAILURES_AT_ONCE: Final = 50
"""Lines about failed attempts of one worker, of each level; further ones are counted."""

LONGEST_WHAT: Final = 200


class LineBound:
    """A token bucket for each sort of line. Of any thread."""

    def __init__(self, per_second: float, burst: int, clock: Clock) -> None:
        """Let `burst` lines of a sort through at once, and then `per_second`."""
        self._rate = per_second
        self._burst = float(burst)
        self._clock = clock
        self._buckets: dict[Hashable, tuple[float, float, int]] = {}
        self._lock = Lock()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._lock = Lock()  # another thread may have held it

    def left_out(self, sort: Hashable) -> int | None:
        """Return how many were left out before this one; None if it is left out itself."""
        with self._lock:
            now = self._clock.now()
            if sort not in self._buckets and len(self._buckets) >= MOST_SORTS:
                sort = None
            tokens, since, left_out = self._buckets.get(sort, (self._burst, now, 0))
            tokens = min(self._burst, tokens + max(0.0, now - since) * self._rate)
            if tokens < 1:
                self._buckets[sort] = tokens, now, left_out + 1
                return None
            self._buckets[sort] = tokens - 1, now, 0
            return left_out


class FailureLog:
    """What a worker logs of the jobs, calls or events whose handler failed."""

    def __init__(self, kind: str, name: str, clock: Clock) -> None:
        """Speak for the `kind` ("queue", "jobs", "outbox"...) of that name."""
        self._kind = kind
        self._name = printable(name, LONGEST_WHAT)
        self._bound = LineBound(FAILURES_PER_SECOND, FAILURES_AT_ONCE, clock)

    def failed(
        self, what: str, id_: str, attempt: int, error: object, *, delay: float, dead: bool
    ) -> None:
        """Log that an attempt failed; `delay` is the pause before the next, unless it is `dead`.

        `what` says what was tried ("job 7"), `id_` is its id. Never raises.
        """
        level = logging.ERROR if dead else logging.WARNING
        logger = logging.getLogger("seawall")
        if not logger.isEnabledFor(level) or (left_out := self._bound.left_out(level)) is None:
            return
        raised = error if isinstance(error, BaseException) else None
        said = safe_line(str(error)) if raised is None else described(raised)
        after = "given up" if dead else f"tried again in {delay:.3g} s"
        more = f" ({left_out} more were left out)" if left_out else ""
        extra = {
            f"seawall_{self._kind}": self._name,
            "seawall_id": printable(id_, LONGEST_WHAT),
            "seawall_attempt": attempt,
            "seawall_reason": said if raised is None else reason_of(raised),
        }
        text = "%s %r: %s failed at attempt %d, %s: %s%s"
        args = (self._kind, self._name, printable(what, LONGEST_WHAT), attempt, after, said, more)
        try:
            file, line, function, _ = logger.findCaller(stacklevel=2)
            info = None if raised is None else (type(raised), raised, raised.__traceback__)
            record = logger.makeRecord(
                logger.name, level, file, line, text, args, info, function, extra
            )
            if raised is not None:
                record.exc_text = traceback_of(raised) or said  # what formatters write
            logger.handle(record)
        except Exception:  # noqa: BLE001, S110 - a handler of the user's that raises
            pass
