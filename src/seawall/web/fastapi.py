"""Seawall in a FastAPI or Starlette app: one line for the whole app, dependencies for a route.

    edge = protect(app)

puts the edge around the app: deadlines, overload, limits, health and draining, every refusal as
problem+json, and all of it in the app's OpenAPI description. A route's own limit or guard is a
dependency: `Depends(limited(limit("10/min", by="address")))`, `Depends(guarded(reports))`.

The edge stands around the app's own handling of errors: what no handler of the app's takes reaches
it, and it answers what is Seawall's or an upstream's. The apps that are mounted in it when it
starts are told to answer alike.
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

from seawall import _checks as check
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.registry import free_name
from seawall.web.edge import Edge
from seawall.web.edge.admission import Turns, default_concurrency
from seawall.web.edge.answers import Answering
from seawall.web.edge.dispatch import Dispatch, behind
from seawall.web.edge.inbound import Classify, Inbound
from seawall.web.edge.sending import FAILURE, Passage
from seawall.web.edge.starlette_errors import go_past_errors
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import Granted, RequestLimit, RequestLimits
from seawall.web.openapi import describing
from seawall.web.problems import problem_of
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust

__all__ = ["guarded", "limited", "protect"]


class _Default:
    """Stands for what an app has unless told otherwise; None leaves a part out."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final[Any] = _Default()

MOST_WEBSOCKETS: Final = 2000
"""How many are open at once unless told otherwise, and half of them for one address."""


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
    turns: Turns | None = DEFAULT,
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

    Without arguments: 30 s for each request, as many at once as are served well, 2000 websockets
    (of one address half of them, unless you give `websockets`), `/health/live`,
    `/health/ready` and `/health/deep`, draining at the end, problem+json for every error of
    Seawall's, nobody trusted, no rate limits. Each part can be given, and left out by None.
    Of its time a request keeps back `reserve` seconds from the calls of its handler (by default a
    tenth, 10 ms to 0.5 s), so that the handler can answer when one of them runs out of time.
    `classify(incoming)` gives a request its criticality, its tier (as text) or both (`Rank`).
    `report_degraded=True` names degraded answers, by source and level, in a response header.
    `name` is that of its guard: "edge", or "edge 2" and so on where that is taken already.
    Middlewares that are added later stand around the edge: CORS belongs there.
    """
    if not isinstance(app, Starlette):
        raise TypeError(f"protect({app!r}): pass a FastAPI or Starlette app; others take Edge(app)")
    if any(getattr(known, "cls", None) is _around for known in app.user_middleware):
        raise RuntimeError("protect(): this app has an edge already")
    if app.middleware_stack is not None:
        raise RuntimeError("protect(): the app has started already; call this where it is made")
    if name is None:
        name = free_name("edge")
    if isinstance(limits, RequestLimit):
        limits = [limits]
    if limits is not None and not isinstance(limits, RequestLimits):
        listed = check.listed("limits", limits, "limit('600/min', by='address')")
        limits = RequestLimits(*listed) if listed else None
    if websockets_per_address is DEFAULT:
        websockets_per_address = MOST_WEBSOCKETS // 2 if websockets is DEFAULT else None
    life = Lifecycle(name=name) if lifecycle is DEFAULT else lifecycle
    edge = Edge(
        _not_started,
        name=name,
        inbound=Inbound(trust=trust, timeout=timeout, reserve=reserve, classify=classify),
        shed=shed,
        limits=limits,
        turns=Turns() if turns is DEFAULT else turns,
        concurrency=default_concurrency() if concurrency is DEFAULT else concurrency,
        routes=routes,
        websockets=Bulkhead(MOST_WEBSOCKETS) if websockets is DEFAULT else websockets,
        websockets_per_address=websockets_per_address,
        stall=stall,
        health=Health(name=name, lifecycle=life) if health is DEFAULT else health,
        lifecycle=life,
        report_degraded=report_degraded,
    )
    edge._own.dispatch = Dispatch(app)
    app.add_middleware(_around, edge=edge, owner=app)
    _describe(app)
    return edge


def limited(*limits: RequestLimit, **options: Any) -> Callable[..., Awaitable[None]]:
    """Return a dependency that gives a route limits of its own, beside those of the edge.

    Takes what `RequestLimits` takes: `Depends(limited(limit("10/min", by="address")))`. It is
    asked when the route is known and before its function runs.
    """
    own = RequestLimits(*limits, **options)

    async def limited(connection: HTTPConnection, response: Response) -> None:
        incoming = _incoming_of(connection)
        granted = await own.aadmit(incoming) if own.waits else own.admit(incoming)
        _tell(connection, response, granted)

    return limited


def guarded(guard: Guard) -> Callable[..., Awaitable[None]]:
    """Return a dependency that holds the gates of `guard` while a route's function runs.

    Breaker, rate limit, bulkhead and shedder act; retries and timeouts are for calls, and need
    the guard around a function. A `key=` function of a gate is given the request. A mistake of
    the caller's (an HTTPException below 500, a request that does not validate) is no failure of
    the route's, and a client that hangs up is no verdict on it.
    """
    if not isinstance(guard, Guard):
        raise TypeError(f"guarded({guard!r}): pass a Guard, such as Guard('reports', Bulkhead(5))")
    try:
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

    while_it_runs = _for_the_function(held)

    async def guarded(_held: Any = while_it_runs) -> None:
        pass

    return guarded


def _for_the_function(held: Callable[..., AsyncIterator[None]]) -> Any:
    """Return what asks FastAPI to end `held` with the function, before the answer is sent."""
    from fastapi import Depends

    try:
        return Depends(held, scope="function")
    except TypeError:  # FastAPI before 0.121: it alone says when a dependency ends
        return Depends(held)


class _Gone(BaseException):
    """What gates are told when the client has gone: as a cancellation, it is no verdict."""


_FAILED_SOCKET: Final = range(1011, 1015)
"""The codes by which a server closes a websocket because of trouble of its own."""


def _verdict(error: BaseException) -> BaseException | None:
    """Return what gates are told of a route that raised `error`; None if that is a good answer."""
    if isinstance(error, (WebSocketDisconnect, ClientDisconnect)):
        return _Gone()
    if isinstance(error, HTTPException):
        return error if error.status_code >= FAILURE else None
    if isinstance(error, WebSocketException):
        return error if error.code in _FAILED_SOCKET else None
    problem = problem_of(error)
    return error if problem is None or problem.status >= FAILURE else None


def _around(app: Any, *, edge: Edge, owner: Starlette) -> Edge:
    """Put `edge` around what its owner has become, when its middlewares are put together."""
    edge.app = edge._reporting(app)
    go_past_errors(edge, owner)
    for inner in _mounted_in(owner.routes):
        known = {getattr(middleware, "cls", None) for middleware in inner.user_middleware}
        if inner.middleware_stack is None and known.isdisjoint({_around, Answering}):
            inner.add_middleware(Answering, upstreams=edge._upstreams)
    return edge


def _mounted_in(routes: Iterable[BaseRoute]) -> Iterator[Starlette]:
    """Find the apps that are mounted below these routes, however deep, each once."""
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


def _describe(app: Starlette) -> None:
    """Let the app's own description tell of the answers that the edge gives."""
    openapi = getattr(app, "openapi", None)
    if openapi is not None:
        app.openapi = describing(openapi)  # type: ignore[attr-defined]  # as FastAPI advises


def _incoming_of(connection: HTTPConnection) -> Incoming:
    """Return the request as it is now: who stands between the edge and here may know its caller.

    Its peer is trusted as far as the edge trusts it; without an edge, not at all.
    """
    known: Incoming | None = connection.scope.get(INCOMING)
    return Incoming(connection.scope, Trust() if known is None else known.trust)


def _tell(connection: HTTPConnection, response: Response, granted: Granted) -> None:
    """Let the answer tell of a route's limits, whichever response the route returns or raises."""
    passage = connection.scope.get(INCOMING)
    # Without an edge, FastAPI adds what this response says to its own.
    if not isinstance(passage, Passage):
        for name, value in granted.headers():
            response.headers.append(name.decode(), value.decode())
        return
    outer, own = passage.told, granted.headers
    told = outer if callable(outer) else lambda: outer or []
    passage.told = lambda: [*told(), *own()]
