"""A vendor that misbehaves on demand: the dependency of this example's service.

POST /mode/{word} makes it "good", "failing" (500), "flaky" (500 for every tenth request), "slow"
(2 s) or "busy" (429 with Retry-After: 1). GET /seen returns how many requests it got since then,
how many callers waited at once, and the shortest time in seconds after which a request came again.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, HTTPException, Request

from seawall.clock import current_clock


class Vendor:
    """Its mode, and its counts."""

    def __init__(self, mode: str) -> None:
        """Start with no counts."""
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
        """Wait for `seconds`, or until the caller disconnects."""
        try:
            async with asyncio.timeout(0.05):  # notice a disconnect before counting
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
    """Answer according to the mode."""
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
    """Set the mode, and reset the counts."""
    app.state.vendor = Vendor(word)


@app.get("/seen")
async def seen() -> dict[str, int | float | None]:
    """Return the counts since the mode was set."""
    vendor: Vendor = app.state.vendor
    return {
        "requests": vendor.requests,
        "most_at_once": vendor.most_at_once,
        "soonest_again": vendor.soonest_again,
    }
