"""Rehearse one guard's settings against what was measured of its dependency.

    found = rehearse(
        lambda: Guard.standard("vendor", on=ConnectionError, timeout=0.5),
        latency=Latency.measured(samples),      # or a Tally of a live histogram, or a list
        rate=120.0,                             # calls a second
        seeds=10,
    )
    found["down"].load.mean                     # calls a second on the dependency while it is down
    found["slow"].goodput.low                   # lower end of the 95 % interval

The conditions are `normal`, `slow` (10 times), `down` (refuses all calls), `hangs` (answers none)
and `double` (twice the calls). Each run has three equal parts: calm, the condition, calm again. The
same seed gives two guards the same clients and, as far as their calls are the same, the same
latencies; so compare them by seed, with `compare(before["down"], after["down"]).goodput`. Settings
may also be TOML text with one guard, as `guards_from_toml` reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from seawall import _checks as check
from seawall.config import guards_from_toml
from seawall.guard import Guard
from seawall.models.histogram import Tally
from seawall.sim.clients import ClientCall
from seawall.sim.latency import Latency, LatencyLike
from seawall.sim.result import SimulationResult
from seawall.sim.seeds import Estimate, run_seeds
from seawall.sim.world import World

MakeGuard = Callable[[], Guard] | str

CONDITIONS: Final = ("normal", "slow", "down", "hangs", "double")
"""States of a dependency, or of the traffic, that a service is rehearsed in."""
SLOWER: Final = 10.0
"""How many times slower a slow dependency is."""


class RunOutcome(NamedTuple):
    """What one seed gave under one condition."""

    goodput: float  # real answers a second, over the whole run
    during: float  # share of the calls that came during the condition and got a real answer
    tail: float  # 99 % quantile of the real answers of the whole run, in seconds
    load: float  # calls a second on the dependency during the condition
    recovery: float  # seconds after it until 95 % of the usual share is served; infinite if never


class Rehearsal(NamedTuple):
    """What all seeds gave under one condition: means with 95 % intervals, and each seed's own."""

    goodput: Estimate
    during: Estimate
    tail: Estimate
    load: Estimate
    recovery: Estimate
    outcomes: tuple[RunOutcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[RunOutcome]) -> Rehearsal:
        """Summarise `outcomes`."""
        goodput, during, tail, load, recovery = map(Estimate.of, zip(*outcomes, strict=True))
        return cls(goodput, during, tail, load, recovery, tuple(outcomes))


def _fill(
    world: World,
    *,
    guard: MakeGuard,
    latency: Latency,
    rate: float,
    condition: str,
    failing: float,
    capacity: float | None,
    patience: float | None,
    seconds: float,
) -> None:
    """Fill `world` with one dependency under one condition, and one guard before it."""
    check.choice("condition", condition, CONDITIONS)
    world.seconds = check.seconds("seconds", seconds)
    service = world.service("dependency", latency=latency, capacity=capacity, failing=failing)
    call = _in_time(_made(guard)(service.acall), patience)
    clients = world.clients("callers", call, rate=rate)
    changes = {
        "slow": service.slow(SLOWER),
        "down": service.down(),
        "hangs": service.down(hangs=True),
        "double": clients.surge(2.0),
    }
    if condition in changes:
        world.at(seconds / 3, changes[condition], lasts=seconds / 3)


def rehearse(
    guard: MakeGuard,
    *,
    latency: LatencyLike | Sequence[float] | Tally,
    rate: float,
    failing: float = 0.0,
    capacity: float | None = None,
    patience: float | None = None,
    conditions: Sequence[str] = CONDITIONS,
    seconds: float = 60.0,
    seeds: int | Sequence[int] = 10,
    processes: int = 1,
) -> dict[str, Rehearsal]:
    """Run the guard that `guard` makes (a function, or TOML) under each of `conditions`.

    The dependency takes `latency`, fails a share `failing` of its calls also when it is well, and
    serves at most `capacity` calls a second (None: any number, without a queue). Calls come at
    `rate` a second, and an answer that takes longer than `patience` seconds is none: its caller has
    gone, though nobody tells the guard. See the module for what is returned.
    """
    if not isinstance(guard, str):
        check.plain_function("guard", guard)
    taken = (
        Latency.measured(latency) if isinstance(latency, (Sequence, Tally)) else Latency.of(latency)
    )
    found = {}
    for condition in conditions:
        build = partial(
            _fill,
            guard=guard,
            latency=taken,
            rate=rate,
            condition=condition,
            failing=failing,
            capacity=capacity,
            patience=patience,
            seconds=seconds,
        )
        runs = run_seeds(build, seeds=seeds, name=condition, processes=processes)
        found[condition] = Rehearsal.of([_outcome(result) for result in runs.results])
    return found


class CallerGone(Exception):
    """An answer came after its caller had left."""


def _in_time(call: ClientCall, patience: float | None) -> ClientCall:
    """Return `call`, which fails if it takes longer than `patience` seconds; it is not stopped."""
    if patience is None:
        return call
    longest = check.seconds("patience", patience)

    async def called() -> None:
        clock = asyncio.get_running_loop()
        came = clock.time()
        await call()
        if clock.time() - came > longest:
            raise CallerGone

    return called


def compare(before: Rehearsal, after: Rehearsal) -> Rehearsal:
    """Return the differences, `after` minus `before`, of the same seeds and condition."""
    pairs = zip(before.outcomes, after.outcomes, strict=True)
    return Rehearsal.of(
        [
            RunOutcome(*(0.0 if a == b else b - a for a, b in zip(old, new, strict=True)))
            for old, new in pairs
        ]
    )


def _outcome(result: SimulationResult) -> RunOutcome:
    begin, end = result.seconds / 3, 2 * result.seconds / 3
    return RunOutcome(
        goodput=result.goodput(),
        during=result.share(begin, end),
        tail=result.quantile(0.99),
        load=result.load("dependency", begin, end),
        recovery=result.recovery(),
    )


def _made(guard: MakeGuard) -> Guard:
    if not isinstance(guard, str):
        return guard()
    (made,) = guards_from_toml(guard).values()
    return made
