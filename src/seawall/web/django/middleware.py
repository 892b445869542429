"""Django middleware that answers errors of Seawall and of upstreams as the edge does.

Django turns every exception of a view into a response, so none reaches the edge.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

from seawall.clock import SYSTEM
from seawall.web.django.settings import edge_parts
from seawall.web.edge.upstream_log import UpstreamLog


class ErrorMiddleware:
    """Answers errors that escape from views; for ASGI and WSGI."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Any) -> None:
        """Wrap `get_response`, which may be async."""
        self._get_response = get_response
        self._upstreams = UpstreamLog(edge_parts("asgi").get("name") or "edge", SYSTEM.now)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Return the response of the view; or, if that is async, what to await."""
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Return the response to an error of Seawall or of an upstream; None for any other."""
        match = request.resolver_match
        route = f"/{match.route}" if match else None
        answer = self._upstreams.answer_in(error, request.method or "", route)
        if answer is None:
            return None
        problem, headers = answer
        return HttpResponse(problem.body(), status=problem.status, headers=headers)
