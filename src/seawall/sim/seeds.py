"""The same world from many seeds, on all cores, with confidence intervals.

runs = run_seeds(outage, seeds=20, processes=4)
runs.estimate(lambda result: result.goodput())       # Estimate(mean, low, high)
runs.verdicts                                        # {"recovers": 19, "stays down": 1}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from math import inf, isfinite, sqrt
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Final, NamedTuple

from seawall import _checks as check
from seawall.sim.result import SimulationResult
from seawall.sim.world import Build, check_progress, name_of, simulate

T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for a 95 % interval, by degrees of freedom from 1 on; beyond, nearly 1.96."""

Progress = Callable[[int, int], None]
"""Receives how many runs are done, and how many there are."""


class Estimate(NamedTuple):
    """A mean over seeds, and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """Return the mean of `values` and its interval; an infinite value makes all infinite."""
        known = list(values)
        if not known:
            raise ValueError("an estimate needs at least one value")
        mean = sum(known) / len(known)
        if not isfinite(mean):
            return cls(mean, min(known), mean)
        freedom = len(known) - 1
        if not freedom:
            return cls(mean, mean, mean)
        t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.4 / freedom
        width = t * sqrt(sum((one - mean) ** 2 for one in known) / freedom / len(known))
        return cls(mean, mean - width, mean + width)

    def __str__(self) -> str:
        if not isfinite(self.mean):
            return "never"
        if self.low == self.high:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.high - self.mean:.2g}"


class Runs:
    """The results of one world, one for each seed, in the order of the seeds."""

    def __init__(self, name: str, results: Sequence[SimulationResult]) -> None:
        self.name = name
        self.results = tuple(results)

    def __repr__(self) -> str:
        return f"<Runs {self.name!r}: {len(self.results)} seeds, {self.verdicts}>"

    def estimate(self, of: Callable[[SimulationResult], float]) -> Estimate:
        """Return the mean of `of(result)` over all seeds, with its 95 % interval."""
        check.plain_function("of", of)
        return Estimate.of(of(result) for result in self.results)

    @property
    def verdicts(self) -> dict[str, int]:
        """How many seeds ended how, the most frequent first."""
        counted = Counter(result.verdict.kind for result in self.results)
        return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))

    @property
    def verdict(self) -> str:
        """The most frequent end in words, with the recovery over all seeds that ended like that."""
        kind = next(iter(self.verdicts))
        alike = [result.verdict for result in self.results if result.verdict.kind == kind]
        if len(self.results) == 1:
            return alike[0].text
        seeds = f"{len(alike)} of {len(self.results)} seeds"
        recovery = Estimate.of(verdict.recovery for verdict in alike)
        if kind in ("recovers", "collapses", "holds") and recovery.mean < inf:
            return f"{kind} in {seeds}, after {recovery} s"
        return f"{kind} in {seeds}"


def run_seeds(
    build: Build,
    *,
    seeds: int | Sequence[int] = 10,
    seconds: float | None = None,
    name: str | None = None,
    step: float = 1.0,
    processes: int = 1,
    progress: Progress | None = None,
) -> Runs:
    """Run the world of `build` from each seed: 1 to `seeds`, or those listed.

    With several `processes`, `build` is pickled: a function at the top of a module, or an object
    with `__call__`. The program then needs the usual `if __name__ == "__main__":`.
    """
    check.plain_function("build", build)
    check_progress(progress)
    chosen = range(1, check.count("seeds", seeds) + 1) if isinstance(seeds, int) else list(seeds)
    processes = min(check.count("processes", processes), len(chosen))
    name = name or name_of(build)
    run = partial(simulate, build, seconds=seconds, name=name, step=step)
    done: dict[int, SimulationResult] = {}
    report = progress or (lambda _done, _all: None)
    if processes == 1:
        for seed in chosen:
            done[seed] = run(seed=seed)
            report(len(done), len(chosen))
        return Runs(name, [done[seed] for seed in chosen])
    _check_picklable(build)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, seed=seed): seed for seed in chosen}
        for future in as_completed(running):
            done[running[future]] = future.result()
            report(len(done), len(chosen))
    return Runs(name, [done[seed] for seed in chosen])


def _check_picklable(build: Build) -> None:
    try:
        ForkingPickler.dumps(build)
    except Exception as error:
        raise TypeError(
            f"{build!r} cannot be sent to other processes ({error}): write a function at the top"
            " of a module, or processes=1"
        ) from error
