"""Real clients against a real server with the edge: told 429 or 503, they come back in time.

No time passes: the edge is on a virtual clock, and so is what each client calls its sleep. Who came
back before its time would be refused again, and the server's log would show it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import anthropic
import anyio
import http_sfv
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

from seawall import Guard, Retry, transient
from seawall.clients import httpx as guarded_httpx
from seawall.clients import httpx2 as guarded_httpx2
from seawall.clients import requests as guarded_requests
from seawall.clock import VirtualClock
from seawall.web import problems
from seawall.web.edge import Edge
from seawall.web.limits import RequestLimit, RequestLimits
from tests.web.support import serve

pytestmark = pytest.mark.alone

WAIT = 3.0
"""Seconds that whoever is refused has to wait."""

COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
    ],
}
MESSAGE = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
ASKED: list[dict[str, str]] = [{"role": "user", "content": "hello"}]


async def vendor(scope: Any, _receive: Any, send: Any) -> None:
    """Answer as a vendor of language models does, or with a little JSON."""
    answers = {"/v1/chat/completions": COMPLETION, "/v1/messages": MESSAGE}
    body = json.dumps(answers.get(scope["path"], {"ok": True})).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Site:
    """The vendor behind the edge, what it answered when, and a clock."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.clock = VirtualClock(1000.0)
        self.log: list[tuple[float, int]] = []
        by = "address" if status == 429 else None
        # A caller's own limit is 429; that of all together 503, and they do not come back together.
        self.latest = WAIT if status == 429 else WAIT + problems.SPREAD
        limits = RequestLimits(RequestLimit(f"1/{WAIT:.0f}s", by=by, burst=1), clock=self.clock)
        self.edge = Edge(vendor, name=f"edge-{status}", limits=limits, clock=self.clock)
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Keep a log of the answers."""

        async def logged(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.log.append((self.clock.now(), message["status"]))
            await send(message)

        await self.edge(scope, receive, logged)

    def begin(self) -> float:
        """Let everything be as new, at a whole second; return the instant."""
        self.clock.advance_to(self.clock.now() // 1 + 100.0)
        self.log.clear()
        return self.clock.now()


@pytest.fixture(scope="module", params=[429, 503])
def running(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Return a server that refuses with that status."""
    site = Site(request.param)
    with serve(site) as url:
        site.url = url
        yield site
    site.edge.close()


class Module:
    """A module as one client sees it, with a sleep of its own."""

    def __init__(self, module: ModuleType, sleep: Callable[[float], object]) -> None:
        self._module = module
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@pytest.fixture
def site(running: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return the same with clients that sleep in virtual time."""

    async def asleep(seconds: float) -> None:
        running.clock.sleep(seconds)

    for name in ("urllib3.util.retry", "openai._base_client", "anthropic._base_client"):
        monkeypatch.setattr(f"{name}.time", Module(time, running.clock.sleep))
    for name in ("openai._base_client", "anthropic._base_client"):
        monkeypatch.setattr(f"{name}.anyio", Module(anyio, asleep))
    return running


def guard(site: Site) -> Guard:
    retry = Retry(attempts=3, on=transient, backoff=0.01)
    return Guard("vendor", retry, clock=site.clock)


def by_urllib3(site: Site) -> None:
    with urllib3.PoolManager(retries=urllib3.Retry(total=2)) as pool:
        for _ in range(2):
            assert pool.request("GET", site.url).status == 200


def by_requests(site: Site) -> None:
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=urllib3.Retry(total=2)))
        for _ in range(2):
            assert session.get(site.url, timeout=5).status_code == 200


def by_guarded_requests(site: Site) -> None:
    with closing(guard(site)) as vendor, requests.Session() as session:
        session.mount("http://", guarded_requests.GuardedAdapter(vendor))
        for _ in range(2):
            assert session.get(site.url, timeout=5).status_code == 200


def by_guarded_httpx(site: Site) -> None:
    with closing(guard(site)) as vendor:
        transport = guarded_httpx.GuardedTransport(vendor)
        with httpx.Client(transport=transport) as client:
            for _ in range(2):
                assert client.get(site.url).status_code == 200


def by_guarded_httpx2(site: Site) -> None:
    with closing(guard(site)) as vendor:
        transport = guarded_httpx2.GuardedTransport(vendor)
        with httpx2.Client(transport=transport) as client:
            for _ in range(2):
                assert client.get(site.url).status_code == 200


def by_openai(site: Site) -> None:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="k", max_retries=2) as client:
        for _ in range(2):
            made = client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
            assert made.choices[0].message.content == "hi"


def by_async_openai(site: Site) -> None:
    async def scene() -> None:
        options: dict[str, Any] = {"base_url": f"{site.url}/v1", "api_key": "k", "max_retries": 2}
        async with openai.AsyncOpenAI(**options) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]

    asyncio.run(scene())


def by_anthropic(site: Site) -> None:
    with anthropic.Anthropic(base_url=site.url, api_key="k", max_retries=2) as client:
        for _ in range(2):
            made = client.messages.create(model="m", max_tokens=9, messages=ASKED)  # type: ignore[arg-type]
            assert made.content[0].type == "text"


def by_async_anthropic(site: Site) -> None:
    async def scene() -> None:
        options: dict[str, Any] = {"base_url": site.url, "api_key": "k", "max_retries": 2}
        async with anthropic.AsyncAnthropic(**options) as client:
            for _ in range(2):
                await client.messages.create(model="m", max_tokens=9, messages=ASKED)  # type: ignore[arg-type]

    asyncio.run(scene())


CLIENTS = [
    by_urllib3,
    by_requests,
    by_guarded_requests,
    by_guarded_httpx,
    by_guarded_httpx2,
    by_openai,
    by_async_openai,
    by_anthropic,
    by_async_anthropic,
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_clients_come_back_when_they_were_told_to(site: Site, client: Any) -> None:
    """Refused once, each waits for as long as it was told, and is then served."""
    began = site.begin()
    client(site)
    statuses = [status for _, status in site.log]
    assert statuses == [200, site.status, 200]
    at = [instant - began for instant, _ in site.log]
    assert at[:2] == [0.0, 0.0]
    assert WAIT <= at[2] <= site.latest * 1.5


def test_not_told_when_they_come_too_early(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Retry-After the same clients are refused again, or give up."""
    monkeypatch.setattr(problems, "write_retry_after", lambda _seconds: "")
    for client in (by_urllib3, by_guarded_httpx, by_openai, by_anthropic):
        site.begin()
        try:
            client(site)
        except (AssertionError, openai.APIStatusError, anthropic.APIStatusError):
            pass
        assert [status for _, status in site.log] != [200, site.status, 200]


def parsed(value: str) -> list[tuple[str, dict[str, Any]]]:
    fields = http_sfv.List()
    fields.parse(value.encode())
    return [(item.value, dict(item.params)) for item in fields]


def test_real_answers_parse(site: Site) -> None:
    """The fields of real answers, by an independent parser, and the body of a refusal."""
    site.begin()
    with httpx.Client() as client:
        first, second = client.get(site.url), client.get(site.url)
    assert (first.status_code, second.status_code) == (200, site.status)
    assert WAIT <= int(second.headers["retry-after"]) <= site.latest
    assert second.headers["content-type"] == "application/problem+json"
    body = second.json()
    assert body["status"] == site.status
    if site.status == 503:
        assert body["type"].endswith("temporary-reduced-capacity")
        assert "ratelimit" not in first.headers
        return
    assert body["type"].endswith("quota-exceeded")
    assert body["violated-policies"] == ["address"]
    for answer, state in ((first, {"r": 0, "t": 3}), (second, {"r": 0, "t": 3})):
        assert parsed(answer.headers["ratelimit-policy"]) == [("address", {"q": 1, "w": 3})]
        assert parsed(answer.headers["ratelimit"]) == [("address", state)]
