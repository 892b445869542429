"""Server-sent events: one sampler for all viewers, and a stream for each of them.

Promises:
- A sample is taken once, and written as JSON at most once, if there is a viewer.
- A slow viewer gets the newest frame and skips the rest; nothing is queued.
- A stream ends when its client disconnects, does not read, loses its permission, or the service
  stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from seawall.dashboard.responses import SAFE, RequestRefused, to_json
from seawall.web.asgi_types import Send

ASKED_AGAIN: Final = 30.0
"""Seconds after which the permission of a viewer is checked again."""
HEARTBEAT: Final = 15.0
"""Seconds without data after which a comment is sent, so that the stream is not taken for dead."""
TAKEN_WITHIN: Final = 30.0
"""Timeout in seconds for a client to read what it is sent."""
ENDED_WITHIN: Final = 0.4
"""The same timeout once streams are over: a client that does not read delays the service's stop."""
BEGIN: Final = b"retry: 2000\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
    *SAFE,
]


class Frame:
    """One sample, ready to send: everything that is the same for all viewers, as JSON."""

    def __init__(
        self,
        number: int,
        title: bytes,
        at: bytes,
        write: Callable[[], Awaitable[bytes]],
        extra: bytes,
    ) -> None:
        """Store what is to be sent; `write` writes the part that shows the pods, on demand."""
        self.number = number
        self._title = title
        self._at = at
        self._write = write
        self._extra = extra
        self._body: bytes | None = None
        self._once = asyncio.Lock()

    async def message(self, operator: str | None, history: bytes = b"null") -> bytes:
        """Return the message for one viewer."""
        async with self._once:  # other viewers wait for it; one that disconnects does no harm
            if self._body is None:
                self._body = await self._write()
        head = b'{"title":%b,"at":%b,"operator":' % (self._title, self._at)
        parts = [head, to_json(operator), b",", self._body, b',"history":', history]
        return b"".join([*parts, b',"extra":', self._extra, b"}"])


class Broadcast:
    """The newest frame, and a way to wait for the next one; for one event loop."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.over = False
        """Whether there will be no more frames: streams end."""
        self._next: asyncio.Future[None] | None = None
        self.sending: set[asyncio.Timeout] = set()
        """Timeouts of the sends in progress, which `end` shortens."""

    @property
    def awaited(self) -> bool:
        """Whether a viewer waits for the next frame."""
        return self._next is not None

    def publish(self, frame: Frame) -> None:
        """Set a new frame, and wake all waiters."""
        self.frame = frame
        self._wake()

    def end(self) -> None:
        """Publish no more frames; sends in progress get at most `ENDED_WITHIN` seconds."""
        self.over = True
        self._wake()
        for limit in self.sending:
            if not limit.expired():  # an expired one cannot be rescheduled
                soon = asyncio.get_running_loop().time() + ENDED_WITHIN
                limit.reschedule(min(soon, limit.when() or soon))

    def _wake(self) -> None:
        waited, self._next = self._next, None
        if waited is not None and not waited.done():
            waited.set_result(None)

    def beyond(self, number: int) -> asyncio.Future[None]:
        """Return a future that is done when there is a frame after `number`, or no more frames.

        All waiters share it, so a waiter that gives up must not cancel it.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self.over or (self.frame is not None and self.frame.number > number):
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return self._next


class Stream:
    """The stream of one viewer."""

    def __init__(
        self,
        broadcast: Broadcast,
        send: Send,
        ask: Callable[[], Awaitable[str | None]],
        history: Callable[[], bytes],
        after: int = -1,
    ) -> None:
        """Send by `send`; `ask()` returns the operator's name, or raises `RequestRefused`.

        Start with a frame `after` that number.
        """
        self._after = after
        self._broadcast = broadcast
        self._send = send
        self._ask = ask
        self._history = history

    async def run(self, receive: Callable[[], Awaitable[Any]], operator: str | None) -> None:
        """Send until the stream ends, for whatever reason."""
        gone = asyncio.create_task(_until_gone(receive))
        try:
            # A client that did not read the last part would not read the closing one, either.
            start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            began = await self._taken(start) and await self._take(BEGIN)
            if began and await self._follow(gone, operator) and not gone.done():
                await self._take(b"", more=False)
        finally:
            gone.cancel()
            await asyncio.wait([gone])
            if not gone.cancelled():
                # Marks it as retrieved: a server whose `receive` fails has lost its client.
                gone.exception()

    async def _follow(self, gone: asyncio.Task[None], operator: str | None) -> bool:
        """Send new frames until the stream ends; return False if the client does not read."""
        loop = asyncio.get_running_loop()
        broadcast = self._broadcast
        number, first = self._after, True
        asked_again = loop.time() + ASKED_AGAIN
        while not gone.done():
            news = broadcast.beyond(number)
            await asyncio.wait({gone, news}, timeout=HEARTBEAT, return_when="FIRST_COMPLETED")
            if gone.done() or broadcast.over:
                break
            if loop.time() >= asked_again:
                try:
                    operator = await self._ask()
                except RequestRefused:
                    break
                asked_again = loop.time() + ASKED_AGAIN
            frame = broadcast.frame
            if frame is None or frame.number <= number:
                sent = b": still here\n\n"
            else:
                history = self._history() if first else b"null"
                message = await frame.message(operator, history)
                sent = b"".join((b"event: message\ndata: ", message, b"\n\n"))
                number, first = frame.number, False
            if not await self._take(sent):
                return False
        return True

    async def _take(self, body: bytes, *, more: bool = True) -> bool:
        """Send a part; return False if the client is gone, or does not read it."""
        return await self._taken({"type": "http.response.body", "body": body, "more_body": more})

    async def _taken(self, message: dict[str, Any]) -> bool:
        broadcast = self._broadcast
        within = ENDED_WITHIN if broadcast.over else TAKEN_WITHIN
        try:
            async with asyncio.timeout(within) as limit:
                broadcast.sending.add(limit)
                try:
                    await self._send(message)
                finally:
                    broadcast.sending.discard(limit)
        except (OSError, TimeoutError):
            return False
        return True


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
