"""A pod, as a process of its own: guards around calls to the vendor, and a steady load of them.

`argv[1]` is JSON: `pod` (its name), `vendor` (a port), `redis` (a URL), `prefix`, `accounts` (names
in `accounts.py`), `style` ("sync": threads only, "async": an event loop only, "both") and `pause`,
the mean seconds between two calls of one worker. Two workers call for each account.

It prints a line of JSON for whatever happens: it is ready, a breaker or the mode of a policy has
changed, the stated excess of a limit has. When its standard input ends, it closes all and ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from random import Random
from typing import Any, Final

from seawall import Guard, RedisStore, Rejected, subscribe
from seawall.clock import SYSTEM
from seawall.events import BreakerChanged, StoreModeChanged
from tests.redis.pods.accounts import POLICIES

WORKERS: Final = {"sync": (2, 0), "async": (0, 2), "both": (1, 1)}
"""How many threads and how many tasks call for each account."""

TIMEOUT: Final = 1.0
"""Seconds for an answer of the store: these tests are not about a slow one."""


class Failed(Exception):
    """The vendor said no."""


def die_with_parent() -> None:
    """Be killed when the parent is gone, also while stopped, when no end of input is noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def report(**what: Any) -> None:
    """Print one line, whole, from any thread."""
    os.write(1, json.dumps({"at": SYSTEM.now(), **what}).encode() + b"\n")


class Pod:
    """The guards, and those who call."""

    def __init__(
        self,
        *,
        pod: str,
        vendor: int,
        redis: str,
        prefix: str,
        accounts: list[str],
        style: str,
        pause: float,
    ) -> None:
        self.name = pod
        self._address = "127.0.0.1", vendor
        self._style = style
        self._pause = pause
        self._stopping = threading.Event()
        self._store = RedisStore(redis, prefix=prefix, timeout=TIMEOUT)
        self._guards = [Guard(account, POLICIES[account](self._store)) for account in accounts]

    def run(self) -> None:
        """Call, until told to stop."""
        subscribe(
            lambda event: report(account=event.guard, before=event.before, after=event.after),
            BreakerChanged,
        )
        subscribe(
            lambda event: report(account=event.guard, mode=event.after, cause=event.cause),
            StoreModeChanged,
        )
        threading.Thread(target=self._watch_limits, daemon=True).start()
        threading.Thread(target=self._watch_stdin, daemon=True).start()
        threads, _ = WORKERS[self._style]
        workers = [
            threading.Thread(target=self._call_in_thread, args=(guard, number))
            for guard in self._guards
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        report(ready=True)
        if self._style == "sync":
            self._stopping.wait()
        else:
            asyncio.run(self._call_in_tasks())
        for worker in workers:
            worker.join()
        for guard in self._guards:
            guard.close()
        self._store.close()

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        self._stopping.set()

    def _watch_limits(self) -> None:
        told: dict[str, Any] = {}
        while not self._stopping.wait(0.05):
            for guard in self._guards:
                shared = guard.snapshot()["policies"][0].get("shared", {})
                excess = sum(shared.get("excess", ()))
                if told.get(guard.name, 0) != excess:
                    told[guard.name] = excess
                    report(account=guard.name, excess=excess)

    def _line(self, guard: Guard, asked: float) -> bytes:
        return f"ask {guard.name} {self.name} {asked:.6f}\n".encode()

    def _call_in_thread(self, guard: Guard, number: int) -> None:
        rng = Random(f"{self.name} {guard.name} {number}")
        with socket.create_connection(self._address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = connection.makefile("rb")

            def call(asked: float) -> None:
                connection.sendall(self._line(guard, asked))
                if answers.readline() != b"yes\n":
                    raise Failed

            while not self._stopping.wait(self._pause * rng.uniform(0.5, 1.5)):
                try:
                    guard.call(call, SYSTEM.now())
                except (Failed, Rejected):
                    pass
            answers.close()

    async def _call_in_tasks(self) -> None:
        _, tasks = WORKERS[self._style]
        async with asyncio.TaskGroup() as group:
            for guard in self._guards:
                for number in range(tasks):
                    group.create_task(self._call_in_task(guard, number))

    async def _call_in_task(self, guard: Guard, number: int) -> None:
        rng = Random(f"{self.name} {guard.name} {number} async")
        reader, writer = await asyncio.open_connection(*self._address)

        async def call(asked: float) -> None:
            writer.write(self._line(guard, asked))
            if await reader.readline() != b"yes\n":
                raise Failed

        try:
            while not self._stopping.is_set():
                try:
                    await guard.acall(call, SYSTEM.now())
                except (Failed, Rejected):
                    pass
                pause = self._pause * rng.uniform(0.5, 1.5)
                await asyncio.sleep(pause)  # noqa: TID251 - a process in real time
        finally:
            writer.close()
            await writer.wait_closed()


if __name__ == "__main__":
    die_with_parent()
    Pod(**json.loads(sys.argv[1])).run()
