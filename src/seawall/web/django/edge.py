"""The edge around an application of Django."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from seawall.web.django.settings import edge_parts
from seawall.web.edge import Edge
from seawall.web.edge.defaults import default_edge


def protect(application: Any) -> Edge:
    """Put the edge around the application of `asgi.py`, with the parts in `settings.SEAWALL`."""
    if not iscoroutinefunction(getattr(application, "__call__", None)):  # noqa: B004
        raise TypeError(f"protect({application!r}): pass get_asgi_application()")
    return default_edge(application, **edge_parts())
