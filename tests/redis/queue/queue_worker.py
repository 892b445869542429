"""A worker process for the tests that kill it: it does jobs, and notes what it does in a file.

Arguments: URL, prefix, name of the queue, lease, seconds that a job takes at most, seed, file. Each
line of the file is `what id fence age time`, written at once: it outlives the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from random import Random
from typing import Any

from seawall.clock import SYSTEM
from seawall.errors import JobLost
from seawall.jobs import Claim, Worker
from seawall.redis.queue import PriorityQueue
from seawall.redis.store import RedisStore


class Logged(PriorityQueue):
    """A queue that notes which acks were accepted, and which refused."""

    log: int

    def note(self, what: str, claim: Claim) -> None:
        line = f"{what} {claim.id} {claim.fence} {round(claim.age * 1e6)} {SYSTEM.now()}\n"
        os.write(self.log, line.encode())

    async def aack(self, claim: Claim, result: Any = None) -> None:
        try:
            await super().aack(claim, result)
        except JobLost:
            self.note("fenced", claim)
            raise
        self.note("acked", claim)


async def main(
    url: str, prefix: str, name: str, lease: str, most: str, seed: str, file: str
) -> None:
    rng = Random(int(seed))
    async with RedisStore(url, prefix=prefix, timeout=1.0) as store:
        queue = Logged(store, name, max_attempts=100)
        queue.log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        async def handler(claim: Claim) -> int:
            queue.note("begun", claim)
            await asyncio.sleep(rng.uniform(0.0, float(most)))  # noqa: TID251 - a real process
            return claim.fence

        worker = Worker(queue, handler, concurrency=20, lease=float(lease))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop, 5.0)
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
