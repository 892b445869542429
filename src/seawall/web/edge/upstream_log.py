"""What the log says of an upstream's failure that the edge has answered: nobody else will tell.

Promises: one line at WARNING for each route and kind of error, and no more than one a second of
them: the next says how many there were in between. It says the method, the template of the route
(never the path, which is the caller's text), the status, the name of the error and the first line
of what that says: cut, escaped, and of the addresses in it no more than the host, as the rest may
hide secrets. The stack, which shows all of it, is there where the logger is set to DEBUG. Refusals
of Seawall's are counted where they are made, and nothing is said of them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from seawall._failures import cause_in, described, reason_of, said_by
from seawall._redaction import printable
from seawall.web.problems import UPSTREAM, Problem
from seawall.web.request import Incoming

PAUSE: Final = 1.0
"""Seconds between two lines of the same route and kind."""

MOST: Final = 256
"""Routes and kinds that have a pace of their own; all beyond them have one together."""

_OTHERS: Final = ("", "")
_LONGEST: Final = 200
_LONGEST_METHOD: Final = 16


class UpstreamLog:
    """The pace at which one edge tells of upstreams that failed."""

    __slots__ = ("_edge", "_now", "_paces")

    def __init__(self, edge: str, now: Callable[[], float]) -> None:
        """Speak for the edge of this name, by its clock."""
        self._edge = edge
        self._now = now
        self._paces: dict[tuple[str, str], list[Any]] = {}
        """When the next line may come, and how many failures there were since the last."""

    def note(self, incoming: Incoming, problem: Problem, error: BaseException) -> None:
        """Tell of `error`, to which `incoming` got `problem`; not if it is a refusal of ours."""
        if problem.extensions.get("reason") != UPSTREAM:
            return  # an SDK has wrapped one
        import logging

        log = logging.getLogger("seawall")
        if not log.isEnabledFor(logging.WARNING):
            return
        route = _route_of(incoming)
        key = (route, reason_of(error))
        if key not in self._paces and len(self._paces) >= MOST:
            key = _OTHERS
        pace = self._paces.setdefault(key, [float("-inf"), 0])
        now = self._now()
        if now < pace[0]:
            pace[1] += 1
            return
        more = f" ({pace[1]} more since the last such line)" if pace[1] else ""
        pace[:] = [now + PAUSE, 0]
        log.warning(
            "edge %r: %s %s is answered with %d, as an upstream failed: %s%s",
            self._edge,
            printable(incoming.method, _LONGEST_METHOD),
            route,
            problem.status,
            _told_of(error),
            more,
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )


def _route_of(incoming: Incoming) -> str:
    """Return the template of the route; where there is none, the name of what serves it."""
    template = incoming.route
    if template is None:  # as in Starlette's own routes
        endpoint = incoming.scope.get("endpoint")
        if endpoint is None:
            return "(no route)"
        name = getattr(endpoint, "__qualname__", type(endpoint).__qualname__)
        template = f"{getattr(endpoint, '__module__', '?')}.{name}"
    return printable(template, _LONGEST)


def _told_of(error: BaseException) -> str:
    """Return what `error` is and says; and its cause, if that says more."""
    told = described(error)
    cause = error.__cause__
    if cause is None or cause_in(error) is not error:  # then `described` has told the cause
        return told
    return told if said_by(cause) in ("", said_by(error)) else f"{told}, by {described(cause)}"
