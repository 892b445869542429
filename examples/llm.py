"""A vendor of language models is overloaded, then down: retries, token limits, another vendor.

python examples/llm.py
"""

# ruff: noqa: T201 - it prints what it does

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from seawall import Breaker, Guard, Retry, RetryBudget, Timeout, transient
from seawall.clients.llm import Model, Models, TokenLimits, async_http_client

asked: list[str] = []


def first_vendor(_request: httpx2.Request) -> httpx2.Response:
    """Be overloaded once, answer once, and fail from then on."""
    asked.append("first")
    if asked == ["first", "first"]:
        usage = {"prompt_tokens": 20, "completion_tokens": 80, "total_tokens": 100}
        return httpx2.Response(200, json={"text": "from the first", "usage": usage})
    return httpx2.Response(529, json={"error": {"type": "overloaded_error"}})


def second_vendor(_request: httpx2.Request) -> httpx2.Response:
    """Answer every request."""
    asked.append("second")
    usage = {"input_tokens": 20, "output_tokens": 50}
    return httpx2.Response(200, json={"text": "from the second", "usage": usage})


def guard_for(name: str) -> Guard:
    """Return the stack around one vendor."""
    return Guard(
        name,
        Retry(on=transient, attempts=2, backoff=0.001, budget=RetryBudget()),
        Breaker(min_calls=2, break_for=30.0),
        TokenLimits(requests="500/min", tokens="10k/week", max_wait=1.0),
        Timeout(10.0, sync="cooperative"),  # for http_client(guard), of blocking SDKs, too
    )


async def main() -> None:
    """Ask three times."""
    # In a real service: openai.AsyncOpenAI(http_client=async_http_client(guard), max_retries=0)
    first, second = guard_for("first"), guard_for("second")
    async with (
        async_http_client(first, httpx2.MockTransport(first_vendor)) as one,
        async_http_client(second, httpx2.MockTransport(second_vendor)) as two,
    ):

        def ask(http: Any, path: str) -> Any:
            async def asks(prompt: str) -> str:
                body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
                answer = await http.post(f"http://vendor{path}", json=body)
                answer.raise_for_status()
                return str(answer.json()["text"])

            return asks

        models = Models(
            Model("large", ask(one, "/v1/chat/completions")),
            Model("other", ask(two, "/v1/messages")),
        )
        for _ in range(3):
            before = len(asked)
            result = await models.aattempt("How high is the tide?")
            print(result.value, result.reason, asked[before:])

    for guard in (first, second):
        _, breaker, limits, _ = guard.snapshot()["policies"]
        left = limits["limits"]["tokens"]["left"]
        print(f"{guard.name}: {left} tokens left, breaker {breaker['state']}")


if __name__ == "__main__":
    asyncio.run(main())

# It prints:
#
# > from the first None ['first', 'first']
# > from the second 529 ['first', 'first', 'second']
# > from the second circuit_open ['second']
# > first: 9900 tokens left, breaker open
# > second: 9860 tokens left, breaker closed
