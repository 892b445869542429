"""A vendor that misbehaves on demand: what the service of this example depends on.

POST /mode/{word} makes it "good", "failing" (500), "slow" (2 s) or "busy" (429 with Retry-After).
GET /seen tells how many requests it got since, how many at once and how many in any one second.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fastapi import FastAPI, HTTPException

from seawall.clock import current_clock


class Vendor:
    """How it behaves, and what it has seen."""

    def __init__(self, mode: str) -> None:
        """Have seen nothing yet."""
        self.mode = mode
        self.requests = 0
        self.at_once = 0
        self.most_at_once = 0
        self.most_a_second = 0
        self._last_second: deque[float] = deque()
        self._clock = current_clock()

    def arrived(self) -> None:
        """Count a request."""
        now = self._clock.now()
        self.requests += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self._last_second.append(now)
        while self._last_second[0] <= now - 1.0:
            self._last_second.popleft()
        self.most_a_second = max(self.most_a_second, len(self._last_second))


app = FastAPI()
app.state.vendor = Vendor("good")


@app.get("/complete")
async def complete(question: str) -> dict[str, str]:
    """Answer as the mode says."""
    vendor: Vendor = app.state.vendor
    vendor.arrived()
    try:
        if vendor.mode == "slow":
            await asyncio.sleep(2.0)  # noqa: TID251 - real time is what it wastes
        if vendor.mode == "failing":
            raise HTTPException(500, "the vendor is broken")
        if vendor.mode == "busy":
            raise HTTPException(429, "too many", headers={"Retry-After": "1"})
    finally:
        vendor.at_once -= 1
    return {"answer": question.upper()}


@app.post("/mode/{word}")
async def behave(word: str) -> None:
    """Behave so from now on, and forget what was seen."""
    app.state.vendor = Vendor(word)


@app.get("/seen")
async def seen() -> dict[str, int]:
    """Tell what was seen since the mode was set."""
    vendor: Vendor = app.state.vendor
    return {
        "requests": vendor.requests,
        "most_at_once": vendor.most_at_once,
        "most_a_second": vendor.most_a_second,
    }
