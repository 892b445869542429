"""Apps that run handlers in child tasks, as Django and Quart do: how the edge ends their requests.

Such an app starts a task for the handler and one that listens for the client's disconnect, and
waits for both with `asyncio.wait`. A cancellation of that wait ends the app's call and leaves the
handler running. What does end the handler is a disconnect.

Promises:

- A request of such an app that is cut gets a disconnect from `receive`, and is not cancelled.
- The client gets its response at that moment. What the app sends afterwards is discarded.
- The request holds its gates until the app's call has ended, however long that takes: a view in a
  thread cannot be interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from seawall._expiry import EXPIRED, running_task, take_back
from seawall.runtime.layers import CANCELLED, Outcome

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message
    from seawall.web.edge.passage import Passage


class ChildTasks:
    """Child tasks of one request's app that wait in `receive`, and the end of a cut request."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._listeners: dict[asyncio.Task[Any], int] = {}
        """Tasks that wait in `receive`, and how often each was cancelled before."""
        self._held: tuple[tuple[Any, Any], ...] = ()
        self._verdict: tuple[Outcome, object] = CANCELLED, None
        self._answer: asyncio.Task[None] | None = None
        self.is_cut = False
        """Whether the request was cut by a disconnect."""

    async def listen(self, receive: Callable[[], Awaitable[Message]]) -> Message:
        """Receive a message in a child task; if the request is cut, that is a disconnect."""
        if self.is_cut:
            return self._disconnect()
        task = running_task()
        self._listeners[task] = cancelling = task.cancelling()
        try:
            return await receive()
        except asyncio.CancelledError as error:
            if self.is_cut and take_back(task, cancelling, error):
                return self._disconnect()
            raise
        finally:
            del self._listeners[task]
            if not self._listeners and not self.is_cut:
                self._passage.children = None  # Break the reference cycle.

    def _disconnect(self) -> Message:
        kind = self._passage.scope["type"]
        # The codes are for websockets: 1006 is the loss of a connection that was not closed.
        return {"type": f"{kind}.disconnect", **({"code": 1006} if kind == "websocket" else {})}

    def cut(self) -> bool:
        """Send the app a disconnect, and the client its response.

        Return False if the app does not listen, or would pass on a cancellation.
        """
        passage = self._passage
        if not self._listeners or not _is_in_wait(passage.task):
            return False
        self.is_cut = True
        self._held, passage.gates = passage.gates, ((self, None),)
        response = passage.settle_cut()
        passage.to = _discard
        for task in self._listeners:
            task.cancel(EXPIRED)
        if response is not None:
            self._answer = asyncio.get_running_loop().create_task(response)
        return True

    def leave(self, _ticket: object, outcome: Outcome, detail: object, _now: float) -> None:
        """Record how the held gates are to be left."""
        self._verdict = outcome, detail

    async def end(self, now: float) -> None:
        """Leave the held gates: the app's call has ended. Wait for the end of the response."""
        held, self._held = self._held, ()
        outcome, detail = self._verdict
        for gate, ticket in held:
            gate.leave(ticket, outcome, detail, now)
        if self._answer is not None:
            await self._answer


async def _discard(_message: Message) -> None:
    """Take a message of an app whose client has its response."""


def _is_in_wait(task: asyncio.Task[Any] | None) -> bool:
    """Return whether `task` is blocked in `asyncio.wait`, which does not cancel what it awaits."""
    step: Any = None if task is None else task.get_coro()
    while step is not None:
        if getattr(step, "cr_code", None) is asyncio.wait.__code__:
            return True
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return False
