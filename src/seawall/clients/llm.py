"""Calls of language models: limits in tokens, streams, and other models to fall back on.

    limits = TokenLimits(requests="500/min", tokens="200k/min", max_wait=10.0)
    guard = Guard("vendor", Retry(on=transient), Breaker(), limits, Timeout(60.0))
    client = openai.AsyncOpenAI(http_client=async_http_client(guard), max_retries=0)

For a blocking client, `http_client(guard)`, it is `Timeout(60.0, sync="cooperative")`.

The vendors' SDKs are not needed to import this; what they are given is an HTTP client of the
library that they use themselves. Explained in docs/llm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seawall.clients._llm_clients import Library, client_of
from seawall.clients._llm_limits import TokenLimits
from seawall.clients._llm_models import Model, Models, passing
from seawall.clients._llm_operations import Price, Prices
from seawall.clients._llm_transport import AsyncVendorTransport, VendorTransport
from seawall.clients._llm_usage import Usage, usage_of
from seawall.guard import Guard

__all__ = [
    "Model",
    "Models",
    "Price",
    "TokenLimits",
    "Usage",
    "async_http_client",
    "http_client",
    "passing",
    "usage_of",
]


def http_client(
    guard: Guard,
    transport: Any = None,
    *,
    library: Library | None = None,
    repeatable: Callable[[Any], bool] | None = None,
    prices: Prices | None = None,
    **options: Any,
) -> Any:
    """Return a `Client` for an SDK of a vendor: `OpenAI(http_client=..., max_retries=0)`.

    All of its requests go through `guard` (in which `TokenLimits` count them), and on by
    `transport`, or a new one. `library` is httpx2 if it is installed, else httpx. `repeatable` says
    of a POST whether it may be retried; requests for completions, messages and embeddings may.
    `prices` is what a million tokens cost, by model: `{"gpt-4o": Price(input=2.5, output=10.0)}`.
    Other `options` are the library's own, such as `base_url`, `timeout` or `proxy`; but those that
    are about connections, where a `transport` is given.
    """
    return client_of(VendorTransport, guard, transport, library, repeatable, prices, options)


def async_http_client(
    guard: Guard,
    transport: Any = None,
    *,
    library: Library | None = None,
    repeatable: Callable[[Any], bool] | None = None,
    prices: Prices | None = None,
    **options: Any,
) -> Any:
    """Return an `AsyncClient` for an async SDK; see `http_client`."""
    return client_of(AsyncVendorTransport, guard, transport, library, repeatable, prices, options)
