"""The path of one response through the edge, and the moment at which its gates are left.

Promises:

- Every gate that was entered is left exactly once, at whichever comes first: the last part of the
  response was passed to the server, or the app returned, raised or was cancelled.
- A stream holds its slot until it ends, but its latency is measured to its first part. While it
  waits for its client it holds no slot (see `client_waits`).
- A background task of the app runs after the last part: it holds nothing, and no timeout cancels
  it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import EXPIRED, Expiry, current_task, take_back
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import OK
from seawall.web.asgi_types import Message, Receive, Send
from seawall.web.edge.client_waits import ClientWaits
from seawall.web.edge.held_request import HeldRequest
from seawall.web.edge.running_handlers import RunningHandlers, thread_of
from seawall.web.problems import FAILURE, send_problem

if TYPE_CHECKING:
    from seawall.web.edge.edge import Edge

InLane = tuple[dict[Any, float], int]
"""The requests that share a timer, and how often the task of this one was cancelled before."""


_BODY_OF_FILE: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Messages by which the server reads a file itself: ASGI extensions that Starlette uses."""


class Passage(HeldRequest):
    """One request in an ASGI edge: its timer, its waits for the client, `receive` and `send`."""

    __slots__ = (
        "cut",  # the timer that cancels the app, has done so, or still may: see `was_cut`
        "handed",  # size of the last part of the body that was passed to the server
        "handlers",  # handlers that a cancellation would leave running, if any are known
        "heard",  # whether the body of the request is complete
        "source",  # where messages come from: the server or a wrapper
        "task",  # the task in which the app was called, until it returns
        "to",  # where messages go: the server or a wrapper
        "waits",  # its waits for the client, if any
    )
    _edge: Edge
    task: asyncio.Task[Any] | None

    def __init__(
        self, scope: MutableMapping[str, Any], source: Receive, to: Send, edge: Edge
    ) -> None:
        # Everything is set here and not by super(): each frame and each step costs.
        self.scope = scope
        self.headers = headers = scope["headers"]
        self.named = dict(headers)
        self.trust = edge._trust
        self._edge = edge
        self.source = source
        self.to = to
        self.answered_at = 0.0
        self.status = self.handed = 0
        self.entered = self.left = self.heard = False
        self.waits: ClientWaits | None = None
        self.handlers: RunningHandlers | None = None
        self.gates = ()
        self.granted = None
        self.more_headers = None
        self.cut: InLane | Expiry | None = None
        self._deadline = None

    @property
    def _judged(self) -> bool:
        return self.waits is not None and self.waits.judged

    # Time limit of the app

    def _stop_time(self) -> None:
        """Stop the timer of the app; if it has fired already, `was_cut` reports it."""
        cut = self.cut
        if isinstance(cut, Expiry):
            cut.stop()
        elif cut is not None and cut[0].pop(self, None) is not None:
            self.cut = None

    @property
    def is_cut(self) -> bool:
        """Whether the timer has cancelled the app, and `was_cut` was not called yet."""
        cut = self.cut
        return cut is not None and (cut.fired if isinstance(cut, Expiry) else self not in cut[0])

    def cut_now(self) -> bool:
        """Cancel the app as its deadline would; return False if that has happened already."""
        cut = self.cut
        if isinstance(cut, Expiry):
            return cut.fire_now()
        task = self.task
        if task is None or (cut is not None and cut[0].pop(self, None) is None):
            return False
        if cut is None:
            self.cut = {}, task.cancelling()
        self.cancel(EXPIRED)
        return True

    def cancel(self, message: str) -> None:
        """Cancel the app, unless that would leave its handler running: see `RunningHandlers`.

        A timer that is shared by requests calls this as it would call that of a task.
        """
        task = self.task
        if task is None:
            return
        works = not self.status and self._edge._sends_at_once
        if self.handlers is None and works and thread_of(task) is not None:
            self.handlers = RunningHandlers(self)
        if self.handlers is None or not self.handlers.cut():
            task.cancel(message)

    def settle_cut(self) -> Coroutine[Any, Any, None] | None:
        """Settle a request whose app is not cancelled; return what sends the response, if any."""
        if self.waits is not None:
            self.waits.note_cut()
        settled = self._edge._settle(self, asyncio.CancelledError(EXPIRED))
        if settled is None:
            return None
        return send_problem(self._problem_send(), *settled, method=self.method)

    def _problem_send(self) -> Send:
        """Return the function that sends a response of the edge itself."""
        return self.to

    def was_cut(self, error: BaseException | None) -> bool:
        """Stop the timer; return whether `error` is the cancellation that it caused."""
        self._stop_time()
        if self.handlers is not None and self.handlers.is_cut:
            return True
        cut, self.cut = self.cut, None
        if cut is None:
            return False
        if isinstance(cut, Expiry):
            return cut.disarm(error)
        return self.task is not None and take_back(self.task, cut[1], error)

    # The request

    def receive(self) -> Awaitable[Message]:
        """Receive a message from the server."""
        if self.heard:  # the only message left is the disconnect
            return self._listen(self.source)
        return self._receive()

    async def _receive(self) -> Message:
        steps: Any = self.source().__await__()
        try:
            awaited = next(steps)
        except StopIteration as end:
            message: Message = end.value
            self.heard = not message.get("more_body")
            waits = self.waits
            if waits is not None and message["type"] == "http.request":
                await waits.come_back(begins=self.heard)
            return message
        return await self._listen(lambda: self._finish_receive(steps, awaited))

    async def _finish_receive(self, steps: Any, awaited: Any) -> Message:
        waits = self._with_waits()
        message = await waits.finish_receive(steps, awaited)
        self.heard = not message.get("more_body")
        if message["type"] == "http.request":
            await waits.come_back(begins=self.heard)
        return message

    async def _listen(self, receive: Receive) -> Message:
        """Receive a message that has to be waited for, in the app's own task or in a child."""
        if self.task is None or current_task() is self.task:
            return await receive()
        handlers = self.handlers
        if handlers is None:
            handlers = self.handlers = RunningHandlers(self)
        return await handlers.listen(receive)

    def _with_waits(self) -> ClientWaits:
        waits = self.waits
        if waits is None:
            waits = self.waits = ClientWaits(self)
        return waits

    # The response

    def send(self, message: Message) -> Awaitable[None]:  # noqa: C901, PLR0912 - one frame
        """Pass a message to the server; a plain function, as another coroutine would cost more."""
        kind = message["type"]
        waits = self.waits
        unread = 0  # bytes that the client may have to read first
        if kind == "http.response.body":
            more = message.get("more_body")
            if waits is not None and more and waits.is_away_from_work():
                return waits.send(message)
            now = self.answered_at
            if now:
                only = False
            else:
                clock = self._edge._now
                now = self.answered_at = clock()
                only = not more
            if not self.left and not more:
                if self.status < FAILURE and waits is None:
                    self.left = True  # from here on, inlined copy of `leave()`
                    for gate, ticket in self.gates:
                        gate.leave(ticket, OK, STREAMED, now)
                    stats = self._edge._stats
                    stats.samples.append(now - self.began)
                    if now >= stats.due:
                        stats.fold(now)
                else:
                    self.leave(*self.verdict())
            if only:  # its slots are released, and the start was not blocked
                to = self.to
                return to(message)
            size = len(message.get("body", b""))
            unread, self.handed = self.handed + size, size
        elif kind == "http.response.start":
            if waits is not None and waits.is_away_from_work():
                return waits.send(message)
            self.status = message["status"]
            cut = self.cut
            if cut is not None:
                if type(cut) is tuple and cut[0].pop(self, None) is not None:
                    self.cut = None  # inlined copy of `_stop_time()`
                else:
                    self._stop_time()
                if self._deadline is not None:  # until the response starts; docs/web/edge.md
                    self._deadline[3] = None  # inlined copy of `end_scope()`
            if self.more_headers is not None:
                more = self.more_headers()
                # A copy, as the app may send the same message object again.
                message = {**message, "headers": [*message.get("headers", ()), *more]}
        elif kind in _BODY_OF_FILE:
            if not message.get("more_body"):
                self.leave(*self.verdict())
            return self.to(message)  # the server reads the file meanwhile, which may take long
        to = self.to  # called from a variable: calling an attribute that is a function costs more
        # Run the first step here: usually it is the last one, and nothing else is needed.
        steps = to(message).__await__()
        awaited = next(steps, _ENDED)
        if awaited is _ENDED:
            return _sent()
        return self._with_waits().finish_send(steps, awaited, unread)


_ENDED: Final = object()


async def _sent() -> None:
    """Complete immediately: the message was sent already."""


def awaitable_by_apps(*functions: Any) -> None:
    """Mark plain functions that return awaitables as coroutine functions.

    Some frameworks check for that before they await the result.
    """
    for function in functions:
        if sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(function)
        else:
            function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


awaitable_by_apps(Passage.receive, Passage.send)
