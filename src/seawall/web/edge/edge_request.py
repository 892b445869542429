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
    from seawall.web.limits import Granted


class ServerError(Exception):
    """Failure reported to gates for a response of 500 or more that the app sent itself."""


MOST_SOURCES: Final = 16
"""Maximum number of sources that the report of a degraded response names."""
LONGEST_SOURCE: Final = 64
"""Maximum number of characters of a source's name."""

_SERVER_ERROR: Final = ServerError("the app answered with 500 or more")


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
    _edge: EdgeCore
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
        return self._edge._dispatch

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

    @contextmanager
    def reporting(self, header: str) -> Iterator[None]:
        """Name what is degraded before the response of the app starts, in its `header`."""
        with degradations() as seen:

            def report() -> Headers:
                if not seen or self.left:  # in the edge's own response nothing is degraded
                    return []
                return [(header.lower().encode("ascii"), write_degraded(seen).encode("ascii"))]

            self.add_headers(report)
            yield

    def verdict(self) -> tuple[Outcome, object]:
        """Return the outcome to report to gates, by the status of the response."""
        return (OK, STREAMED) if self.status < FAILURE else (FAILED, _SERVER_ERROR)

    def leave(self, outcome: Outcome, detail: object) -> None:
        """Leave the held gates and count the request; later calls do nothing."""
        if self.left:
            return
        edge = self._edge
        now = self.answered_at or edge._now()
        self.left = True
        judged = self._judged
        for gate, ticket in self.gates:
            gate.leave(ticket, UNUSED if judged else outcome, detail, now)
        stats = edge._stats
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
            now = self._edge._now()
            for gate, ticket in self.gates:
                gate.leave(ticket, UNUSED, error, now)

    def end(self, error: BaseException | None) -> None:
        """Leave the gates that are still held when the app has ended, with `error` or without."""
        if self.left:
            return
        # Neither success nor failure if the client has disconnected. Without an exception the app
        # returned in mid-body because of that.
        gone = type(error).__name__ == "ClientDisconnect" or (
            self.status > 0 and isinstance(error, OSError)
        )
        self.leave(FAILED if isinstance(error, Exception) and not gone else CANCELLED, error)


def write_degraded(seen: Iterable[CallDegraded]) -> str:
    """Return the value of a header that names each source and level once, in order.

    Callers see nothing of the errors behind it. Characters that a structured field cannot contain
    are replaced.
    """
    entries = dict.fromkeys(
        f"{string(less.source[:LONGEST_SOURCE])};level={integer(less.level)}" for less in seen
    )
    return ", ".join([*entries][:MOST_SOURCES])
