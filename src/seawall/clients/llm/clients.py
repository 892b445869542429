"""HTTP clients for the vendors' SDKs that send every request through a guard.

Promises:

- Requests that only ask a model may be repeated; requests that leave something behind may not.
- Nothing about the caller's chain of services is sent to a vendor.
- Every option of the library is applied or refused.
- A proxy, explicit or from the environment, is behind the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from ipaddress import ip_address
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall.clients.llm.estimate import parsed_request
from seawall.clients.llm.operations import Operations, Prices, parse_for_attempts
from seawall.clients.llm.transport import AsyncVendorTransport, VendorTransport
from seawall.context import idempotency_key_var, reset
from seawall.guard import Guard

Library = Literal["httpx", "httpx2"]

_REPEATABLE: Final = (
    "/completions",
    "/embeddings",
    "/v1/messages",  # not /threads/{id}/messages: what is sent there stays in the thread
    "/count_tokens",
    "/input_tokens",
    "/moderations",
    "/responses",
)
"""Path suffixes where a repetition does no harm except for its cost."""

_CONNECTING: Final = ("verify", "cert", "http1", "http2", "limits", "proxy")
"""Options of a client that really belong to its transport."""

_CONNECT: Final = 5.0
_LONGEST: Final = 600.0
"""Seconds: a response that is not streamed may take minutes. Use a guard's Timeout to limit it."""


def client_of(
    kind: type[VendorTransport | AsyncVendorTransport],
    guard: Guard,
    transport: Any,
    library: Library | None,
    repeatable: Callable[[Any], bool] | None,
    prices: Prices | None,
    options: dict[str, Any],
) -> Any:
    """Return a client of the library, sync or async by `kind`, completely behind `guard`."""
    if not isinstance(guard, Guard):
        raise TypeError(f"{guard!r}: the first argument is a Guard, such as Guard('vendor')")
    if "mounts" in options:
        raise TypeError("mounts=: they would be ways around the guard; give it one transport")
    module, clients = _libraries(library)
    own: dict[str, Any] = {name: options.pop(name) for name in _CONNECTING if name in options}
    is_async = kind is AsyncVendorTransport
    operations = Operations(guard, prices)
    prefix = "Async" if is_async else ""

    def guarded(inner: Any) -> Any:
        return _transport_class(clients, f"{prefix}GuardedTransport")(
            guard,
            kind(guard, inner, operations),
            repeatable=repeatable or asks_only,
            propagate=False,  # a vendor is not part of the caller's chain of services
        )

    def connecting(proxy: Any) -> Any:
        settings: dict[str, Any] = {
            "limits": module.Limits(max_connections=1000, max_keepalive_connections=100),
            "trust_env": options.get("trust_env", True),
            **own,
            "proxy": proxy,
        }
        return guarded(getattr(module, f"{prefix}HTTPTransport")(**settings))

    routes: dict[str, Any] = {}
    if transport is not None:
        if own:
            raise TypeError(f"{next(iter(own))}=: there is a transport: give it to the transport")
        handle = "handle_async_request" if is_async else "handle_request"
        if not callable(getattr(transport, handle, None)):
            advice = f"pass one such as {module.__name__}.{prefix}HTTPTransport()"
            raise TypeError(f"{transport!r} has no {handle}(): {advice}")
        main = guarded(transport)
    else:
        main = connecting(own.get("proxy"))
        if own.get("proxy") is None and options.get("trust_env", True):
            for pattern, proxy in _proxies(module).items():
                routes[pattern] = None if proxy is None else connecting(proxy)
    usual = {"timeout": module.Timeout(_LONGEST, connect=_CONNECT), "follow_redirects": True}
    make = getattr(module, f"{prefix}Client")
    return make(transport=main, mounts=routes, **{**usual, **options})


def asks_only(request: Any) -> bool:
    """Return whether `request` only asks a model, so that it may be sent again."""
    path = request.url.path.rstrip("/")
    if request.method != "POST" or not path.endswith(_REPEATABLE):
        return False
    if not path.endswith("/responses"):
        return True
    parsed = parsed_request((request,))
    # Both persist if the response is lost: another turn in a conversation, another job.
    return parsed is None or not (parsed.body.get("conversation") or parsed.body.get("background"))


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


@contextmanager
def _without_key(request: Any) -> Iterator[None]:
    """Hide the idempotency key of the context, and remember the request as the SDK made it.

    That key identifies the effect that our own caller wants. We may send several requests for it: a
    vendor that got the same key with all of them would replay the first response.
    """
    parse_for_attempts(request)
    token = idempotency_key_var.set(None)
    try:
        yield
    finally:
        reset(idempotency_key_var, token)


class _Unkeyed:
    """The outermost layer of a guarded transport, without the key."""

    def handle_request(self, request: Any) -> Any:
        with _without_key(request):
            return super().handle_request(request)  # type: ignore[misc]


class _AsyncUnkeyed:
    """Async twin of `_Unkeyed`."""

    async def handle_async_request(self, request: Any) -> Any:
        with _without_key(request):
            return await super().handle_async_request(request)  # type: ignore[misc]


@cache
def _transport_class(clients: Any, name: str) -> Any:
    """Return our transport class of that `name`, without the key."""
    mixin = _AsyncUnkeyed if name.startswith("Async") else _Unkeyed
    return type(name, (mixin, getattr(clients, name)), {})


def _proxies(module: Any) -> dict[str, str | None]:
    """Return the proxies of the environment by the library's URL patterns; None: no proxy."""
    from urllib.request import getproxies

    proxies = getproxies()
    routes: dict[str, str | None] = {}
    for scheme in ("http", "https", "all"):
        proxy = proxies.get(scheme)
        if proxy:
            routes[f"{scheme}://"] = proxy if "://" in proxy else f"http://{proxy}"
    for host in map(str.strip, proxies.get("no", "").split(",")):
        if host == "*":
            return {}
        if host and routes:
            pattern = host if "://" in host else f"all://{_pattern(host)}"
            with suppress(module.InvalidURL):  # an invalid entry excludes nothing
                module.URL(pattern)
                routes[pattern] = None
    return routes


def _pattern(host: str) -> str:
    """Return the library's pattern of a host: a domain includes its subdomains."""
    bare = host.strip("[]")
    try:
        version = ip_address(bare.partition("/")[0]).version
    except ValueError:
        return host if host.lower() == "localhost" else f"*{host}"
    return bare if version == 4 else f"[{bare}]"  # noqa: PLR2004 - IP version


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

    All of its requests go through `guard` (in which `TokenLimits` count them), using `transport`,
    or a new one. `library` is httpx2 if it is installed, else httpx. `repeatable` returns whether a
    POST may be retried; by default requests for completions, messages and embeddings may. `prices`
    are the costs of a million tokens, by model: `{"gpt-4o": Price(input=2.5, output=10.0)}`. Other
    `options` are the library's own, such as `base_url`, `timeout` or `proxy`; options about
    connections are refused if a `transport` is given.
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
