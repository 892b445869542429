"""Hedge of plain functions: every copy in a worker thread; the caller waits for the first.

A thread cannot be stopped: a copy that lost continues, holds its resources, and is counted until it
ends; then its value is disposed of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from seawall._failures import log_failure
from seawall.context import seconds_left
from seawall.errors import DeadlineExceeded
from seawall.policies.hedge.policy import HedgeAccount
from seawall.policies.hedge.race import Race
from seawall.runtime.call import Abandoned, current_trace, mark_withdrawn
from seawall.runtime.driver import wait_sync
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Host, Kind
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import ThreadJob, WorkerPool

if TYPE_CHECKING:
    from seawall.policies.hedge.policy import HedgeBound


class ThreadHedge(ThreadDriver):
    """Runs the inner layers in a worker thread, and after the delay in another one."""

    def __init__(self, bound: HedgeBound, pool: WorkerPool) -> None:
        super().__init__(bound.host, pool, bound.policy.kind)
        self.bound = bound

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        """Return a function that runs `inner`, in copies if it is slow."""
        bound = self.bound

        def hedged(*args: Any, **kwargs: Any) -> Any:
            delay = bound.begin(host)
            if delay is None:
                return inner(*args, **kwargs)
            copies = ThreadCopies(self, partial(inner, *args, **kwargs))
            if not copies.start(1):
                bound.count_skipped("threads")
                return inner(*args, **kwargs)  # as without a hedge
            return copies.result(delay)

        budget = bound.policy.budget
        if budget is None or not bound.reports_to_budget:
            return hedged

        def accounted(*args: Any, **kwargs: Any) -> Any:
            with HedgeAccount(budget, host.clock):
                return hedged(*args, **kwargs)

        return accounted

    def dispose(self, value: Any) -> None:
        """Dispose of an unwanted value."""
        disposal = self.bound.dispose(value)
        if hasattr(disposal, "__await__"):
            getattr(disposal, "close", bool)()
            error = TypeError("dispose is async, the call is not")
            log_failure("guard %r: dispose failed", self.host.name, error=error)


class _CopyJob(ThreadJob):
    """The work of one copy."""

    __slots__ = ("race",)

    race: Race

    def goes_on(self) -> bool:
        """End a wait. Return False if the answer is known, even if the caller has not seen it."""
        return not self.race.over and super().goes_on()


class ThreadCopies:
    """The threads that run for one call."""

    def __init__(self, driver: ThreadHedge, inner: Callable[[], Any]) -> None:
        self._driver = driver
        self._inner = inner
        self._jobs: dict[int, ThreadJob] = {}
        self._race = Race(driver.bound, driver.host.clock.now())

    def start(self, number: int) -> bool:
        """Give copy `number` to a free thread. Return False if there is none."""
        race, driver, inner = self._race, self._driver, self._inner

        def copy() -> None:
            if race.over:
                return  # the answer is known
            try:
                value = inner()
            except Exception as error:  # noqa: BLE001 - raised in the caller, if none returns
                race.failed(error)
                return
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                race.record_exit(error)
                return
            if not race.returned(number, value):
                driver.dispose(value)

        done = partial(race.ended, number)
        job = _CopyJob(copy, (), {}, done, driver.host.name, driver.pool)
        job.race = race
        try:
            taken = driver.pool.submit(job)
        except RuntimeError:  # the system cannot create more threads
            taken = False
        if taken:
            self._jobs[number] = job
        return taken

    def result(self, delay: float) -> Any:
        """Wait for the first value. After every `delay` seconds start another copy."""
        race, driver = self._race, self._driver
        clock = driver.host.clock
        seconds = seconds_left()
        ends = inf if seconds is None else race.began + seconds
        due = race.began + delay
        error: BaseException | None = None
        try:
            while not race.decided:
                if wait_sync(race.decision(min(due, ends)), clock):
                    break
                if ends <= due:
                    error = self._out_of_time(seconds or 0.0)
                    break
                left = None if ends == inf else ends - clock.now()
                due = due + delay if self._start_another(left) else inf
        except BaseException as stopped:
            self.give_up(stopped)
            raise
        if error is None and (race.exit is not None or not race.over):
            error = race.take_failure()
            self._attach(self._withdraw(), error)
        if error is not None:
            try:
                raise error
            finally:
                del error
        self._count(self._withdraw())
        value, race.value = race.value, None
        return value

    def _start_another(self, left: float | None) -> bool:
        """Start a copy if permitted. Return whether yet another may follow."""
        race, pool = self._race, self._driver.pool
        if pool.in_use >= pool.size:
            self._driver.bound.count_skipped("threads")
            return False
        number = race.grow(left)
        if not number:
            return False
        under_way = race.running
        if not self.start(number):
            race.not_started(number, "threads")  # another call took the last thread
            return False
        self._driver.bound.count_copy(under_way, race.began)
        return race.may_grow()

    def _out_of_time(self, seconds: float) -> BaseException | None:
        """Return the error, unless a value arrived at this very moment."""
        if not self._race.close():
            return None
        driver = self._driver
        running = self._withdraw()
        began = self._race.failure is not None or bool(running)
        error = driver.late(seconds, began=began)
        if isinstance(error, DeadlineExceeded):
            count_refusal(driver.host, driver.policy, error.reason)
        self._race.failure = None
        self._attach(running, error)
        return error

    def give_up(self, error: BaseException) -> None:
        """Stop waiting: the call is interrupted by `error`."""
        self._race.close()
        running = self._withdraw()
        if not running and self._race.failure is None:
            mark_withdrawn(error)
        self._attach(running, error)

    def _withdraw(self) -> list[Abandoned]:
        """Withdraw copies that have not started. Return and count the threads that continue."""
        race, driver = self._race, self._driver
        running = []
        for number, job in self._jobs.items():
            left = driver.pool.give_up(job)
            if left is False:
                race.ended(number)
            elif isinstance(left, Abandoned):
                driver._left_running(left, Exception())  # of a call that ends with a value
                running.append(left)
                if number == 1 and race.winner:
                    # Otherwise slow calls would seem to get rarer.
                    driver.host.stats.cut_off(driver.host.clock.now() - race.began)
        return running

    def _attach(self, running: list[Abandoned], error: BaseException) -> None:
        """Attach the threads to `error`. The guard counts one attempt for it, this the rest."""
        if running:
            together(running).attach(error)
            self._count([left for left in running if not left.counted][1:])

    def _count(self, losers: list[Abandoned]) -> None:
        """Count threads that run the function. Those waiting in outer layers never reach it."""
        host = self._driver.host
        trace = current_trace(host.name)
        begun = sum(not left.counted for left in losers)
        host.stats.cancelled += begun
        if trace is not None:
            trace.attempts += begun


def together(works: list[Abandoned]) -> Abandoned:
    """Return an object that stops when all of `works` have stopped."""
    first, *rest = works
    if not rest:
        return first
    everything = Abandoned()
    everything.counted = all(work.counted for work in works)

    def next_one() -> None:
        if rest:
            rest.pop().when_stopped(next_one)
        else:
            everything.stopped()

    first.when_stopped(next_one)
    return everything
