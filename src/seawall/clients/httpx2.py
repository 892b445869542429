"""Guarded transports for httpx2.

    client = httpx2.AsyncClient(transport=AsyncGuardedTransport(guard))

See docs/clients/http-clients.md for what is retried and what is sent to the next service.
"""

from __future__ import annotations

try:
    import httpx2
except ImportError as error:
    raise ImportError(
        "seawall.clients.httpx2 needs httpx2: pip install 'seawall[httpx2]'"
    ) from error

from seawall.clients.http.httpx_family import AsyncTransport, HttpxLibrary, SyncTransport

__all__ = ["AsyncGuardedTransport", "GuardedTransport"]

_LIBRARY = HttpxLibrary(httpx2)


class GuardedTransport(SyncTransport, httpx2.BaseTransport):
    """A transport for `httpx2.Client` that sends requests through a guard."""

    _library = _LIBRARY
    _default = httpx2.HTTPTransport


class AsyncGuardedTransport(AsyncTransport, httpx2.AsyncBaseTransport):
    """A transport for `httpx2.AsyncClient` that sends requests through a guard."""

    _library = _LIBRARY
    _default = httpx2.AsyncHTTPTransport
