"""Leader election: work that runs in one process at a time, only while its lease is surely held.

Promises:
- Work starts when the lease is held, and is stopped a margin before another process can take the
  lease, by this machine's monotonic clock. Wall clocks are not used.
- The lease is released after the work has ended, not before; then another process can lead
  immediately.
- A term that is over stays over, even if a late renewal succeeds. Each term has a higher fencing
  token than all terms before, of any process.

No library can stop a process that is paused between its look at the clock and its effect, or work
that ignores its cancellation (which is logged as an error). So effects need the token, checked
where they are stored, for example by `seawall.durable.Fence`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, TypeVar

from seawall import _checks as check
from seawall.errors import LeaseLost, StoreUnavailable, TimedOut
from seawall.events import LeaseChanged, subscribe
from seawall.leases.lease import Lease
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of
from seawall.runtime.mutex import Mutex

T = TypeVar("T")
SLICE: Final = 2.5
"""Interval in seconds at which a thread waiting to lead checks whether the leader was closed."""
ENDED: Final = "its work has ended"


class StopEvent(threading.Event):
    """An event that a signal handler may set while its own thread is entering `wait`.

    With a plain event, the handler would deadlock on the lock that the interrupted thread holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mutex = Mutex()
        self._changed = threading.Condition(self._mutex)  # type: ignore[arg-type]

    def set(self) -> None:
        """Wake all waiters, as soon as this thread is not inside `wait`."""
        self._mutex.do(self._set)

    def _set(self) -> None:
        super().set()
        self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most `timeout` seconds; return whether it is set."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class Term:
    """One period of leadership, as its work sees it."""

    def __init__(self, lease: Lease, margin: float) -> None:
        self.token = lease.token
        """Fencing token; higher than those of all earlier terms."""
        self.stop: threading.Event = StopEvent()
        """Set when the term is over; for work in threads that waits for something else."""
        self.reason = ""
        """Why the term is over; empty while it lasts."""
        self._lease = lease
        self._margin = margin
        self._lasting = [True]
        self._wakers: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = f"over: {self.reason}" if self.reason else f"{self.left:.3g} s left"
        return f"<Term of {self._lease.name!r}, token {self.token}: {state}>"

    @property
    def left(self) -> float:
        """Seconds for which the term lasts if no further renewal succeeds. Once 0, it stays 0."""
        if not self._lasting:
            return 0.0
        left = self._lease.left - self._margin if self._lease.token == self.token else 0.0
        if left <= 0:
            self._end("its lease was lost, or was not renewed in time")
            return 0.0
        return left

    def check(self) -> None:
        """Raise `LeaseLost` if the term is over; call this before each effect."""
        if not self.left:
            raise LeaseLost(f"the term of leader {self._lease.name!r} is over: {self.reason}")

    def _end(self, reason: str) -> bool:
        """End the term; return False if it was already over. From any thread."""
        try:
            self._lasting.pop()  # atomic: only one of two threads succeeds
        except IndexError:
            return False
        self.reason = reason
        self.stop.set()
        for wake in self._wakers:
            wake()
        return True

    def _on_end(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the term is over; immediately if it already is."""
        self._wakers.append(wake)
        if not self._lasting:
            wake()


class Leader:
    """Runs work while it holds a lease: `leader.run(work)`, `await leader.arun(work)`."""

    def __init__(self, lease: Lease, *, margin: float | None = None) -> None:
        """Compete for `lease`, which no other leader may use.

        A term ends `margin` seconds before another process can take the lease: a fifth of its `ttl`
        by default. The work has to stop within the margin.
        """
        if not isinstance(lease, Lease):
            raise TypeError(f"Leader({lease!r}): pass a Lease, such as Lease(store, 'reports')")
        self.lease = lease
        self.margin = lease.ttl / 5 if margin is None else check.seconds("margin", margin)
        if lease.ttl - self.margin <= 1.2 * lease.renew_every:
            most = lease.ttl - 1.2 * lease.renew_every
            raise ValueError(
                f"margin={self.margin:.6g}: write less than {most:.6g}, or no term outlasts a"
                f" renewal (ttl={lease.ttl:.6g}, renew_every={lease.renew_every:.6g})"
            )
        self._term: Term | None = None
        self._closed = StopEvent()
        self._resume_at = float("-inf")
        self._at_close: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Leader of {self.lease!r}>"

    @property
    def term(self) -> Term | None:
        """The current term of this process, if it leads."""
        term = self._term
        return term if term is not None and term.left else None

    @property
    def is_leader(self) -> bool:
        """Whether this process surely leads."""
        return self.term is not None

    def lead(self, timeout: float | None = None) -> Leading:
        """Return a context manager whose block runs while this process leads; sync or async.

        It waits for the lease for at most `timeout` seconds (then `TimedOut`). In a task, the block
        is cancelled when the term is over. A block that ends after its term raises `LeaseLost`.
        """
        if timeout is not None:
            timeout = check.seconds("timeout", timeout, zero=True, infinite=True)
        return Leading(self, timeout)

    def run(self, work: Callable[[Term], T]) -> T | None:
        """Run `work(term)` in this thread while this process leads, and again in each term.

        Return its result if it finished while leading; None if the leader was closed. When
        `term.stop` is set, the work has `margin` seconds to return.
        """
        if kind_of(check.function("work", work)) != "sync":
            raise TypeError(f"work={work!r}: pass a plain function, or write `await leader.arun`")
        while not self._closed.is_set():
            try:
                with self.lead() as term:
                    return work(term)
            except LeaseLost as error:
                self._log_end(error)
        return None

    async def arun(self, work: Callable[[Term], Awaitable[T]]) -> T | None:
        """Async twin of `run`: the task is cancelled when the term is over."""
        if kind_of(check.function("work", work)) != "async":
            raise TypeError(f"work={work!r}: pass an async function, or write `leader.run`")
        while not self._closed.is_set():
            try:
                async with self.lead() as term:
                    return await work(term)
            except LeaseLost as error:
                self._log_end(error)
        return None

    def step_down(self) -> None:
        """End this term so that another process can lead; compete again after half of the `ttl`.

        The lease is released when the work has ended. From any thread.
        """
        term, before = self._term, self._resume_at
        if term is None:
            return
        self._pause()  # before the end: another thread competes again as soon as the term is over
        if not term._end("it stepped down"):
            self._resume_at = before

    def close(self) -> None:
        """End this term and never lead again; `run` and `arun` return. From any thread."""
        self._closed.set()
        term = self._term
        if term is not None:
            term._end("the leader was closed")
        for wake in list(self._at_close):
            wake()

    # Internals

    def _pause(self) -> None:
        """Do not compete for half of the `ttl`."""
        self._resume_at = self.lease.clock.now() + self.lease.ttl / 2

    def _log_end(self, error: LeaseLost) -> None:
        """Log why a term ended; work that raised LeaseLost itself must not restart immediately."""
        logging.getLogger("seawall").info("leader %r: %s", self.lease.name, error)
        if self._term is not None and self._term.reason == ENDED:
            self._pause()

    def _begin(self) -> Term | None:
        """Start a term with the lease just acquired; return None if too little of it is left."""
        term = Term(self.lease, self.margin)
        self._term = term
        if self._closed.is_set():
            term._end("the leader was closed")
        return term if term.left else None


class Leading:
    """Context manager of one term."""

    def __init__(self, leader: Leader, timeout: float | None) -> None:
        self._leader = leader
        self._lease = leader.lease
        self._timeout = timeout

    # Common to threads and tasks

    def _waits(self, began: float) -> tuple[float, float | None]:
        """Return how long to rest before competing, and how much of the timeout is left."""
        if self._leader._closed.is_set():
            raise LeaseLost(f"the leader {self._lease.name!r} was closed")
        now = self._lease.clock.now()
        left = None if self._timeout is None else max(0.0, began + self._timeout - now)
        rest = max(0.0, self._leader._resume_at - now)
        if rest and left == 0.0:
            text = f"the leader {self._lease.name!r} lets others go first for {rest:.3g} s more"
            raise TimedOut(text, guard=self._lease.name, seconds=self._timeout)
        return (rest if left is None else min(rest, left)), left

    def _begin(self, term: Term) -> None:
        """Start the term; check it as soon as the lease is lost, not only when its time is over."""
        self._term, self._has_ended = term, False
        name = self._lease.name

        def look(event: LeaseChanged) -> None:
            if event.guard == name and not event.held:
                term.left  # noqa: B018 - reading `left` ends a term that is over

        self._unsubscribe = subscribe(look, LeaseChanged)

    def _end(self) -> bool:
        """Record that the block has ended; return whether its term was already over."""
        self._has_ended = True
        self._unsubscribe()
        was_over = not self._term.left
        self._term._end(ENDED)
        return was_over

    def _term_over(self) -> LeaseLost:
        reason = self._term.reason
        return LeaseLost(f"the term of leader {self._lease.name!r} is over: {reason}")

    def _log_overrun(self) -> None:
        logging.getLogger("seawall").error(
            "leader %r: its work goes on though the lease is over, and another process may lead by"
            " now: make it stop within the margin of %.3g s, and check token %d where its effects"
            " are kept",
            self._lease.name,
            self._leader.margin,
            self._term.token,
        )

    # Threads

    def __enter__(self) -> Term:
        leader, lease = self._leader, self._lease
        began = lease.clock.now()
        while True:
            rest, left = self._waits(began)
            if rest:
                leader._closed.wait(rest)
                continue
            is_last = left is not None and left <= SLICE
            try:
                lease.acquire(left if is_last else SLICE)
            except (TimedOut, StoreUnavailable):
                if is_last or lease.closed:
                    raise
                continue
            term = leader._begin()
            if term is not None:
                break
            lease.release()
        self._begin(term)
        self._done = threading.Event()
        name = f"seawall-leader {lease.name}"
        try:
            threading.Thread(target=self._watch, args=(term,), name=name, daemon=True).start()
        except BaseException:  # the process has too many threads: another process must lead
            self._end()
            lease.release()
            raise
        return term

    def _watch(self, term: Term) -> None:
        """End the term in time, and log an error if its work outlasts the lease."""
        while left := term.left:
            term.stop.wait(left)
        while not self._done.wait(self._lease.left):
            if not self._lease.held:
                self._log_overrun()
                return

    def __exit__(self, kind: object, *_exc: object) -> None:
        was_over = self._end()
        self._done.set()
        self._lease.release()
        if was_over and kind is None:
            raise self._term_over()

    # Tasks

    async def __aenter__(self) -> Term:
        term = await self._acquire()
        self._begin(term)
        self._loop = asyncio.get_running_loop()
        self._timeout_scope, self._is_cancelled = await asyncio.timeout(None).__aenter__(), False
        self._timer = self._loop.call_soon(self._check_term)
        term._on_end(lambda: _call_in_loop(self._loop, self._check_term))
        return term

    async def _acquire(self) -> Term:
        """Wait for a term; stop waiting when the leader is closed."""
        leader, lease, loop = self._leader, self._lease, asyncio.get_running_loop()
        began = lease.clock.now()

        def stop_waiting() -> None:
            with suppress(RuntimeError):  # it no longer waits
                waiting.reschedule(loop.time())

        def wake() -> None:
            _call_in_loop(loop, stop_waiting)

        leader._at_close.append(wake)
        try:
            async with asyncio.timeout(None) as waiting:
                while True:
                    rest, left = self._waits(began)
                    if rest:
                        await sleep_async(rest)
                        continue
                    await lease.aacquire(left)
                    term = leader._begin()
                    if term is not None:
                        return term
                    await lease.arelease()
        except TimeoutError:
            if not waiting.expired():
                raise
            raise LeaseLost(f"the leader {lease.name!r} was closed") from None
        finally:
            leader._at_close.remove(wake)

    def _check_term(self) -> None:
        """Cancel the block when its term is over; log an error if it outlasts the lease."""
        self._timer.cancel()
        if self._has_ended:  # the block ended between the end of the term and this call
            return
        if left := self._term.left:
            self._timer = self._loop.call_later(left, self._check_term)
            return
        if not self._is_cancelled:
            self._is_cancelled = True
            self._timeout_scope.reschedule(self._loop.time())
        if self._lease.held:
            self._timer = self._loop.call_later(self._lease.left, self._check_term)
        else:
            self._log_overrun()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        was_over = self._end()
        self._timer.cancel()
        try:
            await self._timeout_scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._term_over() from error
        finally:
            await self._lease.arelease()
        if was_over and kind is None:
            raise self._term_over()


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Schedule `callback` in `loop`, if the loop is still running."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
