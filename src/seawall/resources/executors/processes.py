"""Worker processes: when one dies, only its current item fails.

A process pool of the standard library is broken as a whole when one of its processes dies, and
cannot report what that process was doing. Here each process has its own pipe, and a thread that
sends it one item at a time and waits for the reply. `messages.py` defines the messages.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, finalize

from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.context import seconds_left
from seawall.errors import DeadlineExceeded, Rejected, WorkerDied
from seawall.events import WorkerReplaced
from seawall.events.bus import emit
from seawall.resources.executors.messages import ContextValues, ProcessCall, pack, serve, unpack
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

BEAT: Final = 1.0  # interval in real seconds at which a silent process is checked
START_WITHIN: Final = 60.0  # timeout in real seconds for a new process to be ready
EXIT_WITHIN: Final = 2.0  # timeout in real seconds for a process to exit before it is killed
START_TRIES: Final = 3  # processes in a row that may die at start; then calls are refused
FIRST_PAUSE: Final = 0.5  # seconds of that pause, doubled each time up to the longest
LONGEST_PAUSE: Final = 60.0


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self, context: Any, name: str) -> None:
        ours, theirs = context.Pipe()
        self.connection: Connection[Any, Any] = ours
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs,), name=name, daemon=True
        )
        try:
            self.process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # the process has its own copy: when that is closed, ours gets EOF
        self.booted = False
        self._exit_code: int | None = None
        self._over = False
        self._lock = Lock()

    def is_ready(self) -> bool:
        """Wait until a new process is ready; return whether it is alive."""
        if self.booted:
            return not self._is_dead()
        try:
            self.receive(START_WITHIN)
        except (EOFError, OSError):
            return False
        self.booted = True
        return True

    def receive(self, within: float = float("inf")) -> bytes:
        """Return its next message; raise EOFError or OSError when it is dead or late."""
        waited = 0.0
        while not self.connection.poll(BEAT):
            waited += BEAT
            # A child of the dead process may keep the pipe open.
            if waited >= within or (self._is_dead() and not self.connection.poll(0)):
                raise EOFError
        return self.connection.recv_bytes()

    def _is_dead(self) -> bool:
        with self._lock:
            return self._over or self.process.exitcode is not None

    def kill(self) -> None:
        """Kill the process, without the lock: the garbage collector may give up a call under it."""
        try:
            self.process.kill()
        except (ValueError, AttributeError):
            pass  # it has exited and was closed

    def end(self) -> int | None:
        """Let the process end, and return its exit code; for its current owner."""
        self.connection.close()  # makes it exit
        return self.reap()

    def reap(self) -> int | None:
        """Wait until the process has exited, kill it if it does not, and leave no zombie."""
        with self._lock:
            if not self._over:
                self.process.join(EXIT_WITHIN)
                if self.process.exitcode is None:
                    self.process.kill()
                    self.process.join(EXIT_WITHIN)
                self._exit_code = self.process.exitcode
                self._over = True
                if self._exit_code is not None:
                    self.process.close()
            return self._exit_code

    def forget(self) -> None:
        """Release the process in a forked child, to which it does not belong."""
        from multiprocessing import process

        self.connection.close()
        # Otherwise that child would end its parent's workers when it exits.
        process._children.discard(self.process)  # type: ignore[attr-defined]


class WorkerProcesses:
    """The processes of one executor: at most one for each thread that needs one."""

    def __init__(
        self, name: str, policy: str, method: str, context_values: ContextValues, clock: Clock
    ) -> None:
        """Start no process yet. `name` and `policy` appear in refusals and events."""
        self.name = name
        self.replaced = 0  # number of processes that died and were, or will be, replaced
        self._policy = policy
        self._method = method
        self._context_values = context_values
        self._clock = clock
        self._begin()
        survives_fork(self)
        _live.add(self)

    def _begin(self) -> None:
        self._mutex = Mutex()
        self._closed = False
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._started = 0
        self._failed_starts = 0
        self._start_after = float("-inf")
        self._finalizer = finalize(self, _kill_all, self._all)
        self._finalizer.atexit = False

    def carry_out(self, item: ProcessCall) -> Any:
        """Run `item` in a process, from a worker thread; raise its error, or `WorkerDied`."""
        worker = self._take()
        try:
            message = pack(item, self._context_values)
            self._assign(item, worker)
        except BaseException:
            self._put_back(worker)
            raise
        reply = None
        try:
            worker.connection.send_bytes(message)
            del message
            reply = worker.receive()
        except (EOFError, OSError):
            pass  # it is dead
        with self._mutex:
            item.worker = None  # from here on it is not killed because of this item
            killed = item.given_up
        if reply is None or killed:
            raise self._lost(worker, item)
        self._put_back(worker)
        return unpack(item, reply, self.name)

    def give_up(self, item: ProcessCall) -> bool:
        """Kill the process that has `item`, if any; return whether it was ever given to one."""
        self._mutex.do(lambda: _stop(item))
        return item.sent

    def stop(self, *, kill: bool = False) -> None:
        """End all processes and start no more; idle ones exit themselves, unless `kill`."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for worker in (*busy, *idle) if kill else busy:
            worker.kill()
        for worker in idle:
            worker.connection.close()
        for worker in (*busy, *idle):
            worker.reap()
        self._all.difference_update(busy, idle)

    def _take(self) -> _Worker:
        while True:
            with self._mutex:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = self._start()
            if worker.is_ready():
                self._failed_starts = 0
                return worker
            self._all.discard(worker)
            exit_code = worker.end()
            if self._closed:
                raise self._refusal("it is closed")
            if worker.booted:  # it died while idle, so no item is to blame
                self.replaced += 1
                emit(WorkerReplaced, self.name, item="", exit_code=exit_code)
            else:
                self._failed_start(exit_code)

    def _start(self) -> _Worker:
        wait = self._start_after - self._clock.now()
        if wait > 0:
            raise self._refusal("its worker processes die as they start", retry_after=wait)
        from multiprocessing import current_process, get_context

        if current_process().daemon:
            raise RuntimeError(
                f"executor {self.name!r}: this is a worker process, which can have none of its own;"
                " call the function itself here"
            )
        _end_with_the_interpreter()
        self._started += 1
        try:
            worker = _Worker(get_context(self._method), f"seawall-{self.name}-{self._started}")
        except OSError as error:
            raise self._refusal(f"the system starts no worker process: {error}") from error
        with self._mutex:
            closed = self._closed
            if not closed:
                self._all.add(worker)
        if closed:
            worker.kill()
            worker.end()
            raise self._refusal("it is closed")
        return worker

    def _failed_start(self, exit_code: int | None) -> None:
        """Count a process that did not start; raise if there were several in a row."""
        self._failed_starts += 1
        beyond = self._failed_starts - START_TRIES
        if beyond < 0:
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(beyond, 20))
        self._start_after = self._clock.now() + pause
        raise self._refusal(
            f"{self._failed_starts} worker processes in a row died as they started"
            f" ({_how(exit_code)}, see their standard error); each imports the main module, so"
            ' write what that does under `if __name__ == "__main__":`',
            retry_after=pause,
        )

    def _assign(self, item: ProcessCall, worker: _Worker) -> None:
        """Assign `item` to `worker`; raise if its caller gave up or the deadline passed."""
        left = seconds_left()
        if left is not None and left <= 0:
            raise self._refusal(f"the deadline passed before {item} began", DeadlineExceeded)
        with self._mutex:
            if not item.given_up and not self._closed:
                item.worker = worker
                item.sent = True
                return
        raise self._refusal("it is closed" if self._closed else "given up before it began")

    def _put_back(self, worker: _Worker) -> None:
        with self._mutex:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.end()

    def _lost(self, worker: _Worker, item: ProcessCall) -> WorkerDied:
        """Clean up a dead process and start another; return the error for the caller."""
        self._all.discard(worker)
        exit_code = worker.end()
        if self._closed:
            message = f"executor {self.name!r} was closed while it ran {item}"
            return WorkerDied(message, item=str(item), exit_code=exit_code)
        self.replaced += 1
        try:
            # Start it now, so that it is ready early; its first user waits until it is.
            self._put_back(self._start())
        except Exception:  # noqa: BLE001, S110 - the next call tries again, and reports the failure
            pass
        what = str(item)
        emit(WorkerReplaced, self.name, item=what, exit_code=exit_code)
        return WorkerDied(
            f"executor {self.name!r}: the worker process died ({_how(exit_code)}) while it ran"
            f" {what}",
            item=what,
            exit_code=exit_code,
        )

    def _refusal(
        self, why: str, kind: type[Rejected] = Rejected, *, retry_after: float | None = None
    ) -> Rejected:
        message = f"executor {self.name!r}: {why}"
        return kind(message, retry_after=retry_after, guard=self.name, policy=self._policy)

    def _after_fork(self) -> None:
        """Start over in a forked child: the workers belong to its parent."""
        self._finalizer.detach()
        for worker in self._all:
            worker.forget()
        closed = self._closed
        self._begin()
        self._closed = closed


def _stop(item: ProcessCall) -> None:
    item.given_up = True
    if item.worker is not None:
        item.worker.kill()


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "its end is unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    from signal import Signals

    try:
        return f"killed by {Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


_live: Final[WeakSet[WorkerProcesses]] = WeakSet()
_exits_with: set[int] = set()  # IDs of processes in which the exit handler is registered


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()
        worker.reap()


def _end_with_the_interpreter() -> None:
    """Register an exit handler that kills all workers instead of waiting for them."""
    if os.getpid() in _exits_with:
        return
    import atexit
    import multiprocessing.util  # noqa: F401 - its own exit handler waits, so it must be registered first

    _exits_with.add(os.getpid())
    atexit.register(_at_exit)


def _at_exit() -> None:
    for processes in list(_live):
        processes.stop(kill=True)
