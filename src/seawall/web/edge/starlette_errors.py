"""Bypass of the error middlewares that a Starlette or FastAPI app puts around its edge.

Each of these middlewares costs every request a frame, and one more for each message of its
response, although it is needed only when something fails. So when the lifespan of the app begins,
the edge takes their place: it serves requests of the short path directly, and passes other requests
and exceptions to the middlewares. They answer and record errors as before. Other and unknown
middlewares stay where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from seawall.web.edge.short_path import plain_entry

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from seawall.web.asgi_types import Receive, Scope, Send
    from seawall.web.edge.edge import Edge

_FOR_ERRORS_ALONE: Final = {
    ("starlette.middleware.errors", "ServerErrorMiddleware"),
    ("fastapi.telemetry._asgi", "ExceptionTelemetryMiddleware"),
}
"""Modules and names: the second does not exist everywhere, and is private."""


def go_past_errors(edge: Edge, owner: Starlette) -> None:
    """Bypass the error middlewares of `owner` around `edge`, once its lifespan begins.

    At that point all middlewares are known. Adding another one rebuilds the stack, which undoes the
    bypass.
    """

    async def beginning(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            _stand_outside(edge, owner)
        await edge._serve_unusual(scope, receive, send)

    edge._unusual = beginning


def _stand_outside(edge: Edge, owner: Starlette) -> None:
    stack: Any = owner.middleware_stack
    inner, last = stack, None
    while inner is not edge:
        kind = type(inner)
        if (kind.__module__, kind.__qualname__) not in _FOR_ERRORS_ALONE:
            return
        inner, last = inner.app, inner
    if last is not None and edge._serving != edge._serve_unusual:
        serving: Any = plain_entry(edge, edge._probes, stack)
        serving.app = edge  # for code that follows `app` attributes to find a middleware
        last.app = edge._serve_unusual
        owner.middleware_stack = serving
