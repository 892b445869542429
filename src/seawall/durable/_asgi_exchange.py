"""One request that is carried out: its answer on the way to the client, and into the record.

Promises: the end of an answer reaches the client when the record is on disk, not before: a client
that saw it complete will never have it done again. Small answers are sent when they are complete. A
stream (a body in parts, of no declared length) passes as it comes, but for its end. Where a length
was declared the last part that has something in it is held back, for with it the client has all. In
HTTP/1.0 a stream ends where the connection does, so that no end can be held back: all of it is, up
to what a record holds.

A client that goes away changes nothing: the app is not told, works to its end, and is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal, Protocol

from seawall.durable._asgi_answers import (
    NOTHING_DONE,
    RequestOutcome,
    check_sendable,
    failure_of,
    recorded,
)
from seawall.errors import LeaseLost, Rejected, SeawallError
from seawall.models.idempotency import Answer, Headers
from seawall.web.asgi_types import Message, Send
from seawall.web.problems import problem_of

UNSEEN: Final = frozenset(
    {
        "http.response.pathsend",
        "http.response.zerocopysend",
        "http.response.trailers",
    }
)
"""Ways to send what we would not see, and so could not record: the app is not offered them."""


class StillOpen(RuntimeError):
    """What completes the claim is neither committed nor rolled back, and the app has answered."""


class Settling(Protocol):
    """What becomes of the claim."""

    async def settle(
        self, answer: Answer, outcome: RequestOutcome
    ) -> Callable[[], Awaitable[None]] | None:
        """Record `answer` or free the key; return what sends another answer, if there is one."""
        ...

    async def abandon(self) -> Callable[[], Awaitable[None]] | None:
        """Free the key; return what sends an answer, if there is one after all."""
        ...


class Exchange:
    """What the app is given to receive from and to send to."""

    def __init__(
        self, body: bytes, to: Send, settling: Settling, most: int, never: frozenset[bytes]
    ) -> None:
        """Hand `body` to the app, and its answer `to` the client; record up to `most` bytes."""
        self._body: bytes | None = body
        self._to = to
        self._settling = settling
        self._most = most
        self._never = never
        self._over = asyncio.Event()
        self._settled = False
        self._start: Message | None = None
        self._begun = False
        """Whether the client has been sent anything."""
        self._holds: Literal["end", "last part", "all"] = "end"
        self._held: list[Message] = []
        self._closes = False
        """Whether a body without a length ends with its connection."""
        self._recording = bytearray()
        self._size = 0
        self._gone = False
        self._trouble: Exception | None = None

    async def run(
        self, app: Callable[..., Awaitable[None]], scope: MutableMapping[str, Any]
    ) -> None:
        """Let the app answer; see to it that the claim is settled, unless it was cancelled."""
        self._closes = scope.get("http_version") == "1.0"
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            if not self._settled:
                await self._fail(error)
            raise
        if not self._settled:
            await self._fail(None)
        if self._trouble is not None:
            raise self._trouble

    # What the app receives

    async def receive(self) -> Message:
        """Return the body; then, when the answer is complete and not before, that all is over."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    # What the app sends

    async def send(self, message: Message) -> None:
        """Take a message of the answer."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._start is not None:
                raise RuntimeError("the answer has started already")
            # Looked at here, where what makes no sense is an error of the app's: later it would
            # look as if the record could not be made. Copied, for it may be read once only.
            headers: Headers = [(_checked(n), _checked(v)) for n, v in message.get("headers", ())]
            status = int(message["status"])
            check_sendable(status, headers)
            self._start = {**message, "status": status, "headers": headers}
            if any(name.lower() == b"content-length" for name, _ in headers):
                self._holds = "last part"
            elif self._closes:
                self._holds = "all"
        elif kind != "http.response.body":
            await self._pass(message)  # such as early hints, which are of no answer
        elif self._start is None or self._settled:
            raise RuntimeError("a body before its answer has started, or after its end")
        else:
            part = bytes(message.get("body", b""))
            self._size += len(part)
            if self._size <= self._most:
                self._recording += part
            else:
                self._recording.clear()
            if message.get("more_body"):
                await self._more(part)
            else:
                await self._end(message)

    async def _more(self, part: bytes) -> None:
        if not part:
            return
        self._held.append({"type": "http.response.body", "body": part, "more_body": True})
        if self._holds == "all" and self._size <= self._most:
            return
        stay = 0 if self._holds == "end" else 1
        while len(self._held) > stay:
            await self._release(self._held.pop(0))

    async def _release(self, message: Message) -> None:
        """Send what may be sent now, after the start of the answer."""
        if not self._begun and self._start is not None:
            self._begun = True
            await self._pass(self._start)
        await self._pass(message)

    async def _pass(self, message: Message) -> None:
        if self._gone:
            return
        try:
            await self._to(message)
        except OSError:  # the client went away
            self._gone = True
        except Exception as error:  # noqa: BLE001 - raised when the claim is settled
            self._gone, self._trouble = True, error

    # The end

    async def _end(self, last: Message) -> None:
        """Record the answer; then let the client have the end of it."""
        assert self._start is not None  # noqa: S101 - as `send` has seen
        status: int = self._start["status"]
        headers: Headers = self._start["headers"]
        self._settled = True
        try:
            body = bytes(self._recording) if self._size <= self._most else None
            answer = recorded(status, headers, body, self._never)
            instead = await self._settling.settle(answer, RequestOutcome(status, headers))
            self._recording.clear()
            if instead is not None:
                await self._send_instead(instead)
            else:
                for message in (*self._held, last):
                    await self._release(message)
        except StillOpen:
            self._settled = False  # the app is to roll back, and is told so where it sends
            raise
        finally:
            self._over.set()

    async def _send_instead(self, instead: Callable[[], Awaitable[None]]) -> None:
        if self._begun:
            # The client has a part of an answer that does not count: it must not have its end.
            raise LeaseLost("the answer could not be recorded: another worker may have taken over")
        self._begun = True
        if not self._gone:
            await instead()

    async def _fail(self, error: Exception | None) -> None:
        """Settle what the app has left without an answer, or with half of one."""
        self._settled = True
        if not self._begun and says_nothing_was_done(error):
            instead = await self._settling.abandon()
            if instead is not None:
                await self._send_instead(instead)
            self._over.set()
            return
        status, headers, body = failure_of(error)
        answer = recorded(status, headers, body, self._never)
        instead = await self._settling.settle(answer, RequestOutcome(status, headers, error))
        if instead is not None and not self._begun:
            await self._send_instead(instead)
        elif not self._begun:
            self._start = {"type": "http.response.start", "status": status, "headers": headers}
            await self._release({"type": "http.response.body", "body": body})
        self._over.set()


def _checked(word: object) -> bytes:
    if not isinstance(word, (bytes, bytearray, memoryview)):
        raise TypeError(f"a header with {word!r}: ASGI has names and values as bytes")
    return bytes(word)


def says_nothing_was_done(error: Exception | None) -> bool:
    """Tell whether an error is a refusal (a `Rejected`): also one that a vendor's SDK has wrapped.

    By its kind, and not by what a client is told of it: a lease that was lost, a store that was
    away, or the status of a service that was asked, may come after the effect.
    """
    if error is None or isinstance(error, SeawallError):
        return isinstance(error, Rejected)
    problem = problem_of(error)
    if problem is None or problem.status not in NOTHING_DONE:
        return False
    cause: BaseException | None = error  # such a status is told of none but our own, further in
    while cause is not None and not isinstance(cause, SeawallError):
        cause = cause.__cause__
    return isinstance(cause, Rejected)
