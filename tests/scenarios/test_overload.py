"""Overload: one server is asked for 2, 5 and 10 times what it can do.

Twenty workers, 200 requests a second, a quarter of that critical; clients wait for two seconds,
which is longer than an answer may take. Without a shedder the server is busy with requests whose
clients have left, and serves nobody. With one it serves as many as it can, quickly, and the
critical ones first. Each shedder stands where the same queue without it fails. Run with `-s` to see
the figures.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench import queue_delay
from seawall import Bulkhead, Criticality, Shed
from seawall.load.signals import in_flight, occupancy, queue_time
from seawall.models.shedding.codel import CodelState
from seawall.models.shedding.rules import criticality_bars
from seawall.runtime.slots import Slots
from seawall.shedding import adaptive_lifo, by_chance, by_criticality, codel
from seawall.testing import run_virtual
from tests.scenarios.server import Report, Server, run_clients
from tests.support import QUICK, new_guard

WORKERS = 20
SERVICE = 0.1
CAPACITY = WORKERS / SERVICE
CRITICAL = 0.25
PATIENCE = 2.0
SECONDS = 6.0
TIMES = (2, 5) if QUICK else (2, 5, 10)
PAGE = Path(__file__).parents[2] / "docs" / "policies" / "shed.md"

Protection = Callable[[], list[Any]]


# What the page recommends, word for word


def _door_by_criticality() -> list[Any]:
    slots = Bulkhead(20, max_wait=2.0, max_waiting=80)
    return [Shed(by_criticality(), load=occupancy(slots)), slots]


def _door_by_chance() -> list[Any]:
    slots = Bulkhead(20, max_wait=2.0, max_waiting=80)
    return [Shed(by_chance(0.4), load=occupancy(slots)), slots]


def _queue_by_codel() -> list[Any]:
    return [Bulkhead(20, max_wait=2.0, max_waiting=400, order="criticality", shed=codel())]


def _queue_by_lifo() -> list[Any]:
    return [Bulkhead(20, max_wait=2.0, max_waiting=400, order="criticality", shed=adaptive_lifo())]


DOORS: dict[str, Protection] = {
    "by criticality": _door_by_criticality,
    "by chance": _door_by_chance,
}
QUEUES: dict[str, Protection] = {
    "controlled delay": _queue_by_codel,
    "adaptive lifo": _queue_by_lifo,
}
PROTECTIONS = DOORS | QUEUES


@pytest.mark.parametrize("name", PROTECTIONS)
def test_the_page_recommends_what_is_measured_here(name: str) -> None:
    """The same code stands in the documentation."""
    source = inspect.getsource(PROTECTIONS[name])
    written = re.findall(r"(?:Bulkhead|Shed)\(.*?\)(?=, slots\]|\]|\n)", source)
    assert written
    page = PAGE.read_text(encoding="utf-8")
    assert [code for code in written if code not in page] == []


# The runs


def _run(protection: Protection | None, load: float, seed: int, seconds: float = SECONDS) -> Report:
    async def main() -> Report:
        server = Server(WORKERS, SERVICE, Random(seed + 1))
        handle: Callable[[], Awaitable[Any]] = server.serve
        if protection is not None:
            guard = new_guard(*protection(), rng=Random(seed + 2))
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
    unloaded = _run(None, 0.2, seed, seconds=100.0).quantile(0.99)
    assert 3 * unloaded < PATIENCE  # else a slow answer would count as none
    return unloaded


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


def test_nobody_is_shed_where_there_is_enough_for_all() -> None:
    """At 60 % of capacity no shedder refuses more than one call in a hundred."""
    for protection in PROTECTIONS.values():
        report = _run(protection, 0.6, seed=1, seconds=15.0)
        assert report.kept(*Criticality) >= 0.99


# The same without the shedder, or with a part of it missing


@pytest.mark.parametrize("times", TIMES)
def test_without_a_shedder_the_server_collapses(times: int) -> None:
    """The same run without one: the server never rests, and soon nobody gets an answer."""
    report = _run(None, times, seed=1)
    _show("no shedder", times, report, _unloaded(1))
    assert report.goodput(since=SECONDS / 2) == 0
    assert report.kept(Criticality.CRITICAL) <= 0.4
    assert report.quantile(0.99) > 5 * _unloaded(1)


def test_a_bulkhead_with_a_long_queue_and_no_shedder_collapses_too() -> None:
    """It bounds what runs, not what waits: all are served too late."""
    report = _run(lambda: [Bulkhead(WORKERS, max_wait=60.0, max_waiting=9999)], 5, seed=1)
    assert report.goodput(since=SECONDS / 2) == 0


def test_without_the_door_the_same_bulkhead_loses_the_critical() -> None:
    """Its queue is short enough for quick answers, but takes in whoever comes first."""
    report = _run(lambda: _door_by_criticality()[1:], 5, seed=1)
    _show("no door", 5, report, _unloaded(1))
    assert report.kept(Criticality.CRITICAL) < 0.5


def test_without_its_discipline_the_same_queue_fails() -> None:
    """All who are served have waited for two seconds: slow answers, and many of them too late."""
    bare = Bulkhead(20, max_wait=2.0, max_waiting=400, order="criticality")
    report = _run(lambda: [bare], 2, seed=1)
    _show("no discipline", 2, report, _unloaded(1))
    assert report.goodput() < 0.85 * CAPACITY
    assert report.quantile(0.99) > 3 * _unloaded(1)


def test_where_newcomers_are_let_in_controlled_delay_keeps_no_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shed only who has waited past its use, and all others wait for nearly as long."""
    refuses = CodelState.refuses

    def lenient(state: CodelState, waiting: int, sojourn: float, now: float) -> bool:
        refuses(state, waiting, sojourn, now)
        return False

    kept_short = _run(_queue_by_codel, 2, seed=1).quantile(0.5)
    monkeypatch.setattr(CodelState, "refuses", lenient)
    report = _run(_queue_by_codel, 2, seed=1)
    _show("newcomers let in", 2, report, _unloaded(1))
    assert report.quantile(0.5) > 1.3 * kept_short


# One class of calls


@pytest.mark.parametrize("seconds", queue_delay.CALLS)
@pytest.mark.parametrize("times", queue_delay.TIMES[:2] if QUICK else queue_delay.TIMES)
def test_controlled_delay_keeps_the_wait_at_its_target(times: int, seconds: float) -> None:
    """The table of the page: the median wait, the goodput, and how long the refused have waited."""
    target = 0.1
    waits = queue_delay.overload(codel(target, interval=1.0), seconds, times)
    assert waits.quantile(0.5) <= 2 * target
    assert waits.done >= 0.9 * queue_delay.CAPACITY
    assert max(waits.refused) <= target
    row = (
        f"| {seconds * 1000:.0f} ms, {times} times capacity | {waits.quantile(0.5) * 1000:.0f} ms"
        f" | {waits.quantile(0.99) * 1000:.0f} ms | {waits.done / queue_delay.CAPACITY:.2f}"
        f" | {max(waits.refused) * 1000:.0f} ms |"
    )
    assert row in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("signal", "goodput", "critical"), [(in_flight, 0.9, 0.994), (queue_time, 1.0, 0.6)]
)
def test_by_another_signal_the_same_door_fails(
    signal: Any, goodput: float, critical: float
) -> None:
    """Slots in use leave the queue unused; queue time tells too late who should not come in."""
    slots = Bulkhead(20, max_wait=2.0, max_waiting=80)
    report = _run(lambda: [Shed(by_criticality(), load=signal(slots)), slots], 2, seed=1)
    _show(signal.__name__, 2, report, _unloaded(1))
    assert report.goodput() < goodput * CAPACITY
    assert report.kept(Criticality.CRITICAL) < critical


def test_without_bars_in_between_critical_calls_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one bar for all classes the critical go with the others."""
    monkeypatch.setattr("seawall.models.shedding.rules.class_bar", lambda start, _rank: start)
    assert criticality_bars(0.5, None) == (0.5,) * 4
    assert _run(_door_by_criticality, 5, seed=1).kept(Criticality.CRITICAL) < 0.5


def test_by_the_wait_of_who_is_served_no_queue_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask about the next in turn, who matters most, and controlled delay hardly ever acts."""

    def wait_of_next(slots: Slots, now: float) -> float:
        lanes = slots.queue.oldest()
        return now - max(lanes, key=lambda waiter: waiter.rank).since

    kept_short = _run(_queue_by_codel, 2, seed=1).quantile(0.5)
    monkeypatch.setattr(Slots, "_longest_wait", wait_of_next)
    assert _run(_queue_by_codel, 2, seed=1).quantile(0.5) > 1.3 * kept_short


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
