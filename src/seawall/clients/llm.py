"""Calls of language models: limits in tokens, streams, and other models to fall back on.

    limits = TokenLimits(requests="500/min", tokens="200k/min", max_wait=10.0)
    guard = Guard("vendor", Retry(on=retryable), Breaker(), limits, Timeout(60.0))
    client = openai.AsyncOpenAI(http_client=async_http_client(guard), max_retries=0)

The vendors' SDKs are not needed to import this; what they are given is an HTTP client of the
library that they use themselves. Explained in docs/llm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall.clients._exchange import retryable
from seawall.clients._llm_limits import TokenLimits
from seawall.clients._llm_models import Model, Models, passing
from seawall.clients._llm_transport import AsyncVendorTransport, VendorTransport
from seawall.clients._llm_usage import Usage, usage_of
from seawall.guard import Guard

__all__ = [
    "Model",
    "Models",
    "TokenLimits",
    "Usage",
    "async_http_client",
    "http_client",
    "passing",
    "retryable",
    "usage_of",
]

Library = Literal["httpx", "httpx2"]

_REPEATABLE: Final = (
    "/completions",
    "/embeddings",
    "/messages",
    "/messages/count_tokens",
    "/moderations",
    "/responses",
)
"""Ends of paths where asking twice does no harm but cost."""

_CONNECT: Final = 5.0
_LONGEST: Final = 600.0
"""Seconds: an answer that is not streamed may take minutes. A guard's Timeout is what limits it."""


def http_client(
    guard: Guard,
    transport: Any = None,
    *,
    library: Library | None = None,
    repeatable: Callable[[Any], bool] | None = None,
    **options: Any,
) -> Any:
    """Return a `Client` for an SDK of a vendor: `OpenAI(http_client=..., max_retries=0)`.

    All of its requests go through `guard` (in which `TokenLimits` count them), and on by
    `transport`, or a new one. `library` is httpx2 if it is installed, else httpx. `repeatable` says
    of a POST whether it may be retried; requests for completions, messages and embeddings may.
    Other `options` are the library's own, such as `base_url` or `timeout`.
    """
    module, clients = _libraries(library)
    inner = module.HTTPTransport(limits=_limits(module)) if transport is None else transport
    guarded = clients.GuardedTransport(
        guard,
        VendorTransport(guard, inner),
        repeatable=repeatable or _asks_only,
        propagate=False,  # a vendor is no part of our own chain of services
    )
    return module.Client(transport=guarded, **_with_defaults(module, options))


def async_http_client(
    guard: Guard,
    transport: Any = None,
    *,
    library: Library | None = None,
    repeatable: Callable[[Any], bool] | None = None,
    **options: Any,
) -> Any:
    """Return an `AsyncClient` for an async SDK; see `http_client`."""
    module, clients = _libraries(library)
    inner = module.AsyncHTTPTransport(limits=_limits(module)) if transport is None else transport
    guarded = clients.AsyncGuardedTransport(
        guard,
        AsyncVendorTransport(guard, inner),
        repeatable=repeatable or _asks_only,
        propagate=False,
    )
    return module.AsyncClient(transport=guarded, **_with_defaults(module, options))


def _asks_only(request: Any) -> bool:
    """Tell whether `request` asks a model for something, and so may be sent again."""
    return bool(request.method == "POST" and request.url.path.endswith(_REPEATABLE))


def _libraries(name: Library | None) -> tuple[Any, Any]:
    """Return the HTTP library and our transports for it."""
    if name is not None:
        check.choice("library", name, ("httpx", "httpx2"))
        clients = import_module(f"seawall.clients.{name}")
        return import_module(name), clients
    try:
        return _libraries("httpx2")
    except ImportError:
        try:
            return _libraries("httpx")
        except ImportError:
            raise ImportError(
                "seawall.clients.llm needs the library that the vendor's SDK uses:"
                " pip install 'seawall[httpx2]', or 'seawall[httpx]'"
            ) from None


def _limits(module: Any) -> Any:
    return module.Limits(max_connections=1000, max_keepalive_connections=100)


def _with_defaults(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    timeout = module.Timeout(_LONGEST, connect=_CONNECT)
    return {"timeout": timeout, "follow_redirects": True, **options}
