"""One request that is executed: its response on the way to the client and into the record.

Promises:

- The end of a response reaches the client only after the record is on disk: a request whose client
  saw a complete response never runs again.
- Small responses are sent when they are complete. A stream (a body in parts, without a declared
  length) passes immediately, except for its end. With a declared length, the last non-empty part is
  held back, because with it the client has everything. In HTTP/1.0 a stream ends with the
  connection, so its end cannot be held back: all of it is, up to the size of a record.
- A client that disconnects changes nothing: the app does not learn of it, runs to its end, and is
  recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Literal

from seawall.durable.http.responses import (
    NOTHING_DONE,
    RequestOutcome,
    check_sendable,
    failure_of,
    recorded,
)
from seawall.errors import LeaseLost, Rejected, SeawallError
from seawall.models.idempotency import Headers
from seawall.web.asgi_types import Message, Send
from seawall.web.problems import problem_of

if TYPE_CHECKING:
    from seawall.durable.http.request import RequestExecution

UNSEEN: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
"""ASGI extensions whose content we would not see and could not record: hidden from the app."""


class StillOpen(RuntimeError):
    """The app has responded, but the transaction that completes the claim is still open."""


class RecordedExchange:
    """The `receive` and `send` of the app."""

    def __init__(
        self, body: bytes, to: Send, request: RequestExecution, most: int, never: frozenset[bytes]
    ) -> None:
        """Pass `body` to the app and its response `to` the client; record up to `most` bytes.

        `request` stores the response or frees the key, and may return a sender of another response.
        """
        self._body: bytes | None = body
        self._to = to
        self._request = request
        self._most = most
        self._never = never
        self._over = asyncio.Event()
        self._settled = False
        self._start: Message | None = None
        self._begun = False
        """Whether anything has been sent to the client."""
        self._holds: Literal["end", "last part", "all"] = "end"
        self._held: list[Message] = []
        self._closes = False
        """Whether the end of the connection marks the end of a body without a length."""
        self._recording = bytearray()
        self._size = 0
        self._gone = False
        self._trouble: Exception | None = None

    async def run(
        self, app: Callable[..., Awaitable[None]], scope: MutableMapping[str, Any]
    ) -> None:
        """Run the app; make sure that the claim is settled, unless the task is cancelled."""
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

    # Receiving

    async def receive(self) -> Message:
        """Return the body; then, only after the response is complete, a disconnect."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    # Sending

    async def send(self, message: Message) -> None:
        """Take one message of the response."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._start is not None:
                raise RuntimeError("the answer has started already")
            # Checked here, where an invalid value is an error of the app: later it would look like
            # a failure of the record. Copied, because an iterator can be read only once.
            headers: Headers = [(_checked(n), _checked(v)) for n, v in message.get("headers", ())]
            status = int(message["status"])
            check_sendable(status, headers)
            self._start = {**message, "status": status, "headers": headers}
            if any(name.lower() == b"content-length" for name, _ in headers):
                self._holds = "last part"
            elif self._closes:
                self._holds = "all"
        elif kind != "http.response.body":
            # for instance early hints, which are not part of the response
            await self._pass(message)
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
        """Send a message now, after the start of the response."""
        if not self._begun and self._start is not None:
            self._begun = True
            await self._pass(self._start)
        await self._pass(message)

    async def _pass(self, message: Message) -> None:
        if self._gone:
            return
        try:
            await self._to(message)
        except OSError:  # the client has disconnected
            self._gone = True
        except Exception as error:  # noqa: BLE001 - raised when the claim is settled
            self._gone, self._trouble = True, error

    # Ending

    async def _end(self, last: Message) -> None:
        """Record the response; then send its end to the client."""
        assert self._start is not None  # noqa: S101 - checked by `send`
        status: int = self._start["status"]
        headers: Headers = self._start["headers"]
        self._settled = True
        try:
            body = bytes(self._recording) if self._size <= self._most else None
            answer = recorded(status, headers, body, self._never)
            instead = await self._request.settle(answer, RequestOutcome(status, headers))
            self._recording.clear()
            if instead is not None:
                await self._send_instead(instead)
            else:
                for message in (*self._held, last):
                    await self._release(message)
        except StillOpen:
            self._settled = False  # the app must roll back, and gets the exception from `send`
            raise
        finally:
            self._over.set()

    async def _send_instead(self, instead: Callable[[], Awaitable[None]]) -> None:
        if self._begun:
            # The client has part of a response that does not count: it must not get the end.
            raise LeaseLost("the answer could not be recorded: another worker may have taken over")
        self._begun = True
        if not self._gone:
            await instead()

    async def _fail(self, error: Exception | None) -> None:
        """Settle a request that the app has left without a response, or with an incomplete one."""
        self._settled = True
        if not self._begun and says_nothing_was_done(error):
            instead = await self._request.abandon()
            if instead is not None:
                await self._send_instead(instead)
            self._over.set()
            return
        status, headers, body = failure_of(error)
        answer = recorded(status, headers, body, self._never)
        instead = await self._request.settle(answer, RequestOutcome(status, headers, error))
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
    """Return whether an error is a refusal (`Rejected`), even wrapped by a vendor's SDK.

    The type decides, not the status sent to the client: a lost lease, an unreachable store, or the
    status of another service may follow an effect.
    """
    if error is None or isinstance(error, SeawallError):
        return isinstance(error, Rejected)
    problem = problem_of(error)
    if problem is None or problem.status not in NOTHING_DONE:
        return False
    # such a status can only come from one of our errors, further in
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SeawallError):
        cause = cause.__cause__
    return isinstance(cause, Rejected)
