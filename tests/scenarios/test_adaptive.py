"""Adaptive limits in front of a simulated server whose capacity changes.

The server has `workers`, each busy with one call for a mean of one second (times vary as they do in
life: lognormal, or exponential where it says so), and a queue in front of them that it does not
bound. So as many calls at once as it has workers are the optimum: fewer leave workers idle, more
only stand in the queue. A window is what the policy takes for one: at least ten calls and four
times what they take. What counts as settled is the median of the limit, 60 to 100 windows later.
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

from seawall import AdaptiveLimit, aimd, gradient2, vegas
from seawall.models.adaptive import Learner, Limit
from seawall.models.samples import Windows
from seawall.testing import run_virtual
from tests.support import let_pass, new_guard

WIDE = {"minimum": 1, "maximum": 1000}
LIMITS: dict[str, Callable[[], Limit]] = {
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


class Simulation:
    """A limit in front of a server, window by window."""

    def __init__(
        self, limit: Limit, workers: int, *, seed: int = 0, times: str = "lognormal"
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
        goodput = served / (self.now - began) / self.server.workers
        return Report(self.limit.estimate, goodput, refused / (served + refused))


STEPS = [(100, 50), (100, 200), (60, 120)]


def _settled(reports: list[Report]) -> float:
    return median(report.limit for report in reports[-40:])


# After a step


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]} to {step[1]}")
@pytest.mark.parametrize("name", ["aimd", "vegas"])
def test_the_limit_finds_the_optimum_again(name: str, step: tuple[int, int], times: str) -> None:
    """When capacity halves or doubles, AIMD and Vegas are within 30 % of it 60 windows later."""
    before, after = step
    simulation = Simulation(LIMITS[name](), before, times=times)
    assert _settled(simulation.run(250)) == pytest.approx(before, rel=0.3)
    simulation.server.workers = after
    assert _settled(simulation.run(100)) == pytest.approx(after, rel=0.3)


@pytest.mark.parametrize("step", [(40, 20), (40, 80), (100, 50), (100, 200)], ids=str)
def test_goodput_stays_with_gradient2(step: tuple[int, int]) -> None:
    """When capacity halves or doubles, what is served stays at 90 % of it or more."""
    before, after = step
    simulation = Simulation(LIMITS["gradient2"](), before)
    assert fmean(report.goodput for report in simulation.run(300)[200:]) >= 0.9
    simulation.server.workers = after
    reports = simulation.run(120)
    assert fmean(report.goodput for report in reports[:60]) >= 0.9
    assert fmean(report.goodput for report in reports[60:]) >= 0.95


# Under saturation


def _drift(name: str) -> float:
    """Return how many times the optimum the limit is at most, late in a long saturation."""
    simulation = Simulation(LIMITS[name](), 40)
    reports = simulation.run(700)
    assert fmean(report.goodput for report in reports[100:]) >= 0.9
    return max(report.limit for report in reports[600:]) / 40


@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_drifts_upwards(name: str) -> None:
    """After 600 windows in full use the limit is where its rule says: at most 1.5 and a few."""
    assert _drift(name) < 2.0


def test_without_a_fresh_baseline_gradient2_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never take the baseline anew, and the average follows the queue that the limit makes."""
    monkeypatch.setattr(Learner, "_interval", lambda _self, _rng: float("inf"))
    assert _drift("gradient2") > 2.5


def test_without_draining_vegas_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the baseline anew with the queue still there, and the limit takes it for normal."""
    monkeypatch.setattr(Learner, "_calm", lambda *_: 10**6)
    assert _drift("vegas") > 2.5


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
    reports = simulation.run(200, load=load)[100:]
    assert fmean(report.goodput for report in reports) >= 0.9
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
    monkeypatch.setattr(Limit, "_unused", lambda _self, _in_flight: False)
    simulation = Simulation(LIMITS["vegas"](), 40)
    assert max(report.limit for report in simulation.run(200, load=0.6)) > 5 * 40


# Through the gate


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


@pytest.mark.parametrize(
    ("limit", "tolerance"),
    [
        (aimd(slow_after=0.12, **WIDE), 0.3),
        (vegas(**WIDE), 0.3),
        (gradient2(**WIDE), 0.8),
    ],
    ids=["aimd", "vegas", "gradient2"],
)
def test_the_gate_does_the_same_on_the_event_loop(limit: Limit, tolerance: float) -> None:
    """120 clients at a server of 60 workers, then 30: the limit follows, the work goes on."""
    policy = AdaptiveLimit(limit, max_wait=float("inf"), max_waiting=1000)
    before, after, goodput = _through_the_gate(policy, 60, 30)
    assert before == pytest.approx(60, rel=tolerance)
    assert after == pytest.approx(30, rel=tolerance)
    assert goodput >= 0.9
