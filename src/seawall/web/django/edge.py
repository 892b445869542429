"""The edge around an application of Django, and the middleware that answers its errors.

Django turns every exception of a view into a response, so none reaches the edge.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

from seawall._checks import function
from seawall.clock import SYSTEM
from seawall.web.django.apps import edge_parts
from seawall.web.edge import Edge
from seawall.web.edge.edge import default_edge
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.wsgi import Edge as WsgiEdge


def protect(application: Any) -> Edge | WsgiEdge:
    """Put the edge around the application of `asgi.py` or `wsgi.py`, with the parts in `SEAWALL`.

    Parts that only the other kind of application has are left out.
    """
    called = getattr(function("application", application), "__call__", None)  # noqa: B004
    if iscoroutinefunction(application) or iscoroutinefunction(called):
        return default_edge(application, **edge_parts("asgi"))
    return WsgiEdge(application, **edge_parts("wsgi"))


class ErrorMiddleware:
    """Answers errors that escape from views; for ASGI and WSGI."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Any) -> None:
        """Wrap `get_response`, which may be async."""
        self._get_response = get_response
        self._upstream_log = UpstreamLog(edge_parts("asgi").get("name") or "edge", SYSTEM.now)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Return the response of the view; or, if that is async, what to await."""
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Return the response to an error of Seawall or of an upstream; None for any other."""
        match = request.resolver_match
        route = f"/{match.route}" if match else None
        answer = self._upstream_log.answer_in(error, request.method or "", route)
        if answer is None:
            return None
        problem, headers = answer
        return HttpResponse(problem.body(), status=problem.status, headers=headers)
