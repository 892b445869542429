"""Agent libraries over our HTTP client, against a vendor on a real socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from threading import Event
from typing import Any

import openai
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a host for its list of prices

import litellm
from langchain_openai import ChatOpenAI
from litellm.litellm_core_utils.logging_worker import GLOBAL_LOGGING_WORKER
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from seawall import Breaker, CircuitOpen, Guard, Retry, TimedOut, Timeout, deadline, transient
from seawall._failures import reason_of
from seawall.clients.llm import TokenLimits, async_http_client, http_client
from seawall.clock import SYSTEM
from tests.clients.llm.support import Answer, Vendor, refuses, served
from tests.support import new_guard

pytestmark = pytest.mark.alone

Ask = Callable[[], Awaitable[str]]


def sdk_of(http: Any, url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(http_client=http, max_retries=0, api_key="k", base_url=f"{url}/v1")


def by_pydantic_ai(http: Any, url: str) -> Ask:
    provider = OpenAIProvider(openai_client=sdk_of(http, url))
    agent = Agent(OpenAIChatModel("m", provider=provider))

    async def ask() -> str:
        return (await agent.run("hello")).output

    return ask


def by_langchain(http: Any, url: str) -> Ask:
    chat = ChatOpenAI(
        model="m", http_async_client=http, max_retries=0, api_key="k", base_url=f"{url}/v1"
    )

    async def ask() -> str:
        return str((await chat.ainvoke("hello")).content)

    return ask


def by_litellm(http: Any, url: str) -> Ask:
    sdk = sdk_of(http, url)

    async def ask() -> str:
        answer = await litellm.acompletion(
            model="openai/m",
            messages=[{"role": "user", "content": "hello"}],
            client=sdk,
            max_retries=0,
        )
        return str(answer.choices[0].message.content)

    return ask


LIBRARIES = pytest.mark.parametrize(
    "by", [by_pydantic_ai, by_langchain, by_litellm], ids=lambda by: by.__name__[3:]
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Return one event loop for all tests: LiteLLM's log belongs to the loop that it began in."""

    async def finish() -> None:
        await GLOBAL_LOGGING_WORKER.flush()
        await GLOBAL_LOGGING_WORKER.stop()

    with asyncio.Runner() as runner:
        yield runner
        runner.run(finish())


def run(
    loop: asyncio.Runner,
    vendor: Vendor,
    guard: Guard,
    by: Any,
    main: Callable[[Ask], Awaitable[None]],
) -> None:
    """Run `main(ask)` against `vendor` on a socket."""

    async def all_of_it(url: str) -> None:
        async with async_http_client(guard) as http, asyncio.timeout(60):
            await main(by(http, url))

    with served(vendor) as url:
        loop.run(all_of_it(url))


def has(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether such an error led to this one: a cause, or what was handled at the raise."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


@LIBRARIES
def test_a_429_is_tried_again_when_the_vendor_says(by: Any, loop: asyncio.Runner):
    """By the guard alone: two requests, a second apart, and the tokens are settled."""
    vendor = Vendor(refuses(429, retry_after="1"), used=(20, 30))
    limits = TokenLimits(requests="1000/week", tokens="100k/week", max_wait=30.0)
    guard = new_guard(Retry(on=transient, attempts=3, backoff=0.001), limits, Timeout(30.0))

    async def main(ask: Ask) -> None:
        begun = SYSTEM.now()
        assert await ask() == "one two three"
        assert SYSTEM.now() - begun >= 1.0

    run(loop, vendor, guard, by, main)
    assert vendor.asked == 2
    told = next(p for p in guard.snapshot()["policies"] if p["policy"] == "rate_limit")["limits"]
    assert (1000 - told["requests"]["left"], 100_000 - told["tokens"]["left"]) == (2, 50)


@LIBRARIES
def test_an_open_breaker_refuses_before_a_request_is_sent(by: Any, loop: asyncio.Runner):
    """One failure opens it; no library retries on its own or hides the refusal."""
    vendor = Vendor(*[refuses(500)] * 9)
    guard = new_guard(Breaker(consecutive=1), Timeout(30.0))
    raised: list[BaseException] = []

    async def main(ask: Ask) -> None:
        for _ in range(3):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - each has its own
                await ask()
            raised.append(caught.value)

    run(loop, vendor, guard, by, main)
    assert vendor.asked == 1
    assert [has(error, CircuitOpen) for error in raised] == [False, True, True]
    if by is not by_litellm:  # it raises its own errors without a cause
        assert [reason_of(error) for error in raised[1:]] == ["circuit_open"] * 2


@LIBRARIES
def test_a_deadline_ends_a_call(by: Any, loop: asyncio.Runner):
    """A vendor that does not answer costs the caller no more than its time."""
    goes_on = Event()

    def hangs(_path: str, _body: Any) -> Answer:
        goes_on.wait(60)
        return Answer(200, {}, [b"{}"])

    vendor = Vendor(hangs)
    guard = new_guard(Retry(on=transient, attempts=3, backoff=0.001), Timeout(30.0))
    raised: list[BaseException] = []

    async def main(ask: Ask) -> None:
        begun = SYSTEM.now()
        with deadline(0.5), pytest.raises(Exception) as caught:  # noqa: PT011 - each has its own
            await ask()
        raised.append(caught.value)
        assert 0.4 < SYSTEM.now() - begun < 25.0
        goes_on.set()

    run(loop, vendor, guard, by, main)
    assert vendor.asked == 1
    assert has(raised[0], TimedOut)


def test_the_blocking_side_of_langchain_is_guarded_too():
    """`invoke` takes the client that is given as `http_client`."""
    vendor = Vendor(refuses(503))
    guard = new_guard(Retry(on=transient, attempts=2, backoff=0.001))
    with served(vendor) as url, http_client(guard) as http:
        chat = ChatOpenAI(
            model="m", http_client=http, max_retries=0, api_key="k", base_url=f"{url}/v1"
        )
        assert chat.invoke("hello").content == "one two three"
    assert vendor.asked == 2
