"""How several threads get on that share one guarded function, against one thread alone.

With a global interpreter lock threads share one processor, so at best the total is what one thread
does alone. What is lost from that is lost by waiting for each other.
"""

from __future__ import annotations

import asyncio
import time
from itertools import repeat
from random import Random
from threading import Barrier, Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

from bench.cases import BARE, OURS, bare, stack, work
from bench.measure import ARGUMENT, Contestant, own_copy
from bench.peers import UNTIMED, pyresilience_stack_untimed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cases import Function, Make


def one_lock(function):
    """Hold one lock during the call: what contention looks like, if there is any to be seen."""
    lock = Lock()

    def guarded(argument):
        with lock:
            return function(argument)

    return guarded


CASES: dict[str, Make] = {
    BARE: bare,
    "one lock, for contrast": one_lock,
    OURS: stack,
    UNTIMED: pyresilience_stack_untimed,
}

Rates = dict[str, dict[int, list[float]]]
"""Calls a second of all threads together, by case, number of threads and repeat."""


class Plan(NamedTuple):
    """How thoroughly to measure."""

    repeats: int = 9
    seconds: float = 0.3
    """How long one thread alone takes for the calls of one measurement, about."""
    counts: tuple[int, ...] = (1, 2, 4, 8)
    seed: int = 1


def _loop(function, calls, barrier, times):
    barrier.wait()
    begin = time.perf_counter()
    for _ in repeat(None, calls):
        function(ARGUMENT)
    times.append((begin, time.perf_counter()))


def rate(function: Function, loop: Callable, calls: int, threads: int) -> float:
    """Return the calls a second that `threads` threads do together, of about `calls` calls."""
    times: list[tuple[float, float]] = []
    barrier = Barrier(threads)
    each = max(1, calls // threads)
    crew = [Thread(target=loop, args=(function, each, barrier, times)) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    took = max(end for _, end in times) - min(begin for begin, _ in times)
    return each * threads / took


def measure(plan: Plan, progress: Callable[[str], None], cases: dict[str, Make] = CASES) -> Rates:
    """Measure all cases with all numbers of threads, interleaved in an order drawn from a seed."""
    functions = {name: make(work) for name, make in cases.items()}
    loops = {name: own_copy(_loop) for name in cases}
    calls = {}
    for name, function in functions.items():
        contestant = Contestant(name, "sync", function, "wall")
        asyncio.run(contestant.calibrate(plan.seconds))
        calls[name] = contestant.calls
    rates: Rates = {name: {count: [] for count in plan.counts} for name in cases}
    chance = Random(plan.seed)
    for number in range(1, plan.repeats + 1):
        progress(f"threads, repeat {number} of {plan.repeats}")
        turns = [(name, count) for name in cases for count in plan.counts]
        for name, count in chance.sample(turns, len(turns)):
            rates[name][count].append(rate(functions[name], loops[name], calls[name], count))
    return rates
