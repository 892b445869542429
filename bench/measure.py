"""Times the cases of all rows, paired and interleaved, and the statistics of that.

Machines get faster and slower while one measures. So each round runs every case once, a row's
cases close together and all in an order drawn from a seed; what is compared is compared within a
round, and of the rounds the median counts.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from contextvars import Context, ContextVar
from itertools import repeat
from random import Random
from types import FunctionType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.cases import Function, Row

CLOCKS: dict[str, Callable[[], float]] = {
    # What the call keeps a processor busy with, in all threads: says the same on a busy machine.
    "cpu": time.process_time,
    "wall": time.perf_counter,
}

ARGUMENT = "answer"

VARIABLES = [ContextVar(f"bench_{name}") for name in ("request", "trace", "user")]
"""What a service keeps in its context. Setting a variable costs more where others are set."""

Samples = dict[str, dict[str, list[float]]]
"""Seconds a call, by row, case and round."""


class Plan(NamedTuple):
    """How thoroughly to measure."""

    rounds: int = 15
    seconds: float = 0.025
    """How long one measurement takes, about."""
    seed: int = 1
    clock: str = "cpu"


# --- Statistics ---


def median(samples: Sequence[float]) -> float:
    """Return the middle of `samples`."""
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """Return how far the middle half of `samples` reaches, as a share of their median."""
    if len(samples) == 1:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of two cases, round by round."""
    return median([a / b for a, b in zip(over, under, strict=True)])


# --- One measurement ---


def _loop(function, calls, clock):
    begin = clock()
    for _ in repeat(None, calls):
        function(ARGUMENT)
    return clock() - begin


async def _async_loop(function, calls, clock):
    begin = clock()
    for _ in repeat(None, calls):
        await function(ARGUMENT)
    return clock() - begin


def service_context() -> Context:
    """Return a new context like a service's: what one case leaves in it is no other's burden."""
    context = Context()
    for variable in VARIABLES:
        context.run(variable.set, variable.name)
    return context


def own_copy(function):
    """Return the same function with code of its own.

    The interpreter adapts code to what it calls. A loop that calls one case after the other would
    be adapted to none, and a case would be slow or fast by what was measured before it.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class Contestant:
    """A case that is ready to be measured."""

    def __init__(self, name: str, kind: str, function: Function, clock: str) -> None:
        """Measure calls of `function` by the clock of that name."""
        self.name = name
        self.samples: list[float] = []
        self.calls = 1
        self._function = function
        self._clock = CLOCKS[clock]
        self._is_async = kind == "async"
        self._loop = own_copy(_async_loop if self._is_async else _loop)

    async def check(self) -> None:
        """Make sure that it does what is measured: it returns what the function returns."""
        for _ in range(3):
            value = self._function(ARGUMENT)
            value = await value if self._is_async else value
            assert value == ARGUMENT, f"{self.name} returned {value!r}"

    async def calibrate(self, seconds: float) -> None:
        """Choose the number of calls of each measurement, and warm up."""
        self.calls = 16
        while (took := await self._time()) < seconds / 4:
            self.calls *= 2
        self.calls = max(1, round(self.calls * seconds / took))

    async def measure(self) -> None:
        """Take one sample."""
        self.samples.append(await self._time() / self.calls)

    async def _time(self) -> float:
        await asyncio.sleep(0)  # what was scheduled meanwhile is done outside the measurement
        gc.collect()
        gc.disable()
        try:
            arguments = self._function, self.calls, self._clock
            if self._is_async:
                loop = asyncio.get_running_loop()
                return await loop.create_task(self._loop(*arguments), context=service_context())
            return service_context().run(self._loop, *arguments)
        finally:
            gc.enable()


# --- All of them ---


def orders(rows: Sequence[Sequence], rounds: int, seed: int):
    """Yield an order of all cases for each round: rows shuffled, and the cases within each."""
    chance = Random(seed)
    for _ in range(rounds):
        shuffled = [chance.sample(row, len(row)) for row in chance.sample(rows, len(rows))]
        yield [case for row in shuffled for case in row]


async def measure(rows: Sequence[Row], plan: Plan, progress: Callable[[str], None]) -> Samples:
    """Measure all cases of `rows`, in the loop that runs this."""
    contestants: dict[str, list[Contestant]] = {}
    for row in rows:
        progress(f"calibrating {row.name}")
        contestants[row.name] = [
            Contestant(name, row.kind, make(row.work), plan.clock)
            for name, make in row.cases.items()
        ]
        for contestant in contestants[row.name]:
            await contestant.check()
            await contestant.calibrate(plan.seconds)
    for number, order in enumerate(orders(list(contestants.values()), plan.rounds, plan.seed), 1):
        progress(f"round {number} of {plan.rounds}")
        for contestant in order:
            await contestant.measure()
    return {
        row: {contestant.name: contestant.samples for contestant in contestants[row]}
        for row in contestants
    }
