"""A vendor that misbehaves on demand: what the service of this example depends on.

POST /mode/{word} makes it "good", "failing" (500), "slow" (2 s) or "busy" (429 with Retry-After).
GET /seen tells how many requests it got, how many at once at most, and the most in any one second.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fastapi import FastAPI, HTTPException, Response

from seawall.clock import current_clock

app = FastAPI()
clock = current_clock()


class Seen:
    """What the vendor has seen so far."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.mode = "good"
        self.requests = 0
        self.at_once = 0
        self.most_at_once = 0
        self.last_second: deque[float] = deque()
        self.most_a_second = 0

    def arrived(self) -> None:
        """Count a request."""
        now = clock.now()
        self.requests += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.last_second.append(now)
        while self.last_second[0] <= now - 1.0:
            self.last_second.popleft()
        self.most_a_second = max(self.most_a_second, len(self.last_second))


seen = Seen()


@app.get("/complete")
async def complete(question: str, response: Response) -> dict[str, str]:
    """Answer as the mode says."""
    seen.arrived()
    try:
        if seen.mode == "slow":
            await asyncio.sleep(2.0)
        if seen.mode == "failing":
            raise HTTPException(500, "the vendor is broken")
        if seen.mode == "busy":
            raise HTTPException(429, "too many", headers={"Retry-After": "1"})
    finally:
        seen.at_once -= 1
    response.headers["x-ratelimit-remaining-requests"] = "1000"
    return {"answer": question.upper()}


@app.post("/mode/{word}")
async def mode(word: str) -> dict[str, str]:
    """Behave so from now on, and forget what was seen."""
    seen.__init__()  # type: ignore[misc]  # noqa: PLC2801 - begin anew
    seen.mode = word
    return {"mode": word}


@app.get("/seen")
async def numbers() -> dict[str, int]:
    """Tell what was seen since the mode was set."""
    return {
        "requests": seen.requests,
        "most_at_once": seen.most_at_once,
        "most_a_second": seen.most_a_second,
    }
