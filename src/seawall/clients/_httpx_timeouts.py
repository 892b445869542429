"""Timeouts of httpx and httpx2 that end together, when the time of the call is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from seawall.clients._exchange_errors import a_moment
from seawall.clock import Clock

_SENDING: Final = ("connect", "write")
_LEAST: Final = 0.001


class TimeLeft(dict[str, float | None]):
    """Timeouts that are lowered to what is left at the moment when the library asks for one.

    It asks before each step: so all steps together take no longer than `seconds`, and with none
    left nothing is sent. (It asks once for all of the headers, or the body, of an answer: if they
    come in drops, each may take that long.) The first step, the wait for a place in the pool, is
    given up a moment before the others. As a plain dict it holds what they were in the beginning.
    """

    def __init__(
        self,
        own: Mapping[str, float | None],
        seconds: float,
        clock: Clock,
        late: Mapping[str, type[Exception]],
    ) -> None:
        """Lower those of the user's `own` that `late` has an error for."""
        super().__init__(own)
        for part in late:
            known = own.get(part)
            self[part] = seconds if known is None else min(known, seconds)
        self._own = own
        self._late = late
        self._clock = clock
        self._moment = a_moment(seconds)
        self._until: float | None = clock.now() + seconds

    def __getitem__(self, part: str) -> float | None:
        own = self._own.get(part)
        if self._until is None or part not in self._late:
            return own
        left = self._until - self._clock.now()
        if part == "pool":
            left -= self._moment
        elif left <= 0 and part in _SENDING:
            raise self._late[part]("no time is left to send the request")
        left = max(left, _LEAST)
        return left if own is None else min(own, left)

    def get(self, part: str, _default: Any = None) -> Any:
        """Return the timeout for a part, as of now."""
        return self[part]

    def left(self) -> float | None:
        """Return after how many seconds all is to be given up, as of now; None if never."""
        return None if self._until is None else self._until - self._clock.now()

    def relax(self) -> None:
        """Be the user's own from now on."""
        self._until = None


def time_left(request: Any) -> float | None:
    """Return after how many seconds `request` is to be given up; None if never, or unknown."""
    timeouts = None if request is None else request.extensions.get("timeout")
    return timeouts.left() if isinstance(timeouts, TimeLeft) else None


def relax(request: Any, _response: Any) -> None:
    """Leave the rest of a response the timeouts that the user has set."""
    timeouts = request.extensions.get("timeout")
    if isinstance(timeouts, TimeLeft):
        timeouts.relax()
