"""How a breaker begins again: soon where the vendor is well, gently where it is weak.

The page about the breaker has the table; here it is measured again, on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

import pytest

from seawall import Breaker, Guard
from seawall.policies.breaker import growing, single_probe
from seawall.testing import run_virtual
from seawall_demo._settings import PODS, PROTECTED, RATE
from seawall_demo.pod import Prices, vendor_guard
from seawall_demo.vendor import Vendor as DemoVendor
from tests.scenarios.server import Server
from tests.support import let_pass

WELL = 2.0
"""Seconds before the outage."""
AFTER = 4.0
"""Seconds that are watched after the recovery."""
TIMEOUT = 2.0
DEMAND = 100
"""Calls a second."""
OUTAGES = [29.8, 30.0, 30.4]
"""Seconds: they end at different moments of a break."""


class Vendor:
    """Answers in 50 ms. While it is down it refuses, or never answers."""

    def __init__(self, *, hangs: bool) -> None:
        self.down = False
        self._hangs = hangs

    async def answer(self) -> None:
        if not self.down:
            await let_pass(0.05)
        elif self._hangs:
            await asyncio.get_running_loop().create_future()
        else:
            raise ConnectionError


class WeakVendor:
    """Serves first come, first served, those who left included; falls over if too many are there.

    It is down at first. Each time that it has fallen it is down for 10 s, and has forgotten who was
    there.
    """

    def __init__(self, capacity: float, *, down: float, rng: Random) -> None:
        self.falls = 0
        self._capacity = capacity
        self._rng = rng
        self._server = self._fresh()
        self._up_at = asyncio.get_running_loop().time() + down

    def _fresh(self) -> Server:
        return Server(2, 2 / self._capacity, self._rng)

    async def answer(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._up_at:
            raise ConnectionError
        if self._server.present > 3 * TIMEOUT * self._capacity:
            self.falls += 1
            self._up_at, self._server = now + 10.0, self._fresh()
        await asyncio.shield(asyncio.ensure_future(self._server.serve()))


class Seen(NamedTuple):
    """How a call went, and when it began."""

    at: float
    good: bool


async def demand(
    answer: Callable[[], Coroutine[Any, Any, None]],
    breaker: Breaker | None,
    rate: float,
    seconds: float,
) -> list[Seen]:
    """Let calls come at even distances; return how they went."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    seen: list[Seen] = []
    on = (ConnectionError, TimeoutError)
    guard = Guard.standard("vendor", on=on, timeout=TIMEOUT, breaker=breaker, rng=Random(1))

    async def one() -> None:
        began = loop.time() - start
        result = await guard.aattempt(answer)
        seen.append(Seen(began, result.ok))

    async with asyncio.TaskGroup() as group:
        for _ in range(round(rate * seconds)):
            group.create_task(one())
            await let_pass(1 / rate)
    guard.close()
    return seen


def share(seen: list[Seen], since: float, until: float) -> float:
    """Return the share of good answers of the calls that began in that time."""
    chosen = [one.good for one in seen if since <= one.at < until]
    return sum(chosen) / len(chosen)


async def _time_to_recover(
    rate: float, down: float, *, hangs: bool, breaker: Breaker | None = None
) -> float:
    """Return after how many seconds 95 % of the calls of a second have good answers."""
    vendor = Vendor(hangs=hangs)
    loop = asyncio.get_running_loop()
    loop.call_later(WELL, setattr, vendor, "down", True)  # noqa: FBT003 - of setattr
    loop.call_later(WELL + down, setattr, vendor, "down", False)  # noqa: FBT003 - of setattr
    seen = await demand(vendor.answer, breaker, rate, WELL + down + AFTER)
    tenths = range(int(10 * (AFTER - 1)))
    since = [WELL + down + tenth / 10 for tenth in tenths]
    return next((t - WELL - down for t in since if share(seen, t, t + 1) >= 0.95), float("inf"))


@pytest.mark.parametrize("down", OUTAGES)
@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
@pytest.mark.parametrize("rate", [20, DEMAND])
def test_the_standard_guard_is_back_within_about_a_second(rate, hangs, down):
    """After 30 s of outage, whether the vendor refused or hung: 95 % good answers within 1.2 s."""
    assert run_virtual(_time_to_recover(rate, down, hangs=hangs)) <= 1.2


def test_one_long_break_keeps_refusing_a_vendor_that_is_well():
    """What the defaults are for: the vendor is well, and callers do without it for seconds."""
    long = Breaker(break_for=15.0, probes=single_probe())
    assert run_virtual(_time_to_recover(DEMAND, 30.0, hangs=False, breaker=long)) >= 2


async def _weak(capacity: float, breaker: Breaker | None = None) -> tuple[int, float]:
    """Return how often the vendor fell over, and the share of its capacity that was of use."""
    vendor = WeakVendor(capacity * DEMAND, down=3.0, rng=Random(7))
    seen = await demand(vendor.answer, breaker, DEMAND, 33.0)
    return vendor.falls, share(seen, 3.0, 33.0) / capacity


@pytest.mark.parametrize("capacity", [0.1, 0.2, 0.3])
def test_the_standard_guard_does_not_push_a_weak_vendor_over(capacity):
    """It comes back with 10 to 30 % of what is asked for: it stays up, and a third is of use."""
    falls, used = run_virtual(_weak(capacity))
    assert falls == 0
    assert used > 1 / 3


@pytest.mark.parametrize("capacity", [0.1, 0.2, 0.3])
def test_one_probe_that_opens_the_gate_to_all_pushes_it_over(capacity):
    """Without the slow start, the same short breaks keep it down."""
    falls, used = run_virtual(
        _weak(capacity, Breaker(break_for=growing(0.25, cap=1.0), probes=single_probe()))
    )
    assert falls >= 2
    assert used < 1 / 3


# The demo's own settings


async def _demo(mode: str, seed: int) -> float:
    """Return the share of good answers in the 4.5 s after the demo's vendor was slow or broken."""
    vendor, rng = DemoVendor(rng=Random(seed)), Random(seed + 1)
    guards = [vendor_guard(Prices(), None, f"demo-{pod}") for pod in range(PODS)]
    loop = asyncio.get_running_loop()
    start = loop.time()
    seen: list[Seen] = []

    async def asked() -> None:
        # The vendor does not notice that a caller has gone.
        serving = asyncio.ensure_future(vendor_status(vendor))
        if await asyncio.shield(serving) >= 500:
            raise ConnectionError

    async def one(guard: Guard) -> None:
        began = loop.time() - start
        result = await guard.aattempt(asked)
        seen.append(Seen(began, result.ok and not result.degraded))

    loop.call_later(WELL, setattr, vendor, "mode", mode)
    loop.call_later(WELL + 6.0, setattr, vendor, "mode", "well")
    async with asyncio.TaskGroup() as group:
        while loop.time() - start < WELL + 6.0 + 4.5:
            for guard in guards:
                group.create_task(one(guard))
                await let_pass(rng.expovariate(PODS * RATE))
    for guard in guards:
        guard.close()
    return share(seen, WELL + 6.0, WELL + 6.0 + 4.5)


async def vendor_status(vendor: DemoVendor) -> int:
    """Return the status with which the demo's vendor answers a request for a price."""
    statuses: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> dict[str, Any]:
        return await loop.create_future()

    loop = asyncio.get_running_loop()
    headers = [(b"x-account", PROTECTED.encode())]
    await vendor({"path": "/price", "headers": headers}, receive, send)
    return statuses[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["slow", "broken"])
def test_the_demo_is_back_within_a_second(mode, seed):
    """At most what comes within a second of 4.5 s is answered with less."""
    assert run_virtual(_demo(mode, seed)) >= 1 - 1 / 4.5
