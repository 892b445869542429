"""Guarded transports for httpx.

    client = httpx.AsyncClient(transport=AsyncGuardedTransport(guard))

See docs/clients/http-clients.md for what is retried and what is sent to the next service.
"""

from __future__ import annotations

try:
    import httpx
except ImportError as error:
    raise ImportError("seawall.clients.httpx needs httpx: pip install 'seawall[httpx]'") from error

from seawall.clients.http.httpx_family import AsyncTransport, HttpxLibrary, SyncTransport

__all__ = ["AsyncGuardedTransport", "GuardedTransport"]

_LIBRARY = HttpxLibrary(httpx)


class GuardedTransport(SyncTransport, httpx.BaseTransport):
    """A transport for `httpx.Client` that sends requests through a guard."""

    _library = _LIBRARY
    _default = httpx.HTTPTransport


class AsyncGuardedTransport(AsyncTransport, httpx.AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` that sends requests through a guard."""

    _library = _LIBRARY
    _default = httpx.AsyncHTTPTransport
