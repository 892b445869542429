"""Calls of language models: token limits, streams, and fallback to other models.

    limits = TokenLimits(requests="500/min", tokens="200k/min", max_wait=10.0)
    guard = Guard("vendor", Retry(on=transient), Breaker(), limits, Timeout(60.0))
    client = openai.AsyncOpenAI(http_client=async_http_client(guard), max_retries=0)

For a blocking client, `http_client(guard)`, write `Timeout(60.0, sync="cooperative")`.

Importing this does not need the vendors' SDKs; they are given an HTTP client of the library that
they use themselves. See docs/clients/llm.md.
"""

from seawall.clients.llm.clients import async_http_client, http_client
from seawall.clients.llm.limits import TokenLimits
from seawall.clients.llm.models import Model, Models, should_fall_back
from seawall.clients.llm.operations import Price
from seawall.clients.llm.usage import Usage, usage_of

__all__ = [
    "Model",
    "Models",
    "Price",
    "TokenLimits",
    "Usage",
    "async_http_client",
    "http_client",
    "should_fall_back",
    "usage_of",
]
