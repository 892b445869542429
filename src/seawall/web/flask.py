"""Seawall in a Flask app: one line for the whole app, a decorator for a view or a blueprint.

    edge = protect(app)

puts the WSGI edge around the app: deadlines, overload protection, limits, health and draining. It
also registers error handlers, as Flask answers every exception of a view by itself: exceptions of
Seawall and of upstreams become problem+json with the right status. A handler of your own for one of
them is more specific, and comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

try:
    from flask import Blueprint, Flask, Response, after_this_request, current_app, request
    from werkzeug.exceptions import ClientDisconnected, HTTPException
except ImportError as error:
    raise ImportError("seawall.web.flask needs Flask: pip install 'seawall[flask]'") from error

from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.web.edge.core import DEFAULT
from seawall.web.edge.edge_request import EdgeRequest
from seawall.web.edge.inbound import Classify
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import LimitGrant, RequestLimit, RequestLimits
from seawall.web.problems import FAILURE, ClientGone, failure_in
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust
from seawall.web.wsgi import Edge, QueueAdmission
from seawall.web.wsgi.wsgi_request import incoming_of, text_headers

__all__ = ["guarded", "limited", "protect"]

T = TypeVar("T", bound=Callable[..., Any] | Blueprint)
F = TypeVar("F", bound=Callable[..., Any])


def protect(
    app: Flask,
    *,
    name: str | None = None,
    timeout: float | None = 30.0,
    reserve: float | None = None,
    trust: Trust | None = None,
    classify: Classify | None = None,
    limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None = None,
    shed: Shed | None = None,
    queue_admission: QueueAdmission | None = DEFAULT,
    concurrency: AdaptiveLimit | Bulkhead | None = None,
    routes: Mapping[str, AdaptiveLimit | Bulkhead] | None = None,
    health: Health | None = DEFAULT,
    lifecycle: Lifecycle | None = DEFAULT,
    report_degraded: bool | str = False,
) -> Edge:
    """Put the edge around `app` and return it; call this once, where the app is made.

    The arguments and defaults are those of `seawall.web.wsgi.Edge`. A template in `routes` is
    written as for other apps: "/orders/{id}" for the rule "/orders/<id>".
    """
    parts: Any = {part: given for part, given in locals().items() if part != "app"}
    if not isinstance(app, Flask):
        raise TypeError(f"protect({app!r}): pass a Flask app; others take seawall.web.wsgi.Edge")
    if "seawall" in app.extensions:
        raise RuntimeError("protect(): this app has an edge already")
    edge = Edge(app.wsgi_app, **parts)
    handle = app.handle_exception

    def answer(error: Exception) -> Any:
        """Answer an exception of Seawall or of an upstream; None if it is neither."""
        answered = edge._upstream_log.answer(_incoming(), error)
        if answered is None:
            return None
        problem, more = answered
        headers, body = problem.response(more)
        return Response(body, problem.status, text_headers(headers))

    def handle_exception(error: Exception) -> Any:
        """Answer the failure of an upstream; leave everything else to Flask."""
        response = answer(error)
        if response is None:
            return handle(error)
        return app.finalize_request(response, from_error_handler=True)

    app.register_error_handler(SeawallError, answer)
    app.handle_exception = handle_exception  # type: ignore[method-assign, assignment]
    app.wsgi_app = edge  # type: ignore[method-assign]
    app.extensions["seawall"] = edge
    return edge


def limited(*limits: RequestLimit, **options: Any) -> Callable[[T], T]:
    """Return a decorator that gives a view its own limits, in addition to those of the edge.

    Put it below the route. It takes the arguments of `RequestLimits`, as in
    `@limited(RequestLimit("10/min", by="address"))`. Called with a blueprint, before that is
    registered, it gives the limits to all views of the blueprint together.
    """
    own = RequestLimits(*limits, **options)

    def admit() -> None:
        _report_limits(own.admit(_incoming()))

    def decorate(target: T) -> T:
        if isinstance(target, Blueprint):
            target.before_request(admit)
            return target
        _check_view("limited", target)

        @wraps(target)
        def view(*args: Any, **kwargs: Any) -> Any:
            admit()
            return current_app.ensure_sync(target)(*args, **kwargs)

        return view  # type: ignore[return-value]

    return decorate


def guarded(guard: Guard) -> Callable[[F], F]:
    """Return a decorator that holds the gates of `guard` while a view runs; put it below the route.

    Breaker, rate limit, bulkhead and shedder apply; retries and timeouts are for calls, and need
    the guard around a function. A `key=` function of a gate gets the request. An error of the
    caller (an HTTPException below 500) is not a failure of the view, and a client that disconnects
    is neither success nor failure.
    """
    if not isinstance(guard, Guard):
        raise TypeError(f"guarded({guard!r}): pass a Guard, such as Guard('reports', Bulkhead(5))")

    def decorate(target: F) -> F:
        _check_view("guarded", target)

        @wraps(target)
        def view(*args: Any, **kwargs: Any) -> Any:
            hold = guard.hold(_incoming())
            hold.__enter__()
            try:
                result = current_app.ensure_sync(target)(*args, **kwargs)
            except BaseException as error:
                hold.__exit__(None, _verdict(error), None)
                raise
            hold.__exit__(None, None, None)
            return result

        return view  # type: ignore[return-value]

    return decorate


def _check_view(name: str, target: object) -> None:
    if isinstance(target, type) or not callable(target):
        raise TypeError(f"@{name}(...): {target!r} is no view; write it above a function")


def _verdict(error: BaseException) -> BaseException | None:
    """Return the failure to report to gates for a view that raised `error`; None for a success."""
    if isinstance(error, ClientDisconnected):
        return ClientGone()
    if isinstance(error, HTTPException):
        return error if (error.code or FAILURE) >= FAILURE else None
    return failure_in(error)


def _incoming() -> Incoming:
    """Return the current request as the edge sees it, with its route.

    Its peer is trusted as far as the edge trusts it; without an edge, not at all.
    """
    known: Incoming | None = request.environ.get(INCOMING)
    incoming = incoming_of(request.environ) if known is None else known
    if request.url_rule is not None:
        incoming.scope["route"] = SimpleNamespace(path=request.url_rule.rule)
    return incoming


def _report_limits(granted: LimitGrant) -> None:
    """Add the headers of a view's limits to any response that the view returns or raises."""
    held = request.environ.get(INCOMING)
    if isinstance(held, EdgeRequest):
        held.add_headers(granted.headers)
        return

    def with_headers(response: Response) -> Response:
        for name, value in text_headers(granted.headers()):
            response.headers.add(name, value)
        return response

    after_this_request(with_headers)
