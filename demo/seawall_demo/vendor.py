"""The vendor: a simulated third-party service, which the control strip can break.

- well: a quote takes 20 to 60 ms.
- broken: half of the quotes are refused immediately, the rest are never answered.
- slow: each takes 1.5 to 3 s, so its slots are soon all taken. Once it is well again, requests in
  progress end as quickly as any other.

Each account has its own slots, so one account does not affect the other. Like many real services,
it does not notice that a caller has given up, and does the work all the same. The search endpoint
is always well, but one answer in thirty takes long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

from seawall import _checks as check
from seawall_demo._lifeline import Lifeline, Message
from seawall_demo._settings import SLOTS, UNPROTECTED, WAITING, pause

WELL: Final = "well"
BROKEN: Final = "broken"
SLOW: Final = "slow"

HANGS: Final = 30.0
"""Seconds after which even a request that is never answered ends."""

STEP: Final = 0.1
"""Interval in seconds at which a slow answer checks whether the vendor is well again."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Vendor:
    """The vendor as an ASGI app, with a `mode`: "well", "broken" or "slow"."""

    def __init__(self, *, rng: Random | None = None) -> None:
        """Start well."""
        self.mode = WELL
        self._rng = rng or Random()  # noqa: S311 - needs no secrecy
        self._places = {account: asyncio.Semaphore(slots) for account, slots in SLOTS.items()}
        self._waiting = dict.fromkeys(SLOTS, 0)

    def on_message(self, message: Message) -> None:
        """Change the mode."""
        self.mode = check.choice("mode", str(message.get("mode")), (WELL, BROKEN, SLOW))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] == "/search":
            await self._search(send)
        else:
            given = dict(scope["headers"]).get(b"x-account", b"").decode("latin-1")
            await self._quote(given if given in SLOTS else UNPROTECTED, receive, send)

    async def _search(self, send: Send) -> None:
        seldom = self._rng.random() < 1 / 30
        await pause(0.4 if seldom else self._rng.uniform(0.004, 0.012))
        await _answer(send, 200, {"name": "something to buy"})

    async def _quote(self, account: str, receive: Receive, send: Send) -> None:
        if self.mode == BROKEN:
            await self._fail(receive, send)
            return
        if self._waiting[account] >= WAITING:
            await _answer(send, 503, {"error": "too many wait already"})
            return
        self._waiting[account] += 1
        try:
            await self._places[account].acquire()
        finally:
            self._waiting[account] -= 1
        try:
            left = self._rng.uniform(1.5, 3.0)
            while self.mode == SLOW and left > 0:
                await pause(STEP)
                left -= STEP
            if left > 0:
                await pause(self._rng.uniform(0.02, 0.06))
        finally:
            self._places[account].release()
        await _answer(send, 200, {"price": self._rng.randrange(100, 10_000)})

    async def _fail(self, receive: Receive, send: Send) -> None:
        if self._rng.random() < 1 / 2:
            await _answer(send, 503, {"error": "out of order"})
            return
        try:
            async with asyncio.timeout(HANGS):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            await _answer(send, 504, {"error": "out of order"})


async def _answer(send: Send, status: int, said: dict[str, Any]) -> None:
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _main(lifeline: Lifeline) -> None:
    from seawall_demo._serving import serve

    vendor = Vendor()
    await serve(vendor, lifeline, on_message=vendor.on_message)


if __name__ == "__main__":
    asyncio.run(_main(Lifeline()))
