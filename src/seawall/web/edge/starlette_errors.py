"""What a Starlette or FastAPI app has around its edge for errors alone: requests go past it.

Each of these middlewares costs every request a frame, and one more for each message of its answer,
only to be there when something goes wrong. So when the app begins to live, the edge takes their
place: it serves what is plain at once, and hands to them what is not, and what went wrong. They
answer and note errors as ever. Other middlewares, and those nobody here knows, stay where they are.
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
"""Modules and names: the second is not everywhere, and nobody's to import."""


def go_past_errors(edge: Edge, owner: Starlette) -> None:
    """Let plain requests go past what `owner` has around `edge` for errors, once it begins to live.

    That is when all middlewares are known, and nobody adds another without putting them together
    anew, by which this is undone.
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
        serving.app = edge  # for those who look for a middleware, from one `app` to the next
        last.app = edge._serve_unusual
        owner.middleware_stack = serving
