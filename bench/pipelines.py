"""What a pipeline costs: two trivial stages, and a stage of pure computing in two processes.

Items are numbers; the stages add one and double. By hand means two tasks between bounded queues of
asyncio, as its documentation does it, with `task_done` and `join`: nothing there counts,
acknowledges or gives back, and nothing retries except where a loop is written for it. The queues of
the pipelines have the same bounds, and their stages one worker each.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.measure import CLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PIPELINES = "pipelines"
IN_BATCHES = "pipelines, in batches"
IN_PROCESSES = "pipelines, in processes"

HAND = "asyncio.Queue by hand"
HAND_RETRIED = "asyncio.Queue by hand, with a loop that retries"
UNGUARDED = "Seawall, without guards"
RETRIED = "Seawall, each stage behind a Retry"
GUARDED = "Seawall, each stage behind a Breaker and a Timeout"
BATCHED = "Seawall, batches of 100"
AIOSTREAM = "aiostream, 10 at once"
PYPELN_TASKS = "pypeln, tasks"
PYPELN_THREADS = "pypeln, threads"
BYTEWAX = "bytewax, item by item"
BYTEWAX_BATCHED = "bytewax, batches of 100"
ALONE = "one process"
BARE_TWO = "two bare processes"
POOLED = "Seawall, a CpuPool of two"

SIZE = 100
"""Items that wait in a queue, or make a batch."""

LEAST_ROUNDS = 3


class Plan(NamedTuple):
    """How thoroughly to measure."""

    rounds: int = 9
    items: int = 20_000
    computed: int = 100
    """Items of the stage in processes, of some milliseconds each."""
    seconds: float = 120.0
    """When to stop; the round that has begun is finished, and there are at least three."""
    seed: int = 1
    clock: str = "cpu"


async def add(number: int) -> int:
    """Do next to nothing."""
    return number + 1


async def double(number: int) -> int:
    """Do next to nothing."""
    return number * 2


# --- Two stages ---


async def by_hand(items: int) -> list[int]:
    """Send all items through two tasks."""
    return await _by_hand(items, add, double)


async def by_hand_retried(items: int) -> list[int]:
    """Do the same, with a loop around each call as one would write it."""

    def retried(function):
        async def call(value: int) -> int:
            for attempt in range(3):
                try:
                    return await function(value)
                except ConnectionError:
                    if attempt == 2:
                        raise
                    await asyncio.sleep(chance.uniform(0.0, 0.1 * 2**attempt))
            raise AssertionError

        return call

    chance = Random()
    return await _by_hand(items, retried(add), retried(double))


async def _by_hand(items: int, one, other) -> list[int]:
    first: asyncio.Queue[int] = asyncio.Queue(SIZE)
    second: asyncio.Queue[int] = asyncio.Queue(SIZE)
    third: asyncio.Queue[int] = asyncio.Queue(SIZE)
    stored: list[int] = []

    async def stage(function, come: asyncio.Queue[int], go: asyncio.Queue[int]) -> None:
        while True:
            value = await come.get()
            await go.put(await function(value))
            come.task_done()

    async def store() -> None:
        while True:
            stored.append(await third.get())
            third.task_done()

    tasks = [
        asyncio.create_task(stage(one, first, second)),
        asyncio.create_task(stage(other, second, third)),
        asyncio.create_task(store()),
    ]
    for number in range(items):
        await first.put(number)
    for queue in (first, second, third):
        await queue.join()
    for task in tasks:
        task.cancel()
    return stored


async def _ours(items: int, policies: Callable[[], Sequence[Any]]) -> list[int]:
    from seawall import Guard
    from seawall.pipeline import Pipeline

    stored: list[int] = []
    guards = [
        Guard(f"bench-{number}", *policies(), replace=True) if policies() else None
        for number in range(2)
    ]
    pipeline = Pipeline("bench")
    (
        pipeline.read(range(items))
        .stage(add, guard=guards[0], capacity=SIZE)
        .stage(double, guard=guards[1], capacity=SIZE)
        .sink(stored.append, name="store")
    )
    await pipeline.run()
    for guard in guards:
        if guard is not None:
            guard.close()
    return stored


async def unguarded(items: int) -> list[int]:
    """Send all items through a pipeline."""
    return await _ours(items, tuple)


async def retried(items: int) -> list[int]:
    """Do the same, with a retry for each stage."""
    from seawall import Retry

    return await _ours(items, lambda: [Retry(on=ConnectionError, attempts=3)])


async def guarded(items: int) -> list[int]:
    """Do the same, with a breaker and a timeout for each stage."""
    from seawall import Breaker, Timeout

    return await _ours(items, lambda: [Breaker(failure_ratio=0.5), Timeout(2.0)])


async def batched(items: int) -> list[int]:
    """Do the same in batches, as for a database, with a breaker and a timeout."""
    from seawall import Breaker, Guard, Timeout
    from seawall.pipeline import Pipeline

    stored: list[int] = []
    guards = [
        Guard(f"bench-{number}", Breaker(failure_ratio=0.5), Timeout(2.0), replace=True)
        for number in range(2)
    ]

    async def add_all(numbers: list[int]) -> list[int]:
        return [number + 1 for number in numbers]

    async def double_all(numbers: list[int]) -> list[int]:
        return [number * 2 for number in numbers]

    pipeline = Pipeline("bench")
    (
        pipeline.read(range(items))
        .stage(add_all, guard=guards[0], batch=(SIZE, 1.0))
        .stage(double_all, guard=guards[1], batch=(SIZE, 1.0))
        .sink(stored.extend, name="store", batch=(SIZE, 1.0))
    )
    await pipeline.run()
    for guard in guards:
        guard.close()
    return stored


async def by_aiostream(items: int) -> list[int]:
    """Use aiostream's operators with a bound on what is done at once."""
    from aiostream import pipe, stream

    source = stream.iterate(range(items))
    through = source | pipe.map(add, task_limit=10) | pipe.map(double, task_limit=10)
    return await (through | pipe.list())


def _by_pypeln(stages, items: int, first, second) -> list[int]:
    through = stages.map(first, range(items), workers=1, maxsize=SIZE)
    return list(stages.map(second, through, workers=1, maxsize=SIZE))


def by_pypeln_tasks(items: int) -> list[int]:
    """Use pypeln's tasks, which run in a thread of their own."""
    import pypeln

    return _by_pypeln(pypeln.task, items, add, double)


def by_pypeln_threads(items: int) -> list[int]:
    """Use pypeln's threads."""
    import pypeln

    return _by_pypeln(pypeln.thread, items, lambda number: number + 1, lambda number: number * 2)


def _by_bytewax(items: int, size: int) -> list[int]:
    import bytewax.operators as op
    from bytewax.dataflow import Dataflow
    from bytewax.testing import TestingSink, TestingSource, run_main

    stored: list[int] = []
    flow = Dataflow("bench")
    read = op.input("read", flow, TestingSource(range(items), batch_size=size))
    added = op.map("add", read, lambda number: number + 1)
    op.output("store", op.map("double", added, lambda number: number * 2), TestingSink(stored))
    run_main(flow)
    return stored


def by_bytewax(items: int) -> list[int]:
    """Use bytewax, whose functions are plain."""
    return _by_bytewax(items, 1)


def by_bytewax_in_batches(items: int) -> list[int]:
    """Do the same from a source that hands out a hundred at once."""
    return _by_bytewax(items, SIZE)


CASES: dict[str, Callable[[int], Any]] = {
    HAND: by_hand,
    HAND_RETRIED: by_hand_retried,
    UNGUARDED: unguarded,
    RETRIED: retried,
    GUARDED: guarded,
    AIOSTREAM: by_aiostream,
    PYPELN_TASKS: by_pypeln_tasks,
    PYPELN_THREADS: by_pypeln_threads,
    BYTEWAX: by_bytewax,
}
BATCHES: dict[str, Callable[[int], Any]] = {
    BATCHED: batched,
    BYTEWAX_BATCHED: by_bytewax_in_batches,
}
SLOW = frozenset({AIOSTREAM, PYPELN_TASKS, PYPELN_THREADS})
"""A tenth of the items is enough to see what these cost."""
APART = frozenset({PYPELN_TASKS, PYPELN_THREADS})
"""Measured in a process each time: now and then one never ends, and each leaves threads behind."""
APART_WITHIN = 20.0
TRIES = 5


def cost(name: str, case: Callable[[int], Any], items: int, clock: str) -> float:
    """Return the seconds that one item takes."""
    items = items // 10 if name in SLOW else items
    now = CLOCKS[clock]
    gc.collect()
    gc.disable()
    try:
        taken, stored = _timed(case, items, now)
    finally:
        gc.enable()
    assert sorted(stored) == [2 * (number + 1) for number in range(items)], name
    return taken / items


def _timed(
    case: Callable[[int], Any], items: int, now: Callable[[], float]
) -> tuple[float, list[int]]:
    if asyncio.iscoroutinefunction(case):

        async def main() -> tuple[float, list[int]]:
            begin = now()
            stored = await case(items)
            return now() - begin, stored

        return asyncio.run(main())
    begin = now()
    stored = case(items)
    return now() - begin, stored


def _cost_apart(name: str, items: int, clock: str) -> float:
    """Return what `cost` does, from another process; one that does not end is tried again."""
    spawn = multiprocessing.get_context("spawn")
    for _ in range(TRIES):
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_send_cost, args=(there, name, items, clock), daemon=True)
        process.start()
        there.close()
        has_ended = here.poll(APART_WITHIN)
        taken = here.recv() if has_ended else None
        process.kill()
        process.join()
        here.close()
        if taken is not None:
            return taken
    raise SystemExit(f"bench: {name} did not end within {APART_WITHIN:g} s, {TRIES} times in a row")


def _send_cost(there, name: str, items: int, clock: str) -> None:
    cost(name, CASES[name], 100, clock)  # it has imported its library then
    there.send(cost(name, CASES[name], items, clock))


# --- Two processes ---


def compute(number: int) -> int:
    """Keep a processor busy for some milliseconds."""
    total = 0
    for one in range(60_000):
        total += one ^ number
    return total


def _alone(items: int) -> float:
    begin = time.perf_counter()
    for number in range(items):
        compute(number)
    return time.perf_counter() - begin


BEGIN_WITHIN = 60.0
"""Seconds that a bare process has to start."""


def _compute_share(begin, items: int) -> None:
    begin.wait(BEGIN_WITHIN)
    for number in range(items):
        compute(number)


def _two_bare(items: int) -> float:
    # A fork would copy the locks of whatever threads run here, held for ever.
    spawn = multiprocessing.get_context("spawn")
    begin = spawn.Barrier(3)
    shares = [items // 2, items - items // 2]
    processes = [spawn.Process(target=_compute_share, args=(begin, share)) for share in shares]
    for process in processes:
        process.start()
    begin.wait(BEGIN_WITHIN)
    began = time.perf_counter()
    for process in processes:
        process.join()
    return time.perf_counter() - began


def _pooled(items: int) -> float:
    from seawall.pipeline import Pipeline
    from seawall.resources import CpuPool

    async def main() -> float:
        with CpuPool("bench", workers=2) as pool:
            await asyncio.gather(*(pool.arun(compute, 0) for _ in range(4)))  # both have begun
            stored: list[int] = []
            pipeline = Pipeline("bench")
            (
                pipeline.read(range(items))
                .stage(compute, workers=pool)
                .sink(stored.append, name="store")
            )
            began = time.perf_counter()
            await pipeline.run()
            taken = time.perf_counter() - began
        assert len(stored) == items
        return taken

    return asyncio.run(main())


PROCESSES: dict[str, Callable[[int], float]] = {
    ALONE: _alone,
    BARE_TWO: _two_bare,
    POOLED: _pooled,
}


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """Return seconds an item by table, case and round; those in processes are wall time."""
    assert plan.clock in CLOCKS
    tables = {PIPELINES: CASES, IN_BATCHES: BATCHES, IN_PROCESSES: PROCESSES}
    times: dict[str, dict[str, list[float]]] = {
        table: {name: [] for name in cases} for table, cases in tables.items()
    }
    chance = Random(plan.seed)
    end_at = time.monotonic() + plan.seconds
    for number in range(1, plan.rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() > end_at:
            break
        progress(f"pipelines, round {number} of {plan.rounds}")
        for name, case in chance.sample([*CASES.items(), *BATCHES.items()], len(CASES | BATCHES)):
            table = PIPELINES if name in CASES else IN_BATCHES
            if name in APART:
                taken = _cost_apart(name, plan.items, plan.clock)
            else:
                taken = cost(name, case, plan.items, plan.clock)
            times[table][name].append(taken)
        for name, alone in chance.sample(list(PROCESSES.items()), len(PROCESSES)):
            times[IN_PROCESSES][name].append(alone(plan.computed) / plan.computed)
    return times
