"""How long calls wait in a queue with controlled delay, at several times the capacity.

    python -m bench.queue_delay

prints a table. A server that can do 200 calls a second, of one class and of random length, is asked
for half as many for some seconds, then for 2, 3 and 10 times as many. All of it runs in virtual
time.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from seawall import Bulkhead, Guard, Rejected
from seawall.shedding import codel
from seawall.testing import run_virtual

if TYPE_CHECKING:
    from seawall.models.shedding.codel import QueueShed

CAPACITY = 200
CALLS = (0.01, 0.1)
TIMES = (2, 3, 10)
CALM = 3.0
SECONDS = 15.0
SEED = 1


class Waits(NamedTuple):
    """Seconds that calls waited during the overload, and how many a second were done."""

    served: list[float]
    refused: list[float]
    done: float

    def quantile(self, p: float) -> float:
        """Return what a share `p` of the served waited at most."""
        return sorted(self.served)[int(p * len(self.served))]


def overload(shed: QueueShed | None, seconds: float, times: float, seed: int = SEED) -> Waits:
    """Run calls of `seconds` in the mean, at `times` the capacity, through one bulkhead."""
    rng = Random(seed)
    served: list[float] = []
    refused: list[float] = []
    ends: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        slots = Bulkhead(round(CAPACITY * seconds), max_wait=60.0, max_waiting=100_000, shed=shed)
        guard = Guard("queue delay", slots)

        async def call(came: float) -> None:
            async def work() -> None:
                if came > CALM:
                    served.append(loop.time() - came)
                await asyncio.sleep(rng.expovariate(1 / seconds))
                ends.append(loop.time())

            try:
                await guard.acall(work)
            except Rejected:
                refused.append(loop.time() - came)

        open_calls = set()
        while loop.time() < CALM + SECONDS:
            rate = CAPACITY * (times if loop.time() > CALM else 0.5)
            await asyncio.sleep(rng.expovariate(rate))
            task = asyncio.create_task(call(loop.time()))
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)
        left = list(open_calls)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        guard.close()

    run_virtual(main())
    done = sum(CALM < end <= CALM + SECONDS for end in ends) / SECONDS
    return Waits(served, refused, done)


def main() -> None:
    """Print the table."""
    print("| calls | wait of the served, p50 | p99 | goodput | wait of the refused, at most |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for seconds in CALLS:
        for times in TIMES:
            waits = overload(codel(0.1, interval=1.0), seconds, times)
            print(
                f"| {seconds * 1000:.0f} ms, {times} times capacity"
                f" | {waits.quantile(0.5) * 1000:.0f} ms | {waits.quantile(0.99) * 1000:.0f} ms"
                f" | {waits.done / CAPACITY:.2f} | {max(waits.refused) * 1000:.0f} ms |"
            )


if __name__ == "__main__":
    main()
