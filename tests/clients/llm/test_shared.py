"""The limits of a vendor, shared by all pods: estimates, settlements and the vendor's words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from seawall import RateLimited, RedisStore
from seawall.clients.llm import TokenLimits, async_http_client
from tests.clients.llm.support import Vendor
from tests.redis.conftest import client, new_store, redis_url
from tests.redis.support import eventually
from tests.support import new_guard

pytestmark = pytest.mark.alone

__all__ = ["client", "new_store", "redis_url"]

BODY = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 596}  # 600 tokens


def test_pods_share_tokens(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one pod reserves the other cannot have, until it is settled; a word counts for both."""
    pods = []
    for _ in range(2):
        limits = TokenLimits(
            requests="9000/week", tokens="1000/week", shared=new_store(), name="vendor"
        )
        pods.append((limits, new_guard(limits)))
    (one, guard), (other, other_guard) = pods
    vendor = Vendor(used=(7, 5))
    got: list[Any] = []

    def left() -> int:
        return other.peek(prompt="", max_tokens=1).left

    async def ask(through: Any, path: str = "/v1/chat/completions", **more: Any) -> None:
        async with (
            async_http_client(through, vendor.transport()) as http,
            http.stream("POST", f"http://v{path}", json={**BODY, **more}) as answer,
        ):
            if "stream" in more:
                try:
                    await ask(other_guard)
                except httpx2.TransportError as error:
                    got.append(error)
            await answer.aread()

    asyncio.run(ask(guard, "/v1/messages", stream=True))
    assert [type(error).__mro__[1] for error in got] == [RateLimited]  # while 600 were reserved
    eventually(lambda: left() == 1000 - 12)
    assert vendor.asked == 1
    assert one._sharing is not None
    told: list[Any] = []
    lower = one._sharing.share.lower
    monkeypatch.setattr(one._sharing.share, "lower", lambda *a: (told.append(a), lower(*a)))
    one.apply_headers({"x-ratelimit-remaining-tokens": "40", "x-ratelimit-reset-tokens": "1h0m0s"})
    eventually(lambda: left() == 40)
    asks = len(told)
    said = {"x-ratelimit-limit-tokens": "1000", "x-ratelimit-reset-tokens": "1h0m0s"}
    for remaining in (30, 29, 31, 28):
        one.apply_headers({**said, "x-ratelimit-remaining-tokens": str(remaining)})
    assert len(told) == asks  # no news
    monkeypatch.setattr(TokenLimits, "_is_news", lambda *_: True)
    one.apply_headers({**said, "x-ratelimit-remaining-tokens": "30"})
    assert len(told) > asks
