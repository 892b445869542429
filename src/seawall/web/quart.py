"""Seawall in a Quart app, in one line.

    edge = protect(app)

puts the edge around the app, with the same parts and defaults as `seawall.web.fastapi.protect`. An
error of Seawall or of an upstream that escapes from a handler is answered as the edge would, unless
the app has a handler for it.
"""

from __future__ import annotations

from typing import Any, Unpack

try:
    from quart import Quart, Response, has_request_context, request, websocket
    from werkzeug.exceptions import HTTPException
except ImportError as error:
    raise ImportError("seawall.web.quart needs Quart: pip install 'seawall[quart]'") from error

from seawall.errors import SeawallError
from seawall.web.edge import Edge
from seawall.web.edge.edge import EdgeParts, default_edge

__all__ = ["protect"]


def protect(app: Quart, **parts: Unpack[EdgeParts]) -> Edge:
    """Put the edge around `app` and return it; call this once, where the app is made.

    `parts` and their defaults are those of `seawall.web.fastapi.protect`.
    """
    if not isinstance(app, Quart):
        raise TypeError(f"protect({app!r}): pass a Quart app; others take Edge(app)")
    if isinstance(app.asgi_app, Edge):
        raise RuntimeError("protect(): this app has an edge already")  # noqa: TRY004 - no bad type
    inner: Any = app.asgi_app
    edge: Any = default_edge(inner, **parts)
    app.asgi_app = edge  # type: ignore[method-assign]  # as Quart's documentation advises

    async def answer(error: Exception) -> Response | HTTPException:
        if isinstance(error, HTTPException):
            return error
        asked = request if has_request_context() else websocket
        rule = asked.url_rule
        answered = edge._upstream_log.answer_in(error, asked.method, rule and rule.rule)
        if answered is None:
            raise error
        problem, headers = answered
        return Response(problem.body(), problem.status, headers)

    handlers: dict[Any, Any] = app.error_handler_spec[None][None]
    for kind in (SeawallError, Exception):  # the exceptions of upstreams have no common base
        handlers.setdefault(kind, answer)
    protected: Edge = edge
    return protected
