"""Simulated clients: those who come whatever happens, and users who wait for their answer.

world.clients("visitors", call, rate=50)                     # open loop, Poisson
world.clients("cron", call, rate=10, even=True)              # at even distances
world.clients("campaign", call, rate=ramp((0, 40), (30, 80), (60, 40)))
world.users("clerks", call, count=20, think=1.0)             # closed loop
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from itertools import accumulate
from random import Random
from typing import Any, TypeAlias

from seawall import _checks as check
from seawall.errors import Rejected
from seawall.runtime.degradation import degradations
from seawall.sim.latency import Latency, LatencyLike
from seawall.sim.records import Change, ClientRecord, Steps
from seawall.sim.services import pause

ClientCall: TypeAlias = Callable[..., Awaitable[Any]]
Keys: TypeAlias = Callable[[Random], Any]
Rate: TypeAlias = float | Callable[[float], float]

IDLE = 0.1  # seconds between two looks at a rate that is zero


def ramp(*points: tuple[float, float]) -> Callable[[float], float]:
    """Return a rate that goes in straight lines through `points` of (second, calls a second)."""
    if not points or list(points) != sorted(points):
        raise ValueError(f"ramp{points!r}: give points in order of time, such as (0, 40), (30, 80)")
    times = [float(at) for at, _ in points]
    rates = [check.at_least("rate", rate, 0.0) for _, rate in points]

    def rate(now: float) -> float:
        after = bisect_right(times, now)
        if after in (0, len(times)):
            return rates[min(after, len(times) - 1)]
        share = (now - times[after - 1]) / (times[after] - times[after - 1])
        return rates[after - 1] + share * (rates[after] - rates[after - 1])

    return rate


def zipf(count: int, exponent: float = 1.0) -> Keys:
    """Return keys from 0 to `count - 1`, of which the first are the most frequent."""
    check.count("count", count)
    cumulative = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(rng: Random) -> int:
        return bisect_right(cumulative, rng.random() * cumulative[-1])

    return draw


class ClientGroup:
    """What open and closed clients have in common: one call, its patience and its record."""

    def __init__(
        self, name: str, call: ClientCall, rng: Random, *, patience: float | None, keys: Keys | None
    ) -> None:
        self.name = name
        self._call = check.function("call", call)
        self._rng = rng
        self._patience = None if patience is None else check.seconds("patience", patience)
        self._keys = None if keys is None else check.plain_function("keys", keys)
        self._collects = False
        self._over = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._steps = Steps(1.0, 0)
        self.record = ClientRecord(name, self._steps)

    def begin(self, steps: Steps, *, collects: bool) -> None:
        """Start to come; `collects` asks whether answers are degraded, which takes time."""
        self._steps = steps
        self._collects = collects
        self.record = ClientRecord(self.name, steps)
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Come no more; calls in progress continue."""
        self._over = True

    async def leave(self) -> None:
        """Cancel the calls in progress, which count as failed."""
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _start(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(self) -> bool:
        """Make one call; return whether it got a real answer."""
        record, step = self.record, self._steps.now
        record.came[step] += 1
        loop = asyncio.get_running_loop()
        came = loop.time()
        outcome = "ok"
        giving_up = None
        if self._patience is not None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - for the type checker
            giving_up = loop.call_later(self._patience, task.cancel)
        try:
            outcome = await self._answer()
        except Rejected as error:
            record.fail(error)
            outcome = "refused"
        except asyncio.CancelledError:
            if self._patience is None or loop.time() < came + self._patience:
                record.end(step, "failed", 0.0)
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            outcome = "gave_up"
        except Exception as error:  # noqa: BLE001 - every error is an outcome
            record.fail(error)
            outcome = "failed"
        if giving_up is not None:
            giving_up.cancel()
        record.end(step, outcome, loop.time() - came)
        return outcome == "ok"

    async def _answer(self) -> str:
        arguments = () if self._keys is None else (self._keys(self._rng),)
        if not self._collects:
            await self._call(*arguments)
            return "ok"
        with degradations() as seen:
            await self._call(*arguments)
        return "degraded" if seen else "ok"


class OpenClients(ClientGroup):
    """Clients who come at a rate, whatever becomes of the others; made by `World.clients`."""

    def __init__(
        self,
        name: str,
        call: ClientCall,
        rng: Random,
        *,
        rate: Rate,
        even: bool,
        patience: float | None,
        keys: Keys | None,
        comes_back: float,
        returns: int,
        return_after: LatencyLike,
    ) -> None:
        super().__init__(name, call, rng, patience=patience, keys=keys)
        self._rate: Callable[[float], float]
        if callable(rate):
            self._rate = check.plain_function("rate", rate)
        else:
            steady = check.at_least("rate", rate, 0.0)
            self._rate = lambda _now: steady
        self._even = check.flag("even", even)
        self._comes_back = check.ratio("comes_back", comes_back, zero=True)
        self._returns = check.count("returns", returns, minimum=0)
        self._return_after = Latency.of(return_after)
        self._factor = 1.0

    def surge(self, factor: float = 10.0) -> Change:
        """Come `factor` times as often."""
        check.at_least("factor", factor, 0.0)

        def begin() -> None:
            self._factor *= factor

        def end() -> None:
            self._factor /= factor

        return Change(f"{self.name} come {factor:g} times as often", begin, end, is_load=True)

    def burst(self, count: int) -> Change:
        """Let `count` more come at one instant."""
        check.count("count", count)

        def begin() -> None:
            for _ in range(count):
                self._start(self._visit())

        return Change(f"{count} {self.name} come at once", begin, is_load=True)

    def _begin(self) -> None:
        asyncio.get_running_loop().call_later(self._gap(0.0), self._come)

    def _come(self) -> None:
        if self._over:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._rate(now) * self._factor > 0:
            self._start(self._visit())
        loop.call_later(self._gap(now), self._come)

    def _gap(self, now: float) -> float:
        rate = self._rate(now) * self._factor
        if rate <= 0:
            return IDLE
        return 1 / rate if self._even else self._rng.expovariate(rate)

    async def _visit(self) -> None:
        served = await self._one()
        for _ in range(self._returns):
            if served or self._over or self._rng.random() >= self._comes_back:
                return
            await pause(self._return_after.draw(self._rng, 1))
            served = await self._one()


class ClosedUsers(ClientGroup):
    """Users who think, call, wait for the answer and begin again; made by `World.users`."""

    def __init__(
        self,
        name: str,
        call: ClientCall,
        rng: Random,
        *,
        count: int,
        think: LatencyLike,
        patience: float | None,
        keys: Keys | None,
    ) -> None:
        super().__init__(name, call, rng, patience=patience, keys=keys)
        self._count = check.count("count", count)
        self._think = Latency.of(think)

    def _begin(self) -> None:
        for _ in range(self._count):
            self._start(self._live())

    async def _live(self) -> None:
        while True:
            await pause(self._think.draw(self._rng, 1))
            if self._over:
                return
            await self._one()
