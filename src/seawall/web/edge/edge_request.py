"""A request at the edge and the gates that it holds, the same for ASGI and WSGI.

Promise: every gate that was entered is left exactly once, with the outcome of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from seawall.events import CallDegraded
from seawall.runtime.call import STREAMED
from seawall.runtime.degradation import degradations
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED, Outcome
from seawall.web.asgi_types import Headers
from seawall.web.problems import FAILURE
from seawall.web.request import Incoming
from seawall.wire.structured import integer, string

if TYPE_CHECKING:
    from seawall.web.edge.core import EdgeCore
    from seawall.web.edge.dispatch import Dispatch
    from seawall.web.limits import LimitGrant


class ServerError(Exception):
    """Failure reported to gates for a response of 500 or more that the app sent itself."""


MOST_SOURCES: Final = 16
"""Maximum number of sources that the report of a degraded response names."""
LONGEST_SOURCE: Final = 64
"""Maximum number of characters of a source's name."""

_SERVER_ERROR: Final = ServerError("the app answered with 500 or more")


class EdgeRequest(Incoming):
    """One request in the edge: the gates it holds, and the progress of its response."""

    __slots__ = (
        "_edge",
        "admitted",  # whether it has passed all gates
        "body_started_at",  # when the first part of the body was sent
        "extra_headers",  # function that returns headers to add to the response, or None
        "gates",  # gates to leave at the end of the response, the last entered first, with tickets
        "granted",  # what it took from the limits
        "has_left",  # whether all gates were left
        "started_at",  # when the edge started to serve it
        "status",  # status of the response, once it has started
    )
    _edge: EdgeCore
    admitted: bool
    body_started_at: float
    extra_headers: Callable[[], Headers] | None
    gates: tuple[tuple[Any, Any], ...]
    granted: LimitGrant | None
    has_left: bool
    started_at: float
    status: int

    @property
    def _dispatch(self) -> Dispatch | None:
        return self._edge._dispatch

    @property
    def _is_outcome_known(self) -> bool:
        """Whether the outcome of the request was reported to the gates already."""
        return False

    @property
    def has_response_started(self) -> bool:
        """Whether the response has started: no other one can be sent any more."""
        return self.status > 0

    def add_headers(self, more: Callable[[], Headers]) -> None:
        """Add the headers that `more()` returns to whichever response is sent."""
        outer = self.extra_headers
        self.extra_headers = more if outer is None else lambda: [*outer(), *more()]

    @contextmanager
    def report_degradations(self, header: str) -> Iterator[None]:
        """Name what is degraded before the response of the app starts, in its `header`."""
        with degradations() as seen:

            def report() -> Headers:
                if not seen or self.has_left:  # in the edge's own response nothing is degraded
                    return []
                return [(header.lower().encode("ascii"), write_degraded(seen).encode("ascii"))]

            self.add_headers(report)
            yield

    def verdict(self) -> tuple[Outcome, object]:
        """Return the outcome to report to gates, by the status of the response."""
        return (OK, STREAMED) if self.status < FAILURE else (FAILED, _SERVER_ERROR)

    def leave(self, outcome: Outcome, detail: object) -> None:
        """Leave the held gates and count the request; later calls do nothing."""
        if self.has_left:
            return
        edge = self._edge
        now = self.body_started_at or edge._now()
        self.has_left = True
        reported = UNUSED if self._is_outcome_known else outcome
        for gate, ticket in self.gates:
            gate.leave(ticket, reported, detail, now)
        stats = edge._stats
        if outcome is OK:
            stats.samples.append(now - self.started_at)
            if now >= stats.due:
                stats.fold(now)
        elif outcome is FAILED:
            stats.fail(detail if isinstance(detail, BaseException) else None, now)
        else:
            stats.cancelled += 1

    def give_back(self, error: BaseException | None) -> None:
        """Leave the gates of a request that was refused further in, as if it had never come."""
        if not self.admitted:
            self.extra_headers = None
            if self.granted is not None:
                self.granted.cancel()
        if not self.has_left:
            self.has_left = True
            now = self._edge._now()
            for gate, ticket in self.gates:
                gate.leave(ticket, UNUSED, error, now)

    def end(self, error: BaseException | None) -> None:
        """Leave the gates that are still held when the app has ended, with `error` or without."""
        if self.has_left:
            return
        # Neither success nor failure if the client has disconnected. Without an exception the app
        # returned in mid-body because of that.
        is_client_gone = type(error).__name__ == "ClientDisconnect" or (
            self.status > 0 and isinstance(error, OSError)
        )
        has_failed = isinstance(error, Exception) and not is_client_gone
        self.leave(FAILED if has_failed else CANCELLED, error)


def write_degraded(seen: Iterable[CallDegraded]) -> str:
    """Return the value of a header that names each source and level once, in order.

    Callers see nothing of the errors behind it. Characters that a structured field cannot contain
    are replaced.
    """
    entries = dict.fromkeys(
        f"{string(less.source[:LONGEST_SOURCE])};level={integer(less.level)}" for less in seen
    )
    return ", ".join([*entries][:MOST_SOURCES])
