"""A request at the edge and the gates that it holds, the same for ASGI and WSGI.

Promise: every gate that was entered is left exactly once, with the outcome of the response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from seawall.runtime.call import STREAMED
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED, Outcome
from seawall.web.asgi_types import Headers
from seawall.web.problems import FAILURE
from seawall.web.request import Incoming

if TYPE_CHECKING:
    from seawall.runtime.stats import Stats
    from seawall.web.edge.dispatch import Dispatch
    from seawall.web.limits import Granted
    from seawall.web.trust import Trust


class ServerError(Exception):
    """Failure reported to gates for a response of 500 or more that the app sent itself."""


_SERVER_ERROR: Final = ServerError("the app answered with 500 or more")


class EdgeState:
    """State shared by all requests of one edge."""

    __slots__ = ("clock", "dispatch", "stats", "trust")

    def __init__(
        self,
        clock: Callable[[], float],
        stats: Stats,
        trust: Trust,
        dispatch: Dispatch | None = None,
    ) -> None:
        self.clock = clock
        self.stats = stats
        self.trust = trust
        self.dispatch = dispatch


class HeldRequest(Incoming):
    """One request in the edge: the gates it holds, and the progress of its response."""

    __slots__ = (
        "_edge",
        "answered_at",  # when the first part of the body was sent
        "began",  # when the edge started to serve it
        "entered",  # whether it has passed all gates
        "gates",  # gates to leave at the end of the response, the last entered first, with tickets
        "granted",  # what it took from the limits
        "left",  # whether all gates were left
        "more_headers",  # function that returns headers to add to the response, or None
        "status",  # status of the response, once it has started
    )
    _edge: EdgeState
    answered_at: float
    began: float
    entered: bool
    gates: tuple[tuple[Any, Any], ...]
    granted: Granted | None
    left: bool
    more_headers: Callable[[], Headers] | None
    status: int

    @property
    def _dispatch(self) -> Dispatch | None:
        """Lookup of the route in the router of the edge's app; None without a router."""
        return self._edge.dispatch

    @property
    def _judged(self) -> bool:
        """Whether the outcome of the request was reported to the gates already."""
        return False

    @property
    def has_started(self) -> bool:
        """Whether the response has started: no other one can be sent any more."""
        return self.status > 0

    def add_headers(self, more: Callable[[], Headers]) -> None:
        """Add the headers that `more()` returns to whichever response is sent."""
        outer = self.more_headers
        self.more_headers = more if outer is None else lambda: [*outer(), *more()]

    def verdict(self) -> tuple[Outcome, object]:
        """Return the outcome to report to gates, by the status of the response."""
        return (OK, STREAMED) if self.status < FAILURE else (FAILED, _SERVER_ERROR)

    def leave(self, outcome: Outcome, detail: object) -> None:
        """Leave the held gates and count the request; later calls do nothing."""
        if self.left:
            return
        edge = self._edge
        now = self.answered_at or edge.clock()
        self.left = True
        judged = self._judged
        for gate, ticket in self.gates:
            gate.leave(ticket, UNUSED if judged else outcome, detail, now)
        stats = edge.stats
        if outcome is OK:
            stats.samples.append(now - self.began)
            if now >= stats.due:
                stats.fold(now)
        elif outcome is FAILED:
            stats.fail(detail if isinstance(detail, BaseException) else None, now)
        else:
            stats.cancelled += 1

    def give_back(self, error: BaseException | None) -> None:
        """Leave the gates of a request that was refused further in, as if it had never come."""
        if not self.entered:
            self.more_headers = None
            if self.granted is not None:
                self.granted.cancel()
        if not self.left:
            self.left = True
            now = self._edge.clock()
            for gate, ticket in self.gates:
                gate.leave(ticket, UNUSED, error, now)

    def end(self, error: BaseException | None) -> None:
        """Leave the gates that are still held when the app has ended, with `error` or without."""
        if self.left:
            return
        failed = isinstance(error, Exception) and not is_gone(error, started=self.status > 0)
        # Without an exception the app returned in mid-body because the client had disconnected:
        # neither success nor failure.
        self.leave(FAILED if failed else CANCELLED, error)


def is_gone(error: BaseException, *, started: bool) -> bool:
    """Return whether `error` means that the client disconnected."""
    return type(error).__name__ == "ClientDisconnect" or (started and isinstance(error, OSError))
