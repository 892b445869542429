"""Usage and duration of language model calls, by model, in OpenTelemetry's `gen_ai` terms.

Promises:

- Each request for a completion, a message or an embedding is counted once, when its response was
  read or it failed.
- Names of models come from requests and responses, so only a limited number of them is
  distinguished.
- No part of a prompt or a response is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clients.llm.estimate import PARSED_REQUEST, ParsedRequest, parsed_request
from seawall.clients.llm.usage import UNKNOWN, PendingUsage, Usage, name_of
from seawall.models.histogram import SECONDS, TOKENS, Tally
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.guard import Guard

MOST_SERIES: Final = 100
"""Maximum number of combinations of operation, provider, models and error that one client
distinguishes."""

_SERIES: Final = ("operation", "provider", "request_model", "response_model", "error")
OTHER: Final = "other"
LARGEST_READ: Final = 1 << 20
"""Maximum number of bytes of a request that is parsed only to find the name of its model."""

MILLION: Final = 1_000_000

_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/v1/messages": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
}
"""Operations, by path suffix."""

_PROVIDERS: Final = {
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.openai.com": "openai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "openai.azure.com": "azure.ai.openai",
}
"""Providers by host suffix; others by the format of their API."""

_DATED: Final = re.compile(r"-(?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)$")


class Price(NamedTuple):
    """Cost of a million tokens, in any one currency; `cached`: of those read from a cache.

    Without `cached` these cost as much as other input.
    """

    input: float
    output: float
    cached: float | None = None


Prices = Mapping[str, Price]


def check_prices(prices: Prices | None) -> dict[str, Price]:
    """Return the validated price table."""
    if prices is None:
        return {}
    if not isinstance(prices, Mapping):
        raise TypeError(f"prices={prices!r}: write {{'gpt-4o': Price(input=2.5, output=10.0)}}")
    for model, price in prices.items():
        if not isinstance(model, str) or not model or not isinstance(price, Price):
            raise TypeError(
                f"prices={{{model!r}: {price!r}}}: write a model's name and its Price, as in"
                " {'gpt-4o': Price(input=2.5, output=10.0)}, for a million tokens"
            )
        for name, number in price._asdict().items():
            if number is not None:
                check.at_least(f"prices[{model!r}].{name}", number, 0)
    return dict(prices)


class Operation:
    """One request to a model, from when it is sent until its response was read."""

    def __init__(self, of: Operations, request: Any) -> None:
        """Start now; `name` is empty if the request is not for a model."""
        self._of = of
        self.guard = of.name
        self.name = _operation(request)
        self.provider = _provider(request.url.host, request.url.path.rstrip("/"))
        self.request_model = _request_model(request)
        self.response_model = ""
        self.error = ""
        """The class of the error that ended it: a status, or the name of an exception."""
        self.usage = UNKNOWN
        self.cost: float | None = None
        self.seconds = 0.0
        self.first_chunk: float | None = None
        """Seconds until the first event of a stream; None if the response is not a stream."""
        self.began = of.now()

    def streams(self) -> None:
        """Record the arrival of the first event of the stream."""
        self.first_chunk = self._of.now() - self.began

    def failed(self, error: BaseException | int) -> None:
        """End with an exception, or with the status of a failed response."""
        self.error = str(error) if isinstance(error, int) else type(error).__name__
        self.end(UNKNOWN)

    def follow(self, pending: PendingUsage) -> None:
        """End when the response was read."""

        def end(usage: Usage) -> None:
            self.response_model, self.error = pending.model, pending.error
            self.end(usage)

        pending.then(end)

    def end(self, usage: Usage) -> None:
        """Count the operation, with its usage."""
        self.seconds = self._of.now() - self.began
        self.usage = usage
        if self.name:
            self._of.ended(self)

    @property
    def input_tokens(self) -> int | None:
        """All input tokens, including those from a cache."""
        usage = self.usage
        return None if usage.input is None else usage.input + usage.cached


class _Counted:
    """Totals of the operations of one series."""

    def __init__(self) -> None:
        self.durations = Tally(SECONDS)
        self.first_chunks = Tally(SECONDS)
        self.input = Tally(TOKENS)
        self.output = Tally(TOKENS)
        self.cost = 0.0

    def add(self, operation: Operation) -> None:
        self.durations.add(operation.seconds)
        if operation.first_chunk is not None:
            self.first_chunks.add(operation.first_chunk)
        if operation.input_tokens is not None:
            self.input.add(operation.input_tokens)
        if operation.usage.output is not None:
            self.output.add(operation.usage.output)
        self.cost += operation.cost or 0.0


class Operations:
    """Usage and duration of all requests of one client."""

    def __init__(self, guard: Guard, prices: Prices | None = None) -> None:
        self.name = guard.name
        self.now = guard.clock.now
        self._prices = check_prices(prices)
        self._counted: dict[tuple[str, ...], _Counted] = {}
        self._unpriced = 0
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "llm", guard.name)

    def __repr__(self) -> str:
        return f"<Operations of {self.name!r}>"

    def ended(self, operation: Operation) -> None:
        """Count a finished operation, and notify observers; may be called from a finaliser."""
        operation.cost = self._cost(operation)
        self._mutex.do(lambda: self._count(operation))
        for observe in observers:
            observe(operation)

    def _count(self, operation: Operation) -> None:
        models = operation.request_model, operation.response_model
        key = (operation.name, operation.provider, *models, operation.error)
        if key not in self._counted and len(self._counted) >= MOST_SERIES:
            key = (operation.name, operation.provider, OTHER, OTHER, operation.error and OTHER)
        self._counted.setdefault(key, _Counted()).add(operation)
        if self._prices and operation.usage.known and operation.cost is None:
            self._unpriced += 1

    def _cost(self, operation: Operation) -> float | None:
        price = self._price(operation.response_model) or self._price(operation.request_model)
        usage = operation.usage
        if price is None or not usage.known:
            return None
        full = (usage.input or 0) - usage.cached_input
        reduced = price.input if price.cached is None else price.cached
        return (
            full * price.input
            + (usage.cached_input + usage.cached) * reduced
            + (usage.output or 0) * price.output
        ) / MILLION

    def _price(self, model: str) -> Price | None:
        """Return the price of a model by its name, else by its name without the date."""
        return self._prices.get(model) or self._prices.get(_DATED.sub("", model))

    def snapshot(self) -> dict[str, Any]:
        """Return the totals, by operation, provider, models and error."""
        with self._mutex:
            return {
                "name": self.name,
                "priced": bool(self._prices),
                "unpriced": self._unpriced,
                "operations": [
                    {
                        **dict(zip(_SERIES, key, strict=True)),
                        "durations": one.durations.snapshot(),
                        "first_chunks": one.first_chunks.snapshot(),
                        "input": one.input.snapshot(),
                        "output": one.output.snapshot(),
                        "cost": one.cost,
                    }
                    for key, one in self._counted.items()
                ],
            }

    def _after_fork(self) -> None:
        self._mutex = Mutex()  # another thread may have held it


observers: Final[list[Callable[[Operation], None]]] = []
"""Functions called with each finished operation, in its context; they must not raise."""


def _provider(host: str, path: str) -> str:
    for end, name in _PROVIDERS.items():
        if host == end or host.endswith(f".{end}"):
            return name
    return "anthropic" if path.endswith("/v1/messages") else "openai"


def parse_for_attempts(request: Any) -> None:
    """Remember the request for all attempts, whose bodies cannot be inspected."""
    if not _operation(request):
        return
    with suppress(Exception):  # a stream can be read only once
        if len(request.content) <= LARGEST_READ:
            parsed_request((request,))


def _request_model(request: Any) -> str:
    asked = request.extensions.get(PARSED_REQUEST)
    return name_of(asked.body.get("model")) if isinstance(asked, ParsedRequest) else ""


def _operation(request: Any) -> str:
    """Return the operation that the request asks for, or "" if there is none."""
    path = request.url.path.rstrip("/")
    if request.method != "POST":
        return ""
    return next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "")
