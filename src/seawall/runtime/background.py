"""A background thread with its own event loop: of a store, a cluster, or a breaker's probes.

It serves callers that have no loop, and runs periodic jobs. Tasks in a user's loop would die with
that loop; these live until their owner is closed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Protocol

from seawall._forks import leave_to_parent
from seawall.errors import StoreUnavailable
from seawall.runtime.mutex import Mutex

CLOSING: Final = 2.0  # maximum seconds for closing

OWN_THREAD: Final = (
    "this runs in the store's own thread, which must not block: do it in a thread of yours, or with"
    " the async twin in a loop of yours"
)


Job = Callable[[], Awaitable[None]]


class JobRunner(Protocol):
    """What a job needs from the loop it runs in."""

    owner: str

    def submit_if_running(self, callback: Callable[..., object], *args: Any) -> bool:
        """Schedule `callback` in the loop; return False if the loop does not run."""

    def forget(self, handle: Handle) -> None:
        """Stop running a job."""


class Handle:
    """A job that runs periodically in the background."""

    def __init__(self, background: JobRunner, seconds: float, job: Job) -> None:
        self._background = background
        self._seconds = seconds
        self._job = job
        self._asked = False
        self._task: asyncio.Task[None] | None = None
        self._bell: asyncio.Event | None = None

    def soon(self) -> None:
        """Request a run now, from any thread. Requests before the next run are merged into one."""
        if not self._asked:
            self._asked = True
            if not self._background.submit_if_running(self._ring):
                self._asked = False

    def stop(self) -> None:
        """Stop running the job."""
        self._background.forget(self)

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()

    def begin(self) -> None:
        """Start running, in the background loop."""
        self._bell = asyncio.Event()
        self._asked = False
        self._task = asyncio.get_running_loop().create_task(self._repeat(self._bell))

    def end(self) -> None:
        """Stop running, in the background loop."""
        if self._task is not None:
            self._task.cancel()

    def after_fork(self) -> None:
        """Forget the task, which does not exist in the child process."""
        leave_to_parent(self._task)
        self._task = self._bell = None
        self._asked = False

    async def _repeat(self, bell: asyncio.Event) -> None:
        while True:
            self._asked = False
            bell.clear()
            try:
                await self._job()
            except StoreUnavailable:
                pass  # the store's health tracks this
            except (Exception, asyncio.CancelledError, SystemExit):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # any other CancelledError is a failure of the job
                logging.getLogger("seawall").exception(
                    "a background job of the %s failed", self._background.owner
                )
            try:
                async with asyncio.timeout(self._seconds):
                    await bell.wait()
            except TimeoutError:
                pass


class Background:
    """The thread and its loop: made on first use, and again in a child process."""

    def __init__(
        self,
        at_start: Callable[[], None] | None = None,
        at_end: Callable[[], Awaitable[None]] | None = None,
        owner: str = "store",
    ) -> None:
        """Call `at_start` in the loop when it begins, and await `at_end` when it is stopped."""
        self.owner = owner
        self._mutex = Mutex()
        self._at_start = at_start
        self._at_end = at_end
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._handles: list[Handle] = []
        self._closed = False

    def every(self, seconds: float, job: Job) -> Handle:
        """Run `job` every `seconds`, starting now or once the thread runs."""
        handle = Handle(self, seconds, job)
        with self._mutex:
            self._handles.append(handle)
            loop = self.loop
        if loop is not None:
            self.submit_if_running(handle.begin)
        return handle

    def forget(self, handle: Handle) -> None:
        """Stop running a job. The garbage collector may call this at any moment."""

        def remove() -> None:
            self._handles = [known for known in self._handles if known is not handle]

        self._mutex.do(remove)
        self.submit_if_running(handle.end)

    def start(self) -> asyncio.AbstractEventLoop:
        """Return the loop; start it if it does not run yet."""
        if self._closed:
            raise StoreUnavailable(f"the {self.owner} was closed")
        loop = self.loop
        if loop is not None:
            return loop
        loop = asyncio.new_event_loop()
        # An empty context: the deadline of the first caller must not apply to the others.
        thread = threading.Thread(
            target=Context().run, args=(self._run, loop), name=f"seawall-{self.owner}", daemon=True
        )
        with self._mutex:
            first = self.loop is None and not self._closed
            if first:
                loop.call_soon(self._begin, list(self._handles))
                self.loop, self.thread = loop, thread
                try:
                    thread.start()
                except RuntimeError as error:  # the process has too many threads
                    self.loop = self.thread = None
                    loop.close()
                    raise StoreUnavailable(f"no background thread: {error}") from error
        if not first:
            loop.close()
            return self.start()
        return loop

    def _begin(self, handles: list[Handle]) -> None:
        if self._at_start is not None:
            self._at_start()
        for handle in handles:
            handle.begin()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                try:
                    loop.run_forever()
                    break
                except (SystemExit, KeyboardInterrupt):
                    # Raised by a callback. Nothing recovers without this thread, so it goes on.
                    logging.getLogger("seawall").exception(
                        "a callback in the thread of the %s failed", self.owner
                    )
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def submit(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule `callback` in the loop, from any thread; start the loop if needed."""
        loop = self.start()
        try:
            loop.call_soon_threadsafe(callback, *args, context=Context())
        except RuntimeError:  # closed meanwhile
            raise StoreUnavailable(f"the {self.owner} was closed") from None

    def submit_if_running(self, callback: Callable[..., object], *args: Any) -> bool:
        """Schedule `callback` in the loop if the thread runs; return whether it does."""
        loop = self.loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback, *args, context=Context())
        except RuntimeError:
            return False
        return True

    def stop(self) -> Callable[[], None]:
        """Start to stop the thread; return a function that waits until it has ended."""
        with self._mutex:
            self._closed = True
            loop, thread = self.loop, self.thread
        if loop is None or thread is None:
            return lambda: None

        def stopping() -> None:
            _keep(asyncio.get_running_loop().create_task(self._end(loop)))

        try:
            loop.call_soon_threadsafe(stopping, context=Context())
        except RuntimeError:
            pass  # stopped already
        here = thread is threading.current_thread()
        return (lambda: None) if here else (lambda: thread.join(2 * CLOSING))

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        for handle in self._handles:
            handle.end()  # otherwise a job could acquire again what closing gives back
        try:
            async with asyncio.timeout(CLOSING):
                if self._at_end is not None:
                    await self._at_end()
        except TimeoutError:
            logging.getLogger("seawall").warning(
                "the %s had no time to finish when it was closed", self.owner
            )
        except Exception:
            logging.getLogger("seawall").exception("the %s was not closed properly", self.owner)
        finally:
            loop.stop()

    def after_fork(self) -> None:
        """Forget the thread, which did not survive the fork; jobs run again after a restart."""
        leave_to_parent(self.loop)
        self._mutex = Mutex()
        self.loop = self.thread = None
        for handle in self._handles:
            handle.after_fork()


_kept: set[asyncio.Task[Any]] = set()


def _keep(task: asyncio.Task[Any]) -> None:
    """Keep `task` alive until it is done: a loop holds only a weak reference."""
    _kept.add(task)
    task.add_done_callback(_kept.discard)


async def bounded(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait for `work` up to `seconds`; then cancel it without waiting for its end."""
    task = asyncio.get_running_loop().create_task(work)
    _keep(task)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()


def run_in(
    background: Background, work: Callable[[], Coroutine[Any, Any, Any]], timeout: float
) -> Any:
    """Run `work()` in the background loop, and block this thread until it is done."""
    from concurrent.futures import Future
    from concurrent.futures import TimeoutError as Late

    if background.thread is threading.current_thread():
        raise RuntimeError(OWN_THREAD)
    answer: Future[Any] = Future()

    async def carry() -> None:
        try:
            result = await work()
        except asyncio.CancelledError:  # this task was cancelled, not the waiting thread
            answer.set_exception(StoreUnavailable(f"the {background.owner} was closed"))
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            answer.set_exception(error)
        else:
            answer.set_result(result)

    background.submit(lambda: _keep(asyncio.get_running_loop().create_task(carry())))
    try:
        return answer.result(timeout)
    except Late:
        if answer.done():
            raise
        raise StoreUnavailable(
            f"the {background.owner} did not answer within {timeout:g} s"
        ) from None
