"""Helpers for testing code that uses Seawall: virtual time, failing services and stores.

    def test_outage() -> None:
        async def main() -> None:
            vendor = Guard("vendor", Retry(on=ConnectionError), Timeout(2.0))
            service = ScriptedService(fail(ConnectionError(), times=2), answer("hello"))
            assert await vendor.acall(service.acall) == "hello"

        run_virtual(main())        # the pauses between attempts take no real time

Guards made inside `run_virtual` or `virtual_time` use virtual time automatically.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, Literal, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import VirtualClock, check_clock, clock_var, current_clock
from seawall.events import log
from seawall.policies.retry.policy import switch
from seawall.redis.fake import FakeStore
from seawall.runtime.call import bypass
from seawall.runtime.fastpath import switch_policies
from seawall.runtime.policy import Policy, bindings_of
from seawall.runtime.slots import live_slots
from seawall.runtime.workers import live_pools

__all__ = [
    "FakeStore",
    "ScriptedService",
    "Step",
    "answer",
    "empty_registry",
    "fail",
    "hang",
    "held_permits",
    "no_leaked_permits",
    "policies_off",
    "retries",
    "run_virtual",
    "slow",
    "virtual_time",
]

T = TypeVar("T")


@contextmanager
def virtual_time(clock: VirtualClock | None = None) -> Iterator[VirtualClock]:
    """Make guards inside the block use a virtual clock: sync pauses return immediately."""
    clock = VirtualClock() if clock is None else clock
    check_clock(clock)
    token = clock_var.set(clock)
    try:
        yield clock
    finally:
        clock_var.reset(token)


def run_virtual(
    main: Coroutine[Any, Any, T],
    *,
    clock: VirtualClock | None = None,
    seed: int | None = None,
    patience: float = 5.0,
) -> T:
    """Run `main` as `asyncio.run` does, on a loop whose time jumps to the next timer.

    With `seed`, what is ready at the same moment runs in an order drawn from it: the same seed
    gives the same order, another seed another one. When nothing can ever wake the loop again, a
    RuntimeError lists the waiting tasks, after `patience` real seconds (a thread might still wake
    it).
    """
    from seawall.runtime.virtual import run

    with virtual_time(clock) as current:
        return run(main, clock=current, seed=seed, patience=patience)


@contextmanager
def empty_registry() -> Iterator[None]:
    """Start the block without any guard, so that all names are free in it.

    At its end the guards made inside are closed, and the previous ones can be found by name again.
    The functions that they guard work all the time. Log lines that are limited for each guard are
    written again.
    """
    log.changes.reset()
    with registry.emptied():
        yield


@contextmanager
def retries(mode: Literal["instant", "off"]) -> Iterator[None]:
    """Make all retries inside the block instant, or switch them off."""
    check.choice("mode", mode, ("instant", "off"))
    before = switch.instant, switch.off
    switch.instant, switch.off = mode == "instant", mode == "off"
    try:
        yield
    finally:
        switch.instant, switch.off = before


@contextmanager
def policies_off() -> Iterator[None]:
    """Make all guards inside the block call their functions directly, as if they had no policy.

    This applies to the whole process, including functions that were decorated before. Calls in
    progress continue as they began. What is not a guard (an edge, a pool, an executor) works as
    usual.
    """
    with _blocks_lock:
        _blocks.append(bypass.on)
        switch_policies(off=True)
    try:
        yield
    finally:
        with _blocks_lock:  # blocks may overlap, in threads or tasks: the last one switches back
            before = _blocks[0]
            _blocks.pop()
            if not _blocks:
                switch_policies(off=before)


_blocks_lock: Final = Lock()
_blocks: Final[list[bool]] = []
"""For each open block of `policies_off()`, whether policies were off before it."""


class Step:
    """What a scripted service does for some calls: `answer`, `fail`, `slow` or `hang`."""

    __slots__ = ("delay", "error", "times", "value")

    def __init__(
        self,
        *,
        value: Any = None,
        error: Exception | Callable[[], Exception] | None = None,
        delay: float = 0.0,
        times: int | None = 1,
    ) -> None:
        """Take `delay`, then raise `error` or return `value`; for ever, if `times` is None."""
        self.value = value
        self.error = (
            error if isinstance(error, Exception | None) else check.plain_function("error", error)
        )
        self.delay = check.seconds("delay", delay, zero=True, infinite=True)
        self.times = None if times is None else check.count("times", times)


def answer(value: Any = None, *, times: int | None = 1) -> Step:
    """Return `value` immediately."""
    return Step(value=value, times=times)


def fail(error: Exception | Callable[[], Exception], *, times: int | None = 1) -> Step:
    """Raise `error`, or the result of `error()`: a type makes a new error each time."""
    if not isinstance(error, Exception) and not callable(error):
        raise TypeError(f"fail({error!r}): pass an error, its type, or a function that makes one")
    return Step(error=error, times=times)


def slow(seconds: float, value: Any = None, *, times: int | None = 1) -> Step:
    """Return `value` after `seconds`."""
    return Step(value=value, delay=seconds, times=times)


def hang(*, times: int | None = 1) -> Step:
    """Never return; only for async calls, which can be cancelled."""
    return Step(delay=float("inf"), times=times)


class ScriptedService:
    """A service that follows its script, call by call; the last step repeats for ever."""

    def __init__(self, *steps: Step, clock: VirtualClock | None = None) -> None:
        """Follow `steps`. Slow sync calls need the `clock` on which they are slow."""
        if not steps:
            raise ValueError("ScriptedService(): give it a step, such as answer('hello')")
        self.calls = 0
        """Number of calls that have begun."""
        self.running = 0
        """Number of calls in progress."""
        self.peak = 0
        """Maximum number of calls that were in progress at the same time."""
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(f"ScriptedService({step!r}): write answer({step!r}), fail(...)...")
        self._clock = clock
        self._lock = Lock()
        self._script = _script(steps)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Simulate a call of a plain function, with any arguments."""
        step = self._begin()
        try:
            if step.delay:
                clock = self._clock or current_clock()
                if not isinstance(clock, VirtualClock) or step.delay == float("inf"):
                    raise RuntimeError(
                        "a plain call cannot wait here: use slow(...) in virtual_time(), or give"
                        " ScriptedService a VirtualClock, and use acall for hang()"
                    )
                clock.sleep(step.delay)
            return _end(step)
        finally:
            self._ended()

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Simulate a call of an async function, with any arguments."""
        import asyncio

        step = self._begin()
        try:
            if step.delay == float("inf"):
                await asyncio.get_running_loop().create_future()
            # Even without a delay, the loop gets its turn, as with a real service.
            await asyncio.sleep(step.delay)
            return _end(step)
        finally:
            self._ended()

    def _begin(self) -> Step:
        with self._lock:
            self.calls += 1
            self.running += 1
            self.peak = max(self.peak, self.running)
            return next(self._script)

    def _ended(self) -> None:
        with self._lock:
            self.running -= 1


def _script(steps: tuple[Step, ...]) -> Generator[Step, None, None]:
    for step in steps[:-1]:
        for _ in range(step.times or 1) if step.times is not None else iter(int, 1):
            yield step
    while True:
        yield steps[-1]


def _end(step: Step) -> Any:
    if step.error is None:
        return step.value
    raise step.error if isinstance(step.error, Exception) else step.error()


def held_permits() -> dict[str, int]:
    """Return how many slots (of bulkheads, limits, pools) and worker threads are taken.

    They are listed by the names of their guards, registered or not, or of the pool; entries without
    any are left out.
    """
    held: dict[str, int] = {}
    for slots in list(live_slots):
        if slots.in_use:
            name = _owner(slots.owner())
            held[name] = held.get(name, 0) + slots.in_use
    for pool in list(live_pools):
        if pool.in_use:
            name = f"{pool.name} threads"
            held[name] = held.get(name, 0) + pool.in_use
    return held


def _owner(owner: object) -> str:
    if isinstance(owner, Policy):
        return " and ".join(sorted({bound.host.name for bound in bindings_of(owner)})) or repr(
            owner
        )
    return str(getattr(owner, "name", owner))


@contextmanager
def no_leaked_permits() -> Iterator[None]:
    """Fail if the block leaves a slot of a bulkhead, or a worker thread, taken."""
    before = held_permits()
    yield
    leaked = {
        name: taken - before.get(name, 0)
        for name, taken in held_permits().items()
        if taken > before.get(name, 0)
    }
    if leaked:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(leaked.items()))
        raise AssertionError(f"slots still taken at the end: {listed}")
