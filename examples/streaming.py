"""A stream of tokens: retried until the first one has come, with a slot until the last one.

python examples/streaming.py
"""

# ruff: noqa: T201 - it prints what it does

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from seawall import Bulkhead, Guard, Retry, Timeout
from seawall.context import current_attempt

slots = Bulkhead(2)
model = Guard("model", Retry(on=ConnectionError, backoff=0.001), slots, Timeout(1.0))


@model
async def complete(prompt: str) -> AsyncGenerator[str]:
    """Fail at first, as a busy model does, then yield the answer word by word."""
    if current_attempt() == 1:
        raise ConnectionError("try again")
    for word in prompt.split():
        yield word.upper()


async def main() -> None:
    """Read one stream to its end, and leave another early."""
    async for word in complete("the tide comes in"):
        print(word, f"({slots.in_flight} slot taken)")

    stream = complete("and goes out again")
    print(await anext(stream))
    await stream.aclose()
    print(f"{slots.in_flight} slots taken, {model.snapshot()['retries']} retries")


if __name__ == "__main__":
    asyncio.run(main())

# It prints:
#
# > THE (1 slot taken)
# > TIDE (1 slot taken)
# > COMES (1 slot taken)
# > IN (1 slot taken)
# > AND
# > 0 slots taken, 2 retries
