"""One request in an ASGI edge: the app's `receive` and `send`, and when its gates are left.

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
from seawall.web.edge.edge_request import EdgeRequest
from seawall.web.edge.running_handlers import RunningHandlers, threads_of
from seawall.web.problems import FAILURE, send_problem

if TYPE_CHECKING:
    from seawall.web.edge.edge import Edge

SharedTimer = tuple[dict[Any, float], int]
"""The requests that share a timer, and how often the task of this one was cancelled before."""

_BODY_OF_FILE: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Messages by which the server reads a file itself: ASGI extensions that Starlette uses."""


class AsgiRequest(EdgeRequest):
    """One request in an ASGI edge: its timer, its waits for the client, `receive` and `send`."""

    __slots__ = (
        "body_received",  # whether the body of the request is complete
        "client_waits",  # its waits for the client, if any
        "last_part_size",  # size of the last part of the body that was passed to the server
        "running_handlers",  # handlers that a cancellation would leave running, if any are known
        "server_receive",  # where messages come from: the server or a wrapper
        "server_send",  # where messages go: the server or a wrapper
        "task",  # the task in which the app was called, until it returns
        "timer",  # the timer that cancels the app, has done so, or still may: see `disarm`
    )
    _edge: Edge
    task: asyncio.Task[Any] | None

    def __init__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, edge: Edge
    ) -> None:
        # Everything is set here and not by super(): each frame and each step costs.
        self.scope = scope
        self.headers = headers = scope["headers"]
        self.named = dict(headers)
        self.trust = edge._trust
        self._edge = edge
        self.server_receive = receive
        self.server_send = send
        self.body_started_at = 0.0
        self.status = self.last_part_size = 0
        self.admitted = self.has_left = self.body_received = False
        self.client_waits: ClientWaits | None = None
        self.running_handlers: RunningHandlers | None = None
        self.gates = ()
        self.granted = None
        self.extra_headers = None
        self.timer: SharedTimer | Expiry | None = None
        self._deadline = None

    @property
    def _is_outcome_known(self) -> bool:
        return self.client_waits is not None and self.client_waits.is_outcome_known

    # Time limit of the app

    def _stop_timer(self) -> None:
        """Stop the timer of the app; if it has fired already, `disarm` reports it."""
        timer = self.timer
        if isinstance(timer, Expiry):
            timer.stop()
        elif timer is not None and timer[0].pop(self, None) is not None:
            self.timer = None

    @property
    def is_expired(self) -> bool:
        """Whether the timer has cancelled the app, and `disarm` was not called yet."""
        timer = self.timer
        if isinstance(timer, Expiry):
            return timer.fired
        return timer is not None and self not in timer[0]

    def expire_now(self) -> bool:
        """Cancel the app as its deadline would; return False if that has happened already."""
        timer = self.timer
        if isinstance(timer, Expiry):
            return timer.fire_now()
        task = self.task
        if task is None or (timer is not None and timer[0].pop(self, None) is None):
            return False
        if timer is None:
            self.timer = {}, task.cancelling()
        self.cancel(EXPIRED)
        return True

    def cancel(self, message: str) -> None:
        """Cancel the app, unless that would leave its handler running: see `RunningHandlers`.

        A timer that is shared by requests calls this as it would call that of a task.
        """
        task = self.task
        if task is None:
            return
        can_answer = not self.status and self._edge._sends_at_once
        if self.running_handlers is None and can_answer and threads_of(task):
            self.running_handlers = RunningHandlers(self)
        if self.running_handlers is None or not self.running_handlers.expire():
            task.cancel(message)

    def settle_expired(self) -> Coroutine[Any, Any, None] | None:
        """Settle a request whose app is not cancelled; return what sends the response, if any."""
        if self.client_waits is not None:
            self.client_waits.note_expiry()
        settled = self._edge._settle(self, asyncio.CancelledError(EXPIRED))
        if settled is None:
            return None
        return send_problem(self._problem_sender(), *settled, method=self.method)

    def _problem_sender(self) -> Send:
        """Return the function that sends a response of the edge itself."""
        return self.server_send

    def disarm(self, error: BaseException | None) -> bool:
        """Stop the timer; return whether `error` is the cancellation that it caused."""
        self._stop_timer()
        if self.running_handlers is not None and self.running_handlers.is_expired:
            return True
        timer, self.timer = self.timer, None
        if timer is None:
            return False
        if isinstance(timer, Expiry):
            return timer.disarm(error)
        return self.task is not None and take_back(self.task, timer[1], error)

    # The request

    def receive(self) -> Awaitable[Message]:
        """Receive a message from the server."""
        if self.body_received:  # the only message left is the disconnect
            return self._receive_in_task(self.server_receive)
        return self._receive()

    async def _receive(self) -> Message:
        steps: Any = self.server_receive().__await__()
        try:
            awaited = next(steps)
        except StopIteration as end:
            message: Message = end.value
            self.body_received = not message.get("more_body")
            waits = self.client_waits
            if waits is not None and message["type"] == "http.request":
                await waits.retake_slots(work_begins=self.body_received)
            return message
        return await self._receive_in_task(lambda: self._finish_receive(steps, awaited))

    async def _finish_receive(self, steps: Any, awaited: Any) -> Message:
        waits = self._make_client_waits()
        message = await waits.finish_receive(steps, awaited)
        self.body_received = not message.get("more_body")
        if message["type"] == "http.request":
            await waits.retake_slots(work_begins=self.body_received)
        return message

    async def _receive_in_task(self, receive: Receive) -> Message:
        """Receive a message that has to be waited for, in the app's own task or in a child."""
        if self.task is None or current_task() is self.task:
            return await receive()
        handlers = self.running_handlers
        if handlers is None:
            handlers = self.running_handlers = RunningHandlers(self)
        return await handlers.listen(receive)

    def _make_client_waits(self) -> ClientWaits:
        waits = self.client_waits
        if waits is None:
            waits = self.client_waits = ClientWaits(self)
        return waits

    # The response

    def send(self, message: Message) -> Awaitable[None]:  # noqa: C901, PLR0912 - one frame
        """Pass a message to the server; a plain function, as another coroutine would cost more."""
        kind = message["type"]
        waits = self.client_waits
        unread = 0  # bytes that the client may have to read first
        if kind == "http.response.body":
            more = message.get("more_body")
            if waits is not None and more and waits.must_retake_slots():
                return waits.send(message)
            now = self.body_started_at
            if now:
                is_whole_body = False
            else:
                clock = self._edge._now
                now = self.body_started_at = clock()
                is_whole_body = not more
            if not self.has_left and not more:
                if self.status < FAILURE and waits is None:
                    self.has_left = True  # from here on, inlined copy of `leave()`
                    for gate, ticket in self.gates:
                        gate.leave(ticket, OK, STREAMED, now)
                    stats = self._edge._stats
                    stats.samples.append(now - self.started_at)
                    if now >= stats.due:
                        stats.fold(now)
                else:
                    self.leave(*self.verdict())
            if is_whole_body:  # its slots are released, and the start was not blocked
                server_send = self.server_send
                return server_send(message)
            size = len(message.get("body", b""))
            unread, self.last_part_size = self.last_part_size + size, size
        elif kind == "http.response.start":
            if waits is not None and waits.must_retake_slots():
                return waits.send(message)
            self.status = message["status"]
            timer = self.timer
            if timer is not None:
                if type(timer) is tuple and timer[0].pop(self, None) is not None:
                    self.timer = None  # inlined copy of `_stop_timer()`
                else:
                    self._stop_timer()
                if self._deadline is not None:  # until the response starts; docs/web/edge.md
                    self._deadline[3] = None  # inlined copy of `end_scope()`
            if self.extra_headers is not None:
                more = self.extra_headers()
                # A copy, as the app may send the same message object again.
                message = {**message, "headers": [*message.get("headers", ()), *more]}
        elif kind in _BODY_OF_FILE:
            if not message.get("more_body"):
                self.leave(*self.verdict())
            return self.server_send(message)  # the server reads the file, which may take long
        # Called from a variable: calling an attribute that is a function costs more.
        server_send = self.server_send
        # Run the first step here: usually it is the last one, and nothing else is needed.
        steps = server_send(message).__await__()
        awaited = next(steps, _ENDED)
        if awaited is _ENDED:
            return _already_sent()
        return self._make_client_waits().finish_send(steps, awaited, unread)


_ENDED: Final = object()


async def _already_sent() -> None:
    """Complete immediately: the message was sent already."""


def mark_as_coroutine_functions(*functions: Any) -> None:
    """Mark plain functions that return awaitables as coroutine functions.

    Some frameworks check for that before they await the result.
    """
    for function in functions:
        if sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(function)
        else:
            function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


mark_as_coroutine_functions(AsgiRequest.receive, AsgiRequest.send)
