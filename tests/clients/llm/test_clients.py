"""The clients for the SDKs: all is behind the guard, and a vendor is told nothing of our own."""

from __future__ import annotations

from typing import Any

import httpx
import httpx2
import pytest

from seawall import Retry, transient
from seawall.clients.llm import async_http_client, http_client
from seawall.clients.llm import clients as _llm_clients
from seawall.context import idempotency_key
from seawall.testing import run_virtual, virtual_time
from tests.clients.llm.support import Vendor, breaks, refuses
from tests.support import new_guard


def test_what_may_be_sent_again() -> None:
    """What only asks is retried by POST; what makes something (a file, a batch) is not."""
    harmless: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {}),
        ("/v1/embeddings", {}),
        ("/v1/responses", {"conversation": None, "background": False}),
    ]
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/batches", {}),
        ("/v1/threads/t/messages", {}),
        ("/v1/responses", {"conversation": "c"}),
        ("/v1/responses", {"background": True}),
    ]
    for path, body in [*harmless, *others]:
        with virtual_time():
            vendor = Vendor(*[refuses(500)] * 3)
            guard = new_guard(Retry(on=transient))
            with http_client(guard, vendor.transport()) as http:
                assert http.post(f"http://v{path}", json=body).status_code == 500
            assert vendor.asked == (3 if (path, body) in harmless else 1)
    with virtual_time():
        vendor = Vendor(breaks(httpx2.ReadError))
        with (
            http_client(
                new_guard(Retry(on=transient)), vendor.transport(), repeatable=bool
            ) as http,
        ):
            assert http.post("http://v/v1/batches", json={}).status_code == 200


def test_the_key_of_the_context_is_not_the_vendors() -> None:
    """The caller's idempotency key is not sent to vendors, and POSTs stay unchanged."""

    async def main() -> None:
        vendor = Vendor(*[refuses(500)] * 2)
        guard = new_guard(Retry(on=transient))
        with idempotency_key("order 17"):
            async with async_http_client(guard, vendor.transport()) as http:
                await http.post("http://v/v1/batches", json={})
            with http_client(guard, vendor.transport()) as blocking:
                blocking.post("http://v/v1/batches", json={})
                own = {"idempotency-key": "mine"}
                blocking.post("http://v/v1/batches", json={}, headers=own)
        told = [headers.get("idempotency-key") for _, _, headers in vendor.log]
        assert told == [None, None, "mine"]

    run_virtual(main())


@pytest.mark.parametrize("make", [http_client, async_http_client])
def test_options(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is about connections reaches the transport, or is refused, as all that is unknown."""
    guard = new_guard(Retry(on=transient))
    made: list[dict[str, Any]] = []
    name = "HTTPTransport" if make is http_client else "AsyncHTTPTransport"

    class Transport(getattr(httpx2, name)):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            made.append(options)

    other = httpx2.AsyncHTTPTransport() if make is http_client else httpx2.HTTPTransport()
    monkeypatch.setattr(httpx2, name, Transport)
    limits = httpx2.Limits(max_connections=1)
    make(guard, verify=False, limits=limits, proxy="http://p", trust_env=False)
    told = {"verify": False, "limits": limits, "proxy": "http://p", "trust_env": False}
    assert made == [told]
    for wrong, advice in (
        (lambda: make("vendor"), "the first argument is a Guard"),
        (lambda: make(guard, mounts={}), "ways around the guard"),
        (lambda: make(guard, Vendor().transport(), proxy="http://p"), "give it to the transport"),
        (lambda: make(guard, other), f"pass one such as httpx2.{name}"),
        (lambda: make(guard, unheard=1), "unheard"),
    ):
        with pytest.raises(TypeError, match=advice):
            wrong()


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_proxies_of_the_environment(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They become patterns of the library's, with the hosts that are excepted."""
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)
        monkeypatch.delenv(f"{name}_proxy", raising=False)
    assert _llm_clients._proxies(library) == {}
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,.a.com,b.com,10.1.2.3,::1,http://c.com,a:b:c")
    excepted = ["localhost", "*.a.com", "*b.com", "10.1.2.3", "[::1]"]
    found = _llm_clients._proxies(library)
    assert found.pop("https://") == "http://proxy:3128"
    assert found == {**{f"all://{host}": None for host in excepted}, "http://c.com": None}
    monkeypatch.setenv("no_proxy", "a.com,*")
    assert _llm_clients._proxies(library) == {}
