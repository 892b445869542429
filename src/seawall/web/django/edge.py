"""The edge around an application of Django."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from seawall._checks import function
from seawall.web.django.settings import edge_parts
from seawall.web.edge import Edge
from seawall.web.edge.defaults import default_edge
from seawall.web.wsgi import Edge as WsgiEdge


def protect(application: Any) -> Edge | WsgiEdge:
    """Put the edge around the application of `asgi.py` or `wsgi.py`, with the parts in `SEAWALL`.

    Parts that only the other kind of application has are left out.
    """
    called = getattr(function("application", application), "__call__", None)  # noqa: B004
    if iscoroutinefunction(application) or iscoroutinefunction(called):
        return default_edge(application, **edge_parts("asgi"))
    return WsgiEdge(application, **edge_parts("wsgi"))
