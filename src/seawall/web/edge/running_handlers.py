"""Handlers that a cancellation of the app would leave running: how the edge ends their requests.

- Django and Quart start a task for the handler and one that listens for the client's disconnect,
  and wait for both with `asyncio.wait`. A cancellation of that wait ends the app's call only. What
  does end the handler is a disconnect.
- A plain function runs in a thread, which cannot be interrupted. A cancellation of the task that
  waits for it, or of the task group that this task is in, ends the app's call only.

Promises:

- A request of such an app gets a disconnect from `receive` at its deadline, and is not cancelled.
  If the app waits for a thread, it gets the disconnect, or the cancellation, when the thread has
  ended.
- The client gets its response at that moment. What the app sends afterwards is discarded.
- The request holds its gates until the app's call has ended, however long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import Future as ExecutorFuture
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import EXPIRED, running_task, take_back
from seawall.runtime.layers import CANCELLED, Outcome

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message
    from seawall.web.edge.asgi_request import AsgiRequest

_RUN_IN_THREAD: Final = frozenset(
    {
        ("anyio", "run_sync_in_worker_thread"),  # FastAPI and Starlette
        ("asyncio", "to_thread"),
        ("litestar", "_run_sync_asyncio"),
        ("quart", "_wrapper"),
    }
)
"""Package and name of the coroutine functions that wait for a function in a thread. Others, such as
the lookup of a host name, are cancelled: nobody would expect them to hold a place."""


class RunningHandlers:
    """The tasks of one request's app that wait in `receive`, and the end of an expired request."""

    def __init__(self, request: AsgiRequest) -> None:
        self._request = request
        self._listeners: dict[asyncio.Task[Any], int] = {}
        """Tasks that wait in `receive`, and how often each was cancelled before."""
        self._gates: tuple[tuple[Any, Any], ...] = ()
        self._verdict: tuple[Outcome, object] = CANCELLED, None
        self._response: asyncio.Task[None] | None = None
        self._threads: tuple[asyncio.Future[Any], ...] = ()
        self._by_disconnect = True
        """Whether a disconnect ends the app; otherwise a cancellation does."""
        self._cancelling: int | None = None
        """How often the app's task was cancelled before this; None if this has not cancelled it."""
        self.is_expired = False
        """Whether the deadline has passed, and the edge does not cancel the app."""

    async def listen(self, receive: Callable[[], Awaitable[Message]]) -> Message:
        """Receive a message in a child task; at the deadline, that is a disconnect."""
        if self.is_expired:
            return self._disconnect()
        task = running_task()
        self._listeners[task] = cancelling = task.cancelling()
        try:
            return await receive()
        except asyncio.CancelledError as error:
            if self.is_expired and take_back(task, cancelling, error):
                return self._disconnect()
            raise
        finally:
            del self._listeners[task]
            if not self._listeners and not self.is_expired:
                self._request.running_handlers = None  # Break the reference cycle.

    def _disconnect(self) -> Message:
        kind = self._request.scope["type"]
        # The codes are for websockets: 1006 is the loss of a connection that was not closed.
        return {"type": f"{kind}.disconnect", **({"code": 1006} if kind == "websocket" else {})}

    def expire(self) -> bool:
        """Send the client its response, and end the app when no thread works for it any more.

        Return False if a cancellation ends the app's handler.
        """
        request = self._request
        tasks = _tasks_in_wait(request.task) if self._listeners else None
        parents = (request.task,) if tasks is None else tasks
        self._threads = tuple(thread for task in parents for thread in threads_of(task))
        if tasks is None and not self._threads:
            return False
        self._by_disconnect = tasks is not None
        self.is_expired = True
        self._gates, request.gates = request.gates, ((self, None),)
        response = request.settle_expired()
        request.server_send = self._discard
        for thread in self._threads:
            thread.add_done_callback(self._end_app)
        self._end_app()
        if response is not None:
            self._response = asyncio.get_running_loop().create_task(response)
        return True

    def _end_app(self, _thread: object = None) -> None:
        """End the app, unless a thread works for it."""
        if not all(thread.done() for thread in self._threads):
            return
        if self._by_disconnect:
            for listener in self._listeners:
                listener.cancel(EXPIRED)
            return
        task = self._request.task
        if task is not None and self._cancelling is None:
            self._cancelling = task.cancelling()
            task.cancel(EXPIRED)

    async def _discard(self, _message: Message) -> None:
        """Take a message of an app whose client has its response; an app to cancel ends here."""
        if not self._by_disconnect:
            self._end_app()
            await asyncio.sleep(0)  # noqa: TID251 - raises the cancellation, which is no delay

    def leave(self, _ticket: object, outcome: Outcome, detail: object, _now: float) -> None:
        """Record how the held gates are to be left."""
        self._verdict = outcome, detail

    async def end(self, now: float, error: BaseException | None) -> bool:
        """Leave the held gates: the app's call has ended. Wait for the end of the response.

        Return whether `error` is the cancellation that ended the app.
        """
        held, self._gates = self._gates, ()
        outcome, detail = self._verdict
        for gate, ticket in held:
            gate.leave(ticket, outcome, detail, now)
        task, before = self._request.task, self._cancelling
        is_own = task is not None and before is not None and take_back(task, before, error)
        if self._response is not None:
            await self._response
        return is_own


def threads_of(task: asyncio.Task[Any] | None) -> list[asyncio.Future[Any]]:
    """Return the futures of functions in threads that `task`, or its task group, waits for."""
    threads = [_thread_of(one) for one in (task, *_tasks_in_group(task))]
    return [thread for thread in threads if thread is not None]


def _thread_of(task: asyncio.Task[Any] | None) -> asyncio.Future[Any] | None:
    """Return the future of the function in a thread that `task` waits for, or None."""
    frame = None
    for step in _suspended_in(task):
        frame = getattr(step, "cr_frame", frame)
    future: Any = getattr(task, "_fut_waiter", None)
    if frame is None or future is None or future.done():
        return None
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if (package, frame.f_code.co_name) not in _RUN_IN_THREAD:
        return None
    if frame.f_locals.get("abandon_on_cancel") or not _has_begun(future):
        return None
    waited: asyncio.Future[Any] = future
    return waited


def _has_begun(future: Any) -> bool:
    """Return whether the function of `future` runs: it may wait in the queue of an executor."""
    for callback, _ in future._callbacks or ():
        for cell in getattr(callback, "__closure__", None) or ():
            if isinstance(cell.cell_contents, ExecutorFuture):
                return cell.cell_contents.running()
    return True  # anyio's threads have no queue


def _tasks_in_wait(task: asyncio.Task[Any] | None) -> Collection[asyncio.Task[Any]] | None:
    """Return the tasks for which `task` waits in `asyncio.wait`, which does not cancel them."""
    for step in _suspended_in(task):
        if getattr(step, "cr_code", None) is asyncio.wait.__code__:
            tasks: Collection[asyncio.Task[Any]] = step.cr_frame.f_locals["fs"]
            return tasks
    return None


def _tasks_in_group(task: asyncio.Task[Any] | None) -> Collection[asyncio.Task[Any]]:
    """Return the tasks of the `TaskGroup` at whose end `task` waits."""
    for step in _suspended_in(task):
        frame = getattr(step, "cr_frame", None)
        group = None if frame is None else frame.f_locals.get("self")
        if isinstance(group, asyncio.TaskGroup):
            return tuple(getattr(group, "_tasks", ()))
    return ()


def _suspended_in(task: asyncio.Task[Any] | None) -> Iterator[Any]:
    """Yield the coroutines in which `task` is suspended, from the outermost to the innermost."""
    step: Any = None if task is None else task.get_coro()
    while step is not None:
        yield step
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
