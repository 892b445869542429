"""The vendor: so many workers, scripted latencies, and an outage at a scripted time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from math import inf
from random import Random
from typing import Any, Final

import httpx

from seawall.clock import SYSTEM
from seawall.sim import Latency

WORKERS: Final = 6
LATENCY: Final = Latency.lognormal(median=0.4, p99=1.6)
LENGTH: Final = 997


class Script:
    """How long the vendor takes: the same for each visit of a key, in both worlds."""

    def __init__(self) -> None:
        """Begin with no visits."""
        rng = Random(22)  # noqa: S311 - a script
        self._seconds = [LATENCY.draw(rng, 1) for _ in range(LENGTH)]
        self._visits: Counter[int] = Counter()

    def seconds(self, key: int) -> float:
        """Return the seconds of this visit; a negative key is served at once."""
        if key < 0:
            return 0.0
        self._visits[key] += 1
        return self._seconds[(key + 251 * self._visits[key]) % LENGTH]


def make_real() -> Any:
    """Return the vendor as an ASGI app, for uvicorn's `--factory`.

    The header `down` says from when to when it is down, in monotonic time.
    """
    script, workers = Script(), asyncio.Semaphore(WORKERS)
    down = [inf, inf]

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if b"down" in headers:
            down[:] = json.loads(headers[b"down"])
        status = 503 if down[0] <= SYSTEM.now() < down[1] else 200
        if status == httpx.codes.OK and b"key" in headers:
            async with workers:
                seconds = script.seconds(int(headers[b"key"]))
                await asyncio.sleep(seconds)  # noqa: TID251 - the vendor's own time
        answer = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": b""})

    return app
