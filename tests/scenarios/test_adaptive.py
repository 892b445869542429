"""Adaptive limits in front of a simulated server whose capacity changes.

The server has `workers`, each busy with one call for a mean of one second (times vary as they do in
life: lognormal, or exponential), and a queue in front of them that it does not bound. So as many
calls at once as it has workers are the optimum: fewer leave workers idle, more only stand in the
queue. A window is what the policy takes for one. What counts as settled is the median of the limit,
60 to 100 windows later. Goodput is what is served in a time, as a share of what could be.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import pytest

from seawall import AdaptiveLimit, Criticality
from seawall.limits import aimd, gradient2, vegas
from seawall.models.concurrency.limit import ConcurrencyLimit, Learner
from seawall.models.concurrency.samples import Windows
from seawall.testing import run_virtual
from tests.scenarios import server as scenario
from tests.support import QUICK, let_pass, new_guard

WIDE = {"minimum": 1, "maximum": 1000}
LIMITS: dict[str, Callable[[], ConcurrencyLimit]] = {
    "aimd": lambda: aimd(slow_after=1.2, **WIDE),
    "vegas": lambda: vegas(**WIDE),
    "gradient2": lambda: gradient2(**WIDE),
}
TIMES: dict[str, Callable[[Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(-0.125, 0.5),
    "exponential": lambda rng: rng.expovariate(1.0),
}


class Server:
    """So many workers, and a queue that nobody bounds."""

    def __init__(self, workers: int, rng: Random, times: str) -> None:
        self.workers = workers
        self.in_flight = 0
        self._time = lambda: TIMES[times](rng)
        self._queue: deque[float] = deque()
        self._busy: list[tuple[float, int, float]] = []
        self._serial = count()

    def submit(self, now: float) -> None:
        self.in_flight += 1
        self._queue.append(now)
        self.work(now)

    def work(self, now: float) -> None:
        while self._queue and len(self._busy) < self.workers:
            ends = now + self._time()
            heapq.heappush(self._busy, (ends, next(self._serial), self._queue.popleft()))

    def next_end(self) -> float:
        return self._busy[0][0] if self._busy else float("inf")

    def finish(self) -> tuple[float, float]:
        """Return when the next call ends, and what it took, queue included."""
        now, _, began = heapq.heappop(self._busy)
        self.in_flight -= 1
        self.work(now)
        return now, now - began


class Report(NamedTuple):
    """One window: the limit after it, calls served in it as a share of capacity, calls refused."""

    limit: float
    goodput: float
    refused: float
    seconds: float


class Simulation:
    """A limit in front of a server, window by window."""

    def __init__(
        self, limit: ConcurrencyLimit, workers: int, *, seed: int = 0, times: str = "lognormal"
    ) -> None:
        self.limit = limit
        self.rng = Random(seed)
        self.server = Server(workers, self.rng, times)
        self.windows = Windows(0.1)
        self.now = 0.0
        self._arrival = 0.0

    def run(self, windows: int, *, load: float | None = None) -> list[Report]:
        """Let windows pass. Calls come at `load` times the capacity, or whenever there is room."""
        return [self._window(load) for _ in range(windows)]

    def _window(self, load: float | None) -> Report:
        began = self.now
        crowded = load is None
        served = refused = 0
        while True:
            if load is None:
                while self.server.in_flight < self.limit.limit:
                    self.server.submit(self.now)
            elif self._arrival <= self.server.next_end():
                self.now = max(self.now, self._arrival)
                self._arrival = self.now + self.rng.expovariate(load * self.server.workers)
                if self.server.in_flight < self.limit.limit:
                    self.server.submit(self.now)
                else:
                    crowded = True
                    refused += 1
                continue
            self.now, rtt = self.server.finish()
            served += 1
            self.windows.samples.append(rtt)
            window = self.windows.end(self.now)
            if window is not None:
                break
        in_flight = max(self.server.in_flight + 1, self.limit.limit if crowded else 0)
        in_flight = min(in_flight, max(self.limit.limit, self.server.in_flight))
        self.limit.on_sample(self.now, window.rtt, in_flight, window.dropped, self.rng.random)
        seconds = self.now - began
        goodput = served / seconds / self.server.workers
        return Report(self.limit.estimate, goodput, refused / (served + refused), seconds)


SEEDS = range(3)
STEPS = [(40, 20), (20, 40)] if QUICK else [(100, 50), (100, 200), (40, 20), (20, 40)]
SATURATED = [5, 20] if QUICK else [5, 10, 20, 40, 100]
STARTED = [10, 40] if QUICK else [10, 40, 100]


def _goodput(reports: list[Report]) -> float:
    """Return what was served in the time of all these windows, as a share of capacity."""
    seconds = sum(report.seconds for report in reports)
    return sum(report.goodput * report.seconds for report in reports) / seconds


# After a step


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]} to {step[1]}")
@pytest.mark.parametrize("name", ["aimd", "vegas"])
def test_the_limit_finds_the_optimum_again(name: str, step: tuple[int, int], times: str) -> None:
    """When capacity halves or doubles, AIMD and Vegas are within 30 % of it 60 windows later."""
    before, after = step
    close = []
    for seed in SEEDS:
        simulation = Simulation(LIMITS[name](), before, seed=seed, times=times)
        simulation.run(150)
        simulation.server.workers = after
        limits = [report.limit for report in simulation.run(100)[60:]]
        assert median(limits) == pytest.approx(after, rel=0.3)
        close += [abs(limit / after - 1) <= 0.3 for limit in limits]
    assert fmean(close) >= (0.9 if times == "lognormal" else 0.7)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_goodput_stays_with_gradient2(step: tuple[int, int], times: str) -> None:
    """When capacity halves or doubles, what is served stays at 90 % of it or more."""
    before, after = step
    for seed in SEEDS:
        simulation = Simulation(LIMITS["gradient2"](), before, seed=seed, times=times)
        assert _goodput(simulation.run(100)) >= 0.9
        simulation.server.workers = after
        assert _goodput(simulation.run(60)) >= 0.9
        assert _goodput(simulation.run(60)) >= 0.95


# Under saturation


def _saturated(name: str, workers: int, times: str = "lognormal") -> list[Report]:
    """Return what 900 windows of as many calls as are let in tell."""
    return Simulation(LIMITS[name](), workers, times=times).run(900)


def _drifts(name: str) -> bool:
    """Return whether the limit exceeds three times the optimum in a long saturation."""
    simulation = Simulation(LIMITS[name](), 20)
    simulation.run(100)
    return any(simulation.run(1)[0].limit > 3.0 * 20 for _ in range(800))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("workers", SATURATED)
@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_drifts_upwards(name: str, workers: int, times: str) -> None:
    """It stays where its rule says, some chance allowed, and no higher at the end than before."""
    reports = _saturated(name, workers, times)
    limits = [report.limit for report in reports]
    most = 1.75 * workers + 15 if name == "gradient2" else 1.5 * workers + 8
    assert max(limits[300:]) < most
    assert fmean(limits[600:]) < 1.15 * fmean(limits[300:600])
    assert _goodput(reports) >= 0.9


def test_without_a_fresh_baseline_gradient2_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never take the baseline anew, and the average follows the queue that the limit makes."""
    monkeypatch.setattr(Learner, "_interval", lambda _self, _rng: float("inf"))
    assert _drifts("gradient2")


def test_without_draining_vegas_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the baseline anew with the queue still there, and the limit takes it for normal."""
    monkeypatch.setattr(Learner, "_served", lambda *_: 10**6)
    assert _drifts("vegas")


@pytest.mark.parametrize("name", ["vegas", "gradient2"])
def test_a_start_in_the_middle_of_a_queue_is_overcome(name: str) -> None:
    """The first calls ever seen stood in a queue: the limit finds down all the same."""
    limit = LIMITS[name]()
    limit.estimate = 160.0
    simulation = Simulation(limit, 40)
    assert median(report.limit for report in simulation.run(300)[200:]) < 1.8 * 40


# Calls that come when they come


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("load", [1.5, 3.0])
def test_overload_leaves_goodput_as_it_is(name: str, load: float) -> None:
    """However many calls come, the server is busy, and its queue is short."""
    simulation = Simulation(LIMITS[name](), 40)
    reports = simulation.run(200, load=load)
    assert _goodput(reports) >= 0.9
    reports = reports[100:]
    assert fmean(report.limit for report in reports) < 1.8 * 40


@pytest.mark.parametrize("name", LIMITS)
def test_traffic_that_fits_is_not_refused(name: str) -> None:
    """At 60 % of capacity next to nothing is refused, and the limit does not run away."""
    simulation = Simulation(LIMITS[name](), 40)
    reports = simulation.run(200, load=0.6)[60:]
    assert fmean(report.refused for report in reports) < 0.01
    assert max(report.limit for report in reports) < 2.5 * 40


def test_without_the_freeze_an_unused_limit_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit grow while it is not used, and nothing stops it: no queue ever tells."""
    monkeypatch.setattr(ConcurrencyLimit, "_unused", lambda _self, _in_flight: False)
    monkeypatch.setattr(ConcurrencyLimit, "_starting", False)
    simulation = Simulation(LIMITS["vegas"](), 40)
    assert max(report.limit for report in simulation.run(200, load=0.6)) > 5 * 40


# Through the gate


DRAWS = {**TIMES, "constant": lambda _rng: 1.0}
AT_ONCE: dict[str, Callable[[], ConcurrencyLimit]] = {
    "vegas": vegas,
    "gradient2": gradient2,
    "aimd": lambda: aimd(slow_after=0.13),
}


class Times(Random):
    """Draws times of the wanted kind where the server asks for exponential ones."""

    def __init__(self, seed: int, times: str) -> None:
        super().__init__(seed)
        self._plain = Random(seed)
        self._draw = DRAWS[times]

    def expovariate(self, lambd: float = 1.0) -> float:
        return self._draw(self._plain) / lambd


def _from_the_start(name: str, workers: int, load: float, times: str, seed: int) -> float:
    """Return what is served in the first 20 s of the process, as a share of what could be.

    Calls take 0.1 s and come whatever becomes of others; the limit begins with 20.
    """

    async def main() -> float:
        server = scenario.Server(workers, 0.1, Times(seed, times))
        guard = new_guard(AdaptiveLimit(AT_ONCE[name]()), rng=Random(seed + 1))
        report = await scenario.run_clients(
            lambda: guard.acall(server.serve),
            {Criticality.CRITICAL: load * server.capacity},
            seconds=20.0,
            patience=1.0,
            rng=Random(seed + 2),
        )
        if load < 1:
            return report.kept(Criticality.CRITICAL)
        return report.goodput() / server.capacity

    return run_virtual(main())


@pytest.mark.parametrize("times", DRAWS)
@pytest.mark.parametrize("workers", STARTED)
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_new_process_serves_what_it_can_at_once(name: str, workers: int, times: str) -> None:
    """At twice the capacity 90 % of it are served in the first 20 s, start included."""
    assert _from_the_start(name, workers, 2.0, times, seed=1) >= 0.9


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workers", [10] if QUICK else [10, 40])
def test_the_default_limit_does_not_throttle_by_chance(workers: int, seed: int) -> None:
    """Times that vary much are no sign of a queue, whatever the chance."""
    assert _from_the_start("vegas", workers, 2.0, "exponential", seed=10 + seed) >= 0.9


@pytest.mark.parametrize("times", DRAWS)
@pytest.mark.parametrize("workers", STARTED)
@pytest.mark.parametrize("name", AT_ONCE)
def test_traffic_that_fits_is_served_from_the_start(name: str, workers: int, times: str) -> None:
    """At 60 % of capacity 96 % are, although 60 at once are three times what is let in first."""
    assert _from_the_start(name, workers, 0.6, times, seed=1) >= 0.96


@pytest.mark.parametrize("name", ["aimd"] if QUICK else ["aimd", "gradient2"])
def test_without_a_quick_start_it_takes_too_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules alone, one or so a window, the limit is not there after 20 s."""
    monkeypatch.setattr(ConcurrencyLimit, "_starting", False)
    assert _from_the_start(name, 100, 2.0, "exponential", seed=1) < 0.6


class AsyncServer:
    """The same server on the event loop, in tenths of a second."""

    def __init__(self, workers: int, rng: Random) -> None:
        self.workers = workers
        self.served = 0
        self._busy = 0
        self._rng = rng
        self._queue: deque[asyncio.Future[None]] = deque()

    async def call(self) -> None:
        if self._busy >= self.workers:
            bell = asyncio.get_running_loop().create_future()
            self._queue.append(bell)
            await bell
        self._busy += 1
        await let_pass(TIMES["lognormal"](self._rng) / 10)
        self._busy -= 1
        self.served += 1
        while self._queue and self._busy < self.workers:
            bell = self._queue.popleft()
            if not bell.done():
                bell.set_result(None)
                break


def _through_the_gate(policy: AdaptiveLimit, before: int, after: int) -> Iterator[float]:
    """Return the limit before and after a step, and goodput after it as a share of capacity."""
    results: list[float] = []

    async def main() -> None:
        server = AsyncServer(before, Random(1))
        guard = new_guard(policy, rng=Random(2))
        going = True

        async def client() -> None:
            while going:
                await guard.acall(server.call)

        async def limits(seconds: int) -> float:
            seen = []
            for _ in range(10 * seconds):
                await let_pass(0.1)
                seen.append(policy.limit)
            return median(seen[len(seen) // 2 :])

        clients = [asyncio.create_task(client()) for _ in range(120)]
        results.append(await limits(30))
        server.workers = after
        results.append(await limits(30))
        served = server.served
        await let_pass(5.0)
        results.append((server.served - served) / 5.0 / (10 * after))
        going = False
        await asyncio.gather(*clients)
        assert policy.in_flight == policy.waiting == 0

    run_virtual(main())
    return iter(results)


GATES = {
    "vegas": (vegas(**WIDE), 0.3),
    "aimd": (aimd(slow_after=0.12, **WIDE), 0.3),
    "gradient2": (gradient2(**WIDE), 0.8),
}


@pytest.mark.parametrize("name", ["vegas"] if QUICK else GATES)
def test_the_gate_does_the_same_on_the_event_loop(name: str) -> None:
    """120 clients at a server of 60 workers, then 30: the limit follows, the work goes on."""
    limit, tolerance = GATES[name]
    policy = AdaptiveLimit(limit, max_wait=float("inf"), max_waiting=1000)
    before, after, goodput = _through_the_gate(policy, 60, 30)
    assert before == pytest.approx(60, rel=tolerance)
    assert after == pytest.approx(30, rel=tolerance)
    assert goodput >= 0.9
