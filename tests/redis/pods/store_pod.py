"""A pod, as a process of its own, that calls its store all the time: from threads and tasks.

`argv[1]` is JSON: `redis` (a URL), `prefix` and `timeout`. It prints a line of JSON when it is
ready, when its store goes down or comes back, and every 0.1 s: when each of its callers had its
last answer. When its standard input ends, it closes the store and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading

from seawall import RateLimit, RedisStore
from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from tests.redis.pods.pod import die_with_parent, report

PAUSE = 0.1
BEAT = 0.1


class StorePod:
    """The store and those who call it."""

    def __init__(self, redis: str, prefix: str, timeout: float) -> None:
        self._store = RedisStore(redis, prefix=prefix, timeout=timeout)
        self._limit = RateLimit("1M/s", shared=self._store, name="any")
        self._key = self._store._core.key("campaign", self._store._core.pod)
        self._over = threading.Event()
        self._answered = {"thread": 0.0, "task": 0.0, "job": 0.0}

    def run(self) -> None:
        self._store._core.watch(lambda up, cause: report(up=up, cause=cause))
        self._store._core.every(PAUSE, self._job)
        workers = [
            threading.Thread(target=work)
            for work in (self._thread, lambda: asyncio.run(self._tasks()), self._beat)
        ]
        report(ready=True)
        for worker in workers:
            worker.start()
        sys.stdin.read()
        self._over.set()
        for worker in workers:
            worker.join()
        self._store.close()

    def _thread(self) -> None:
        while not self._over.wait(PAUSE):
            try:
                self._store._core.call("probe", [self._key], [])
            except StoreUnavailable:
                continue
            self._answered["thread"] = SYSTEM.now()

    async def _tasks(self) -> None:
        await asyncio.gather(*(self._task() for _ in range(2)))

    async def _task(self) -> None:
        while not self._over.is_set():
            await asyncio.sleep(PAUSE)  # noqa: TID251 - the load itself
            try:
                await self._limit.apeek()
                await self._store._core.acall("probe", [self._key], [])
            except StoreUnavailable:
                continue
            self._answered["task"] = SYSTEM.now()

    async def _job(self) -> None:
        await self._store._core.acall("probe", [self._key], [])
        self._answered["job"] = SYSTEM.now()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            report(beat=min(self._answered.values()), store_up=self._store.up)


if __name__ == "__main__":
    die_with_parent()
    StorePod(**json.loads(sys.argv[1])).run()
