"""Seawall in a FastAPI or Starlette app: one line for the whole app, dependencies for a route.

    edge = protect(app)

puts the edge around the app: deadlines, overload protection, limits, health and draining, every
refusal as problem+json, and all of it in the app's OpenAPI description. A route's own limit or
guard is a dependency: `Depends(limited(RequestLimit("10/min", by="address")))`,
`Depends(guarded(reports))`.

The edge wraps the app's own error handling: exceptions without a handler in the app reach the edge,
which answers those of Seawall and of upstreams. Apps that are mounted in the app when it starts get
the same behaviour.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Final

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException, WebSocketException
    from starlette.requests import ClientDisconnect, HTTPConnection
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.websockets import WebSocketDisconnect
except ImportError as error:
    raise ImportError("seawall.web.fastapi needs Starlette: pip install 'seawall[web]'") from error

from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.web.asgi_types import App, Message, Receive, Scope, Send
from seawall.web.edge import Edge
from seawall.web.edge.asgi_request import AsgiRequest
from seawall.web.edge.core import DEFAULT
from seawall.web.edge.dispatch import Dispatch, behind
from seawall.web.edge.edge import default_edge
from seawall.web.edge.inbound import Classify
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.edge.websockets import WebsocketResponse
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import LimitGrant, RequestLimit, RequestLimits
from seawall.web.openapi import describing
from seawall.web.problems import FAILURE, ClientGone, failure_in, send_problem
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust

__all__ = ["guarded", "limited", "protect"]


def protect(
    app: Starlette,
    *,
    name: str | None = None,
    timeout: float | None = 30.0,
    reserve: float | None = None,
    trust: Trust | None = None,
    classify: Classify | None = None,
    limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None = None,
    shed: Shed | None = None,
    loop_admission: LoopAdmission | None = DEFAULT,
    concurrency: AdaptiveLimit | Bulkhead | None = DEFAULT,
    routes: Mapping[str, AdaptiveLimit | Bulkhead] | None = None,
    websockets: Bulkhead | None = DEFAULT,
    websockets_per_address: int | None = DEFAULT,
    stall: float | None = 30.0,
    health: Health | None = DEFAULT,
    lifecycle: Lifecycle | None = DEFAULT,
    report_degraded: bool | str = False,
) -> Edge:
    """Put the edge around `app` and return it; call this once, before the app has started.

    The defaults: 30 s for each request, an adaptive limit on concurrent requests, 2000 websockets
    (half of them for one address, unless you give `websockets`), `/health/live`, `/health/ready`
    and `/health/deep`, draining at the end, problem+json for every exception of Seawall, no trusted
    callers, no rate limits. Each part can be replaced, or left out with None.

    A request withholds `reserve` seconds of its time from the calls of its handler (by default a
    tenth, 10 ms to 0.5 s), so that the handler can still answer when one of them times out.
    `classify(incoming)` gives a request its criticality, its tier (as text) or both (`Rank`).
    `report_degraded=True` names degraded results, by source and level, in a response header. `name`
    is the name of the guard: by default "edge", or "edge 2" and so on if that is taken. Middlewares
    that are added later wrap the edge: CORS belongs there.
    """
    parts: Any = {part: given for part, given in locals().items() if part != "app"}
    if not isinstance(app, Starlette):
        raise TypeError(f"protect({app!r}): pass a FastAPI or Starlette app; others take Edge(app)")
    if any(getattr(known, "cls", None) is _around for known in app.user_middleware):
        raise RuntimeError("protect(): this app has an edge already")
    if app.middleware_stack is not None:
        raise RuntimeError("protect(): the app has started already; call this where it is made")
    edge = default_edge(_not_started, **parts)
    edge._dispatch = Dispatch(app)
    app.add_middleware(_around, edge=edge, owner=app)
    openapi = getattr(app, "openapi", None)
    if openapi is not None:
        app.openapi = describing(openapi)  # type: ignore[attr-defined]  # as FastAPI advises
    return edge


def limited(*limits: RequestLimit, **options: Any) -> Callable[..., Awaitable[None]]:
    """Return a dependency that gives a route its own limits, in addition to those of the edge.

    It takes the arguments of `RequestLimits`, as in
    `Depends(limited(RequestLimit("10/min", by="address")))`. It runs after routing and before the
    route's function.
    """
    own = RequestLimits(*limits, **options)

    async def limited(connection: HTTPConnection, response: Response) -> None:
        incoming = _incoming_of(connection)
        granted = await own.aadmit(incoming) if own.uses_store else own.admit(incoming)
        _report_limits(connection, response, granted)

    return limited


def guarded(guard: Guard) -> Callable[..., Awaitable[None]]:
    """Return a dependency that holds the gates of `guard` while a route's function runs.

    Breaker, rate limit, bulkhead and shedder apply; retries and timeouts are for calls, and need
    the guard around a function. A `key=` function of a gate gets the request. An error of the
    caller (an HTTPException below 500, a request that does not validate) is not a failure of the
    route, and a client that disconnects is neither success nor failure.
    """
    if not isinstance(guard, Guard):
        raise TypeError(f"guarded({guard!r}): pass a Guard, such as Guard('reports', Bulkhead(5))")
    try:
        from fastapi import Depends
        from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
    except ImportError as error:
        advice = "is a dependency of FastAPI's: pip install 'seawall[fastapi]'"
        raise ImportError(f"guarded(...) {advice}") from error
    invalid = (RequestValidationError, WebSocketRequestValidationError)

    async def held(connection: HTTPConnection) -> AsyncIterator[None]:
        hold = guard.hold(_incoming_of(connection))
        await hold.__aenter__()
        try:
            yield
        except BaseException as error:
            hold.__exit__(None, None if isinstance(error, invalid) else _verdict(error), None)
            raise
        hold.__exit__(None, None, None)

    try:
        until_returned: Any = Depends(held, scope="function")  # and before the response is sent
    except TypeError:  # FastAPI before 0.121 has no such option
        until_returned = Depends(held)

    async def guarded(_held: Any = until_returned) -> None:
        pass

    return guarded


_FAILED_SOCKET: Final = range(1011, 1015)
"""Close codes by which a server closes a websocket because of its own failure."""


def _verdict(error: BaseException) -> BaseException | None:
    """Return the failure to report to gates for a route that raised `error`; None for a success."""
    if isinstance(error, (WebSocketDisconnect, ClientDisconnect)):
        return ClientGone()
    if isinstance(error, HTTPException):
        return error if error.status_code >= FAILURE else None
    if isinstance(error, WebSocketException):
        return error if error.code in _FAILED_SOCKET else None
    return failure_in(error)


def _around(app: Any, *, edge: Edge, owner: Starlette) -> Edge:
    """Put `edge` around the app of `owner`, when its middleware stack is built."""
    edge.app = app
    for inner in _mounted_in(owner.routes):
        known = {getattr(middleware, "cls", None) for middleware in inner.user_middleware}
        if inner.middleware_stack is None and known.isdisjoint({_around, MountedErrors}):
            inner.add_middleware(MountedErrors, upstreams=edge._upstream_log)
    return edge


class MountedErrors:
    """Middleware that answers errors of a mounted app, as the edge of the outer app would.

    They do not reach the edge: a Starlette app turns every exception into a response.
    """

    def __init__(self, app: App, *, upstreams: UpstreamLog) -> None:
        """Wrap `app`, inside the middleware that makes responses; `upstreams` is the edge's log."""
        self.app = app
        self._upstream_log = upstreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and answer the exception that it raises with a problem."""
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            if started or scope["type"] not in ("http", "websocket"):
                raise
            answer = self._upstream_log.answer(Incoming(scope, Trust()), error)
            if answer is None:
                raise
            to = send if scope["type"] == "http" else WebsocketResponse(scope, send)
            await send_problem(to, *answer, method=scope.get("method"))


def _mounted_in(routes: Iterable[BaseRoute]) -> Iterator[Starlette]:
    """Yield the apps that are mounted below these routes, at any depth, each once."""
    waiting: list[Any] = [*routes]
    seen: dict[int, Any] = {}  # an app may be mounted in itself
    while waiting:
        route = waiting.pop()
        found = behind(getattr(route, "app", None)) or behind(getattr(route, "_base_app", None))
        below = found or route
        if id(below) in seen:
            continue
        seen[id(below)] = below
        if isinstance(below, Starlette):
            yield below
        waiting += getattr(below, "routes", None) or ()


async def _not_started(_scope: Any, _receive: Any, _send: Any) -> None:
    raise RuntimeError("the app that this edge belongs to has not been called yet")


def _incoming_of(connection: HTTPConnection) -> Incoming:
    """Return the current request: a middleware inside the edge may have identified its caller.

    Its peer is trusted as far as the edge trusts it; without an edge, not at all.
    """
    known: Incoming | None = connection.scope.get(INCOMING)
    return Incoming(connection.scope, Trust() if known is None else known.trust)


def _report_limits(connection: HTTPConnection, response: Response, granted: LimitGrant) -> None:
    """Add the headers of a route's limits to any response that the route returns or raises."""
    request = connection.scope.get(INCOMING)
    # Without an edge, FastAPI merges the headers of this response into its own.
    if not isinstance(request, AsgiRequest):
        for name, value in granted.headers():
            response.headers.append(name.decode(), value.decode())
        return
    request.add_headers(granted.headers)
