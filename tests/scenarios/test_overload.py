"""Overload: one server is asked for 2, 5 and 10 times what it can do.

Ten workers, 100 requests a second, a quarter of that critical; clients wait for a second. Without
a shedder the server is busy with requests whose clients have left, and serves nobody. With one it
serves as many as it can, quickly, and the critical ones first. Run with `-s` to see the figures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from random import Random
from typing import Any

import pytest

from seawall import (
    Bulkhead,
    Criticality,
    Shed,
    adaptive_lifo,
    by_chance,
    by_criticality,
    codel,
)
from seawall.models import codel as codel_model
from seawall.models.shedding import ByCriticality
from seawall.runtime.slots import Slots
from seawall.testing import run_virtual
from tests.scenarios.server import Report, Server, run_clients
from tests.support import new_guard

WORKERS = 10
SERVICE = 0.1
CAPACITY = WORKERS / SERVICE
CRITICAL = 0.25
PATIENCE = 1.0
SECONDS = 10.0
TIMES = (2, 5, 10)

Protection = Callable[[Server], list[Any]]


def _full(server: Server) -> Callable[[], float]:
    """Return a load signal: requests in the server, of the four for each worker that it may hold.

    The bars of two classes are then five requests apart, so that a burst of critical ones fits.
    """
    return lambda: server.present / (4 * server.workers)


def _queue(shed: Any) -> list[Any]:
    return [Bulkhead(WORKERS, max_wait=1.0, max_waiting=40, order="criticality", shed=shed)]


PROTECTIONS: dict[str, Protection] = {
    "by criticality": lambda server: [Shed(by_criticality(0.5), load=_full(server))],
    "by chance": lambda server: [Shed(by_chance(0.5), load=_full(server))],
    "controlled delay": lambda _server: _queue(codel()),
    "adaptive lifo": lambda _server: _queue(adaptive_lifo()),
}


def _run(protection: Protection | None, load: float, seed: int, seconds: float = SECONDS) -> Report:
    async def main() -> Report:
        server = Server(WORKERS, SERVICE, Random(seed + 1))
        handle: Callable[[], Awaitable[Any]] = server.serve
        if protection is not None:
            guard = new_guard(*protection(server), rng=Random(seed + 2))
            handle = lambda: guard.acall(server.serve)  # noqa: E731
        critical = min(CRITICAL, load / 2)
        return await run_clients(
            handle,
            {
                Criticality.CRITICAL: critical * CAPACITY,
                Criticality.SHEDDABLE: (load - critical) * CAPACITY,
            },
            seconds=seconds,
            patience=PATIENCE,
            rng=Random(seed),
        )

    return run_virtual(main())


@cache
def _unloaded(seed: int) -> float:
    """Return the 99th percentile of a server that has little to do."""
    return _run(None, 0.2, seed, seconds=150.0).quantile(0.99)


def _show(name: str, times: float, report: Report, unloaded: float) -> None:
    print(  # noqa: T201 - what was measured, for who asks
        f"\n{name}, {times} times capacity: goodput {report.goodput() / CAPACITY:.3f} of capacity,"
        f" p99 {report.quantile(0.99) / unloaded:.2f} times unloaded,"
        f" critical kept {report.kept(Criticality.CRITICAL):.4f}",
        end="",
    )


def _check_overload(name: str, times: int, seed: int) -> None:
    report = _run(PROTECTIONS[name], times, seed)
    unloaded = _unloaded(seed)
    _show(name, times, report, unloaded)
    assert report.goodput() >= 0.9 * CAPACITY
    assert report.quantile(0.99) <= 3 * unloaded
    assert report.kept(Criticality.CRITICAL) >= 0.994


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", PROTECTIONS)
def test_overload_is_shed(name: str, times: int) -> None:
    """At 2, 5 and 10 times capacity: full goodput, quick answers, the critical ones kept."""
    _check_overload(name, times, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", PROTECTIONS)
def test_overload_is_shed_whatever_the_chance(name: str, times: int, seed: int) -> None:
    """The same with other random numbers."""
    _check_overload(name, times, seed)


@pytest.mark.parametrize("times", TIMES)
def test_without_a_shedder_the_server_collapses(times: int) -> None:
    """The same run without one: the server never rests, and hardly anybody gets an answer."""
    report = _run(None, times, seed=1)
    _show("no shedder", times, report, _unloaded(1))
    assert report.goodput() <= 0.25 * CAPACITY
    assert report.goodput(since=SECONDS / 2) == 0
    assert report.kept(Criticality.CRITICAL) <= 0.15
    assert report.quantile(0.99) > 5 * _unloaded(1)


def test_a_bulkhead_with_a_long_queue_and_no_shedder_collapses_too() -> None:
    """It bounds what runs, not what waits: all are served too late."""
    report = _run(lambda _server: [Bulkhead(WORKERS, max_wait=60.0, max_waiting=9999)], 5, seed=1)
    assert report.goodput(since=SECONDS / 2) == 0


def test_nobody_is_shed_where_there_is_enough_for_all() -> None:
    """At 60 % of capacity no shedder refuses more than one call in a hundred."""
    for protection in PROTECTIONS.values():
        report = _run(protection, 0.6, seed=1, seconds=60.0)
        assert report.goodput() >= 0.99 * len(report.answers) / report.seconds


def test_without_bars_in_between_critical_calls_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one bar for all classes the critical go with the others."""
    monkeypatch.setattr("seawall.models.shedding.class_bar", lambda start, _rank: start)
    assert ByCriticality(0.5).bars == (0.5,) * 4
    report = _run(PROTECTIONS["by criticality"], 5, seed=1)
    assert report.kept(Criticality.CRITICAL) < 0.5


def test_without_newest_first_and_timeouts_the_queue_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue of the same length from which nobody is shed: everybody waits for all of it."""
    shed = _run(PROTECTIONS["adaptive lifo"], 5, seed=1).quantile(0.5)
    monkeypatch.setattr(codel_model.AdaptiveLifoState, "sheds", lambda *_: False)
    assert _run(PROTECTIONS["adaptive lifo"], 5, seed=1).quantile(0.5) > 4 * shed


def test_by_the_wait_of_who_is_served_no_queue_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask about the next in turn, who matters most, and controlled delay hardly ever acts."""

    def wait_of_next(slots: Slots, now: float) -> float:
        lanes = slots.queue.oldest()
        return now - max(lanes, key=lambda waiter: waiter.rank).since

    kept_short = _run(PROTECTIONS["controlled delay"], 2, seed=1).quantile(0.5)
    monkeypatch.setattr(Slots, "_longest_wait", wait_of_next)
    assert _run(PROTECTIONS["controlled delay"], 2, seed=1).quantile(0.5) > 1.3 * kept_short


# A target in proportion to what a call takes


def _shed_of_a_healthy_server(scale: float) -> float:
    """Return the share shed by one worker at 60 % load whose calls take 50 ms."""

    async def main() -> Report:
        server = Server(1, 0.05, Random(2))
        shed = codel(scale=scale)
        guard = new_guard(Bulkhead(1, max_wait=10.0, max_waiting=50, shed=shed))
        rates = {Criticality.CRITICAL: 0.6 * server.capacity}
        return await run_clients(
            lambda: guard.acall(server.serve),
            rates,
            seconds=100.0,
            patience=PATIENCE,
            rng=Random(1),
        )

    return 1 - run_virtual(main()).kept(Criticality.CRITICAL)


def test_a_fixed_target_sheds_from_a_healthy_server() -> None:
    """5 ms is nothing where a call takes 50: without the scale every burst is a bad queue."""
    scaled, fixed = _shed_of_a_healthy_server(5.0), _shed_of_a_healthy_server(0.0)
    assert scaled < 0.01
    assert fixed > 0.03
