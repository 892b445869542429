"""Ten services with wrong settings, tuned by `seawall tune`: in the simulator, and for real.

Each service calls a vendor with three workers, sixty times a second. Its settings are wrong in one
way. What it measures in a calm minute is all that tuning sees.

    python examples/tuned/ten_services.py           # simulated: half a minute
    python examples/tuned/ten_services.py --real    # and then on real time: three minutes more

The real run takes the condition in which the simulation promises most, and the vendor that is down:
today's settings and the tuned ones side by side, each with a vendor of its own.
"""

# ruff: noqa: S101, S311, T201 - it needs no secrets, and prints its table

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

from seawall import registry
from seawall.config import guard_from_table
from seawall.resources import Pool
from seawall.sim import CONDITIONS, Estimate, Latency, World
from seawall.sim.services import pause
from seawall.tune import (
    Effect,
    Measurement,
    Proof,
    measurements_of,
    propose,
    prove,
    tuning_snapshot,
)

RATE = 60.0
WORKERS = 3
LATENCY = Latency.lognormal(median=0.02, p99=0.2)
CAPACITY = WORKERS / (LATENCY.mean or 1)
"""Calls a second: 1.5 times what comes."""
PATIENCE = 1.5
"""Seconds after which callers have gone."""

Policies = list[dict[str, Any]]
Call = Callable[[], Awaitable[Any]]

RETRY = {"policy": "retry", "on": ["ConnectionError", "TimeoutError"], "budget": True}
BREAKER = {"policy": "breaker", "window": 4.0, "break_for": 1.0}
BULKHEAD = {"policy": "bulkhead", "limit": 16}
TIMEOUT = {"policy": "timeout", "seconds": 0.7}
MANY = {"kind": "request_ratio", "ratio": 0.9}


class WrongService(NamedTuple):
    """A service whose settings are wrong in one way."""

    name: str
    policies: Policies
    failing: float = 0.0
    """Share of the calls that the vendor fails as usual."""
    pool: int | None = None
    """Size of the pool through which it calls, if it has one."""


SERVICES = (
    WrongService("timeout far too long", [RETRY, BREAKER, BULKHEAD, {**TIMEOUT, "seconds": 30.0}]),
    WrongService("timeout too short", [RETRY, BREAKER, BULKHEAD, {**TIMEOUT, "seconds": 0.06}]),
    WrongService(
        "too many attempts",
        [{**RETRY, "attempts": 8, "backoff": 0.02, "budget": MANY}, BULKHEAD, TIMEOUT],
        failing=0.02,
    ),
    WrongService("no retry budget", [{**RETRY, "budget": False}, BULKHEAD, TIMEOUT], failing=0.02),
    WrongService(
        "breaker window too small",
        [{**BREAKER, "window": 0.05, "min_calls": 2}, BULKHEAD, TIMEOUT],
        failing=0.05,
    ),
    WrongService(
        "bulkhead too large",
        [RETRY, {**BREAKER, "window": 10.0}, {**BULKHEAD, "limit": 500}, TIMEOUT],
    ),
    WrongService("bulkhead too small", [RETRY, BREAKER, {**BULKHEAD, "limit": 2}, TIMEOUT]),
    WrongService(
        "hedge too early",
        [
            RETRY,
            {"policy": "hedge", "delay": 0.015, "cap": 0.4, "burst": 100},
            BREAKER,
            {**BULKHEAD, "limit": 64},
            TIMEOUT,
        ],
    ),
    WrongService(
        "rate limit too low",
        [RETRY, BREAKER, {"policy": "rate_limit", "limits": ["40/s"]}, BULKHEAD, TIMEOUT],
    ),
    WrongService("pool too small", [BREAKER, TIMEOUT], pool=2),
)


def caller(service: WrongService, name: str, settings: Any, vendor: Call) -> Call:
    """Return what the clients of a service call: the vendor, behind its guard or its pool."""
    if service.pool is None:
        guarded: Call = guard_from_table(name, settings)(vendor)
        return guarded
    pool: Pool[object] = Pool(
        object, name=name, max_size=settings["max_size"], checkout_timeout=0.05
    )

    async def call() -> Any:
        async with pool.borrow():
            return await vendor()

    return call


def today(service: WrongService) -> Any:
    """Return the settings of a service, as they are."""
    return {"policies": service.policies} if service.pool is None else {"max_size": service.pool}


# Simulated


def measure(service: WrongService, seconds: float = 60.0) -> Measurement:
    """Run a service through a calm minute, and return what it measures."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=LATENCY, workers=WORKERS, failing=service.failing)
        call = caller(service, service.name, today(service), vendor.acall)
        world.clients("users", call, rate=RATE)
        world.run(seconds=seconds)
        (found,) = (one for one in measurements_of(tuning_snapshot()) if one.name == service.name)
        return found


def tune(service: WrongService, *, seeds: int = 3, seconds: float = 18.0) -> Proof:
    """Return the proof of what is proposed for a service."""
    found = measure(service)
    return prove(
        found,
        propose(found).proposals,
        capacity=CAPACITY,
        patience=PATIENCE,
        seeds=seeds,
        seconds=seconds,
    )


def tuned(service: WrongService, proof: Proof) -> Any:
    """Return the settings that are left of a proof."""
    if service.pool is None:
        return proof.table
    return today(service) | {name: value for one in proof.kept for name, value in one.after.items()}


class Promise(NamedTuple):
    """Where the simulation promises most: under which condition, and of which figure."""

    condition: str
    figure: str
    before: float
    after: float
    change: Estimate

    @property
    def words(self) -> str:
        """The change in a few words."""
        unit = " s" if self.figure == "tail" else "/s"
        return f"{self.figure} {self.before:.3g} -> {self.after:.3g}{unit}"


def promise(effects: dict[str, Effect]) -> Promise | None:
    """Return the largest gain in goodput, or in the tail if there is none in goodput."""
    found = []
    for figure, sign in (("goodput", 1), ("tail", -1)):
        for condition in CONDITIONS:
            effect = effects[condition]
            assert effect.before is not None
            assert effect.difference is not None
            before, after = getattr(effect.before, figure), getattr(effect.after, figure)
            change: Estimate = getattr(effect.difference, figure)
            if sign * change.mean > 0 and not change.low <= 0 <= change.high:
                share = abs(change.mean) / before.mean
                found.append((share, Promise(condition, figure, before.mean, after.mean, change)))
        if found:
            return max(found)[1]
    return None


# For real


class Vendor:
    """A vendor in this process, on real time. It does not notice when a caller has gone."""

    def __init__(self, seed: int, failing: float) -> None:
        self.slower = 1.0
        self.is_down = False
        self.hangs = False
        self.calls = 0
        self._failing = failing
        self._rng = Random(seed)
        self._workers = asyncio.Semaphore(WORKERS)
        self._work: set[asyncio.Task[None]] = set()

    async def call(self) -> str:
        """Call the vendor."""
        self.calls += 1
        if self.is_down:
            raise ConnectionError("the vendor is down")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        if not self.hangs:
            work = loop.create_task(self._serve(answer))
            self._work.add(work)
            work.add_done_callback(self._work.discard)
        return await answer

    async def _serve(self, answer: asyncio.Future[str]) -> None:
        async with self._workers:
            await pause(LATENCY.draw(self._rng, 1) * self.slower)
        fails = self._rng.random() < self._failing
        if answer.done():
            return
        if fails:
            answer.set_exception(ConnectionError("the vendor failed"))
        else:
            answer.set_result("here")

    def disturb(self, condition: str, *, on: bool) -> None:
        """Begin or end a condition."""
        self.slower = 10.0 if on and condition == "slow" else 1.0
        self.is_down = on and condition == "down"
        self.hangs = on and condition == "hangs"


class Figures(NamedTuple):
    """What came of one run."""

    goodput: float
    """Answers in time, a second."""
    tail: float
    """p99 of these."""
    load: float
    """Calls a second that reached the vendor during the condition."""


async def run(call: Call, vendor: Vendor, condition: str, part: float, seed: int) -> Figures:
    """Let clients come for three parts: calm, the condition, calm."""
    loop = asyncio.get_running_loop()
    rng = Random(seed)
    took: list[float] = []

    async def visit() -> None:
        came = loop.time()
        try:
            await call()
        except Exception:  # noqa: BLE001 - every error is no answer
            return
        took.append(loop.time() - came)

    visits = set()
    began = loop.time()
    next_at, load, is_on = began, 0, False
    while (now := loop.time()) < began + 3 * part:
        wants = began + part <= now < began + 2 * part
        if wants != is_on:
            vendor.disturb(condition, on=wants)
            load = vendor.calls - load
            is_on = wants
        while next_at <= now:
            visits.add(asyncio.ensure_future(visit()))
            next_at += rng.expovariate(RATE * (2 if is_on and condition == "double" else 1))
        await pause(max(0.001, next_at - loop.time()))
    await pause(PATIENCE)
    for left in visits:
        left.cancel()
    await asyncio.gather(*visits, return_exceptions=True)
    good = sorted(one for one in took if one <= PATIENCE)
    tail = good[int(0.99 * len(good))] if good else 0.0
    return Figures(len(good) / (3 * part), tail, load / part)


async def compare_for_real(
    service: WrongService, settings: Any, condition: str, part: float = 5.0
) -> dict[str, tuple[Figures, Figures]]:
    """Return today's and the tuned figures, under `condition` and while the vendor is down."""
    conditions = [condition] if condition == "down" else [condition, "down"]
    runs = []
    with registry.emptied():
        for number, (under, variant) in enumerate(
            (under, variant) for under in conditions for variant in (today(service), settings)
        ):
            vendor = Vendor(number // 2, service.failing)
            call = caller(service, f"{service.name} {number}", variant, vendor.call)
            runs.append(run(call, vendor, under, part, seed=7))
        found = await asyncio.gather(*runs)
    return {under: (found[2 * at], found[2 * at + 1]) for at, under in enumerate(conditions)}


def _means(rehearsal: Any) -> Figures:
    return Figures(rehearsal.goodput.mean, rehearsal.tail.mean, rehearsal.load.mean)


def _pair(pair: Any, figure: str) -> str:
    before, after = (getattr(one, figure) for one in pair)
    return f"{figure} {before:.3g} -> {after:.3g}/s"


def main(arguments: list[str]) -> None:
    """Print the table."""
    logging.disable(logging.WARNING)  # breakers open and close
    for service in SERVICES:
        proof = tune(service)
        kept = "; ".join(f"{one.policy} {one.words}" for one in proof.kept) or "nothing"
        print(f"{service.name}\n  tuned:      {kept}")
        best = promise(proof.effects)
        if best is None:
            print("  simulated:  no gain")
            continue
        print(f"  simulated:  {best.condition}: {best.words} ({best.change})")
        down = [_means(one) for one in proof.effects["down"][:2]]
        print(f"              down: {_pair(down, 'goodput')}, {_pair(down, 'load')}")
        if "--real" in arguments:
            settings = tuned(service, proof)
            real = asyncio.run(compare_for_real(service, settings, best.condition))
            before, after = (getattr(one, best.figure) for one in real[best.condition])
            same = "same sign" if (after - before) * (best.after - best.before) > 0 else "NOT so"
            outage = real["down"]
            print(
                f"  for real:   {best.condition}: {best.figure} {before:.3g} -> {after:.3g}: {same}"
            )
            print(f"              down: {_pair(outage, 'goodput')}, {_pair(outage, 'load')}")


if __name__ == "__main__":
    main(sys.argv[1:])
