"""A vendor that misbehaves on demand: what the service of this example depends on.

POST /mode/{word} makes it "good", "failing" (500), "flaky" (500 for every tenth request), "slow"
(2 s) or "busy" (429 with Retry-After: 1). GET /seen tells how many requests it got since, how many
callers waited at once, and after how many seconds the soonest of them asked the same again.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, HTTPException, Request

from seawall.clock import current_clock


class Vendor:
    """How it behaves, and what it has seen."""

    def __init__(self, mode: str) -> None:
        """Have seen nothing yet."""
        self.mode = mode
        self.requests = 0
        self.at_once = 0
        self.most_at_once = 0
        self.soonest_again: float | None = None
        self._asked: dict[str, float] = {}
        self._clock = current_clock()

    def arrived(self, question: str) -> None:
        """Count a request."""
        now = self._clock.now()
        self.requests += 1
        self.at_once += 1
        if question in self._asked:
            gap = now - self._asked[question]
            self.soonest_again = min(gap, self.soonest_again or gap)
        self._asked[question] = now

    async def waste(self, request: Request, seconds: float) -> None:
        """Let so much time pass, or as much as the caller waits."""
        try:
            async with asyncio.timeout(0.05):  # who has hung up is noticed before we count
                await _gone(request)
        except TimeoutError:
            self.most_at_once = max(self.most_at_once, self.at_once)
        else:
            return
        try:
            async with asyncio.timeout(seconds):
                await _gone(request)
        except TimeoutError:
            pass


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


app = FastAPI()
app.state.vendor = Vendor("good")


@app.get("/complete")
async def complete(question: str, request: Request) -> dict[str, str]:
    """Answer as the mode says."""
    vendor: Vendor = app.state.vendor
    vendor.arrived(question)
    try:
        if vendor.mode == "slow":
            await vendor.waste(request, 2.0)
        if vendor.mode == "failing" or (vendor.mode == "flaky" and vendor.requests % 10 == 0):
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
async def seen() -> dict[str, int | float | None]:
    """Tell what was seen since the mode was set."""
    vendor: Vendor = app.state.vendor
    return {
        "requests": vendor.requests,
        "most_at_once": vendor.most_at_once,
        "soonest_again": vendor.soonest_again,
    }
