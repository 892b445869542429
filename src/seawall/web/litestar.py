"""Seawall in a Litestar app, in one line.

    edge = protect(app)

returns the edge around the app, which is what the server serves: `uvicorn service:edge`. It has the
same parts and defaults as `seawall.web.fastapi.protect`. An error of Seawall or of an upstream that
escapes from a handler is answered as the edge would, unless the app has a handler for it.
"""

from __future__ import annotations

from typing import Any, Unpack

try:
    from litestar import Litestar, Request, Response
    from litestar.exceptions import HTTPException
    from litestar.exceptions.responses import create_debug_response, create_exception_response
    from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR as INTERNAL_ERROR
except ImportError as error:
    raise ImportError(
        "seawall.web.litestar needs Litestar: pip install 'seawall[litestar]'"
    ) from error

from seawall.errors import SeawallError
from seawall.web.edge import Edge
from seawall.web.edge.edge import EdgeParts, default_edge

__all__ = ["protect"]


def protect(app: Litestar, **parts: Unpack[EdgeParts]) -> Edge:
    """Return the edge around `app`, to be served in its place; call this where the app is made.

    `parts` and their defaults are those of `seawall.web.fastapi.protect`.
    """
    if not isinstance(app, Litestar):
        raise TypeError(f"protect({app!r}): pass a Litestar app; others take Edge(app)")
    inner: Any = app
    edge = default_edge(inner, **parts)

    def answer(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        route = request.scope.get("path_template")
        answered = edge._upstream_log.answer_in(error, str(request.method), route)
        if answered is None:
            if app.debug and not isinstance(error, HTTPException):
                return create_debug_response(request, error)
            return create_exception_response(request, error)
        problem, headers = answered
        return Response(problem.body(), status_code=problem.status, headers=headers)

    handlers: Any = app.exception_handlers
    handlers.setdefault(SeawallError, answer)
    if INTERNAL_ERROR not in handlers:  # a handler of the app for all other exceptions
        handlers.setdefault(Exception, answer)
    return edge
