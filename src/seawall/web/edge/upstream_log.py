"""Responses to the errors of an app, and the log of upstream failures among them.

No other component logs a failure that is answered here.

Promises:

- One line at WARNING for each route and kind of error, at most one per second: the next line says
  how many failures there were in between.
- A line contains the method, the template of the route (never the path, which the caller controls),
  the status, the name of the exception and the first line of its message: truncated, escaped, and
  with URLs reduced to the host, as the rest may contain secrets.
- The stack trace, which shows everything, is added where the logger is set to DEBUG.
- Refusals by Seawall are counted where they are made, and not logged here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from seawall._failures import cause_in, described, reason_of, said_by
from seawall._redaction import printable
from seawall.errors import RateLimited, SeawallError
from seawall.web.asgi_types import Headers
from seawall.web.problems import UPSTREAM, Problem, problem_of
from seawall.web.request import Incoming

PAUSE: Final = 1.0
"""Seconds between two lines of the same route and kind."""

MOST: Final = 256
"""Maximum number of routes and kinds with their own rate; all others share one."""

_OTHERS: Final = ("", "")
_LONGEST: Final = 200
_LONGEST_METHOD: Final = 16


class UpstreamLog:
    """Responses to errors at one edge, and a rate-limited log of upstream failures."""

    def __init__(self, edge: str, now: Callable[[], float]) -> None:
        self._edge = edge
        self._now = now
        self._paces: dict[tuple[str, str], list[Any]] = {}
        """Time of the next permitted line, and number of failures since the last line."""

    def answer(self, incoming: Incoming, error: BaseException) -> tuple[Problem, Headers] | None:
        """Return the response to `error` and its further headers; None if it has to be raised."""
        return self._answer(error, incoming.method, lambda: _route_of(incoming))

    def answer_in(
        self, error: BaseException, method: str, route: str | None
    ) -> tuple[Problem, dict[str, str]] | None:
        """Return the response to `error` and all its headers, for the error hook of a framework.

        `route` is the template of the request's route, as the framework writes it.
        """
        answered = self._answer(error, method, lambda: route)
        if answered is None:
            return None
        problem, more = answered
        headers = {name.decode(): value.decode() for name, value in more}
        return problem, problem.headers() | headers

    def _answer(
        self, error: BaseException, method: str, route: Callable[[], str | None]
    ) -> tuple[Problem, Headers] | None:
        problem = problem_of(error)
        if problem is None:
            return None
        if isinstance(error, RateLimited):
            return problem, list(error.headers)
        if not isinstance(error, SeawallError):
            self._log(problem, error, method, printable(route() or "(no route)", _LONGEST))
        return problem, []

    def _log(self, problem: Problem, error: BaseException, method: str, route: str) -> None:
        """Log `error`, which was answered with `problem`; skip refusals by Seawall."""
        if problem.extensions.get("reason") != UPSTREAM:
            return  # an SDK has wrapped a refusal
        import logging

        log = logging.getLogger("seawall")
        if not log.isEnabledFor(logging.WARNING):
            return
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
            printable(method, _LONGEST_METHOD),
            route,
            problem.status,
            _description_of(error),
            more,
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )


def _route_of(incoming: Incoming) -> str | None:
    """Return the template of the route; without one, the name of the endpoint, if there is one."""
    template, endpoint = incoming.route, incoming.scope.get("endpoint")
    if template is not None or endpoint is None:
        return template
    # As in Starlette's own routes.
    name = getattr(endpoint, "__qualname__", type(endpoint).__qualname__)
    return f"{getattr(endpoint, '__module__', '?')}.{name}"


def _description_of(error: BaseException) -> str:
    """Return a description of `error`, and of its cause if that adds something."""
    text = described(error)
    cause = error.__cause__
    if cause is None or cause_in(error) is not error:  # then `described` includes the cause
        return text
    return text if said_by(cause) in ("", said_by(error)) else f"{text}, by {described(cause)}"
