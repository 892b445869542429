"""Refusals are what there is most of in an overload: none may wait for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from random import Random
from typing import Any

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Guard,
    Rejected,
    Shed,
    Throttle,
    deadline,
)
from seawall.limits import aimd
from seawall.load import ServiceLevels
from seawall.shedding import adaptive_lifo, by_criticality, by_deadline
from seawall.testing import run_virtual
from tests.support import let_pass, new_guard

Case = tuple[Guard, AbstractContextManager[Any]]
"""A guard, and a block in which it refuses every call."""


def _shed() -> Case:
    return new_guard(Shed(by_criticality(), load=lambda: 2.0)), nullcontext()


def _late() -> Case:
    return new_guard(Shed(by_deadline(reserve=9.0))), deadline(5.0)


def _slots(policy: Any) -> Case:
    guard = new_guard(policy)
    return guard, guard.hold()


def _no_time(policy: Any) -> Case:
    guard, held = _slots(policy)
    stack = ExitStack()
    stack.enter_context(held)
    stack.enter_context(deadline(0.0))
    return guard, stack


def _limit(**options: Any) -> AdaptiveLimit:
    return AdaptiveLimit(aimd(slow_after=1.0, initial=1, minimum=1), **options)


def _throttle() -> Case:
    guard = new_guard(Throttle(probe_every=None), rng=Random(1))

    def refused() -> None:
        raise ConnectionError

    for _ in range(5000):
        guard.attempt(refused)
    return guard, nullcontext()


def _service_levels() -> Case:
    levels = ServiceLevels("shop", load=lambda: 0.0)
    levels.pin("static")
    return new_guard(levels.gate()), nullcontext()


def _breaker() -> Case:
    breaker = Breaker(consecutive=1)
    guard = new_guard(breaker)
    breaker.isolate()
    return guard, nullcontext()


CASES: dict[str, Callable[[], Case]] = {
    "shed": _shed,
    "shed by deadline": _late,
    "bulkhead: all in use": lambda: _slots(Bulkhead(1)),
    "bulkhead: waited": lambda: _slots(Bulkhead(1, max_wait=0.25)),
    "bulkhead: deadline": lambda: _no_time(Bulkhead(1, max_wait=9.0)),
    "adaptive limit: all in use": lambda: _slots(_limit()),
    "adaptive limit: waited": lambda: _slots(_limit(max_wait=0.25)),
    "throttle": _throttle,
    "service_levels": _service_levels,
    "breaker": _breaker,
}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def _call(guard: Guard, refusals: list[weakref.ref[Rejected]]) -> None:
    try:
        await guard.acall(let_pass, 1.0)
    except Rejected as error:
        refusals.append(weakref.ref(error))


def _call_sync(guard: Guard, refusals: list[weakref.ref[Rejected]]) -> None:
    try:
        guard.call(int)
    except Rejected as error:
        refusals.append(weakref.ref(error))


def _left(refusals: list[weakref.ref[Rejected]]) -> int:
    return sum(known() is not None for known in refusals)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", CASES)
def test_a_refusal_is_gone_when_it_has_been_handled(name: str) -> None:
    """No gate keeps its own refusals alive, in either kind of calls, with the collector off."""

    async def main() -> None:
        refusals: list[weakref.ref[Rejected]] = []
        guard, refusing = CASES[name]()
        with refusing:
            for _ in range(5):
                await _call(guard, refusals)
                _call_sync(guard, refusals)
        assert (len(refusals), _left(refusals)) == (10, 0)

    run_virtual(main())


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("policy", [Bulkhead, _limit])
@pytest.mark.parametrize("why", ["no room", "shed"])
def test_a_refusal_from_a_queue_is_gone_when_it_has_been_handled(policy: Any, why: str) -> None:
    """The same for who finds no room, and who is shed while waiting."""

    async def main() -> None:
        refusals: list[weakref.ref[Rejected]] = []
        shed = adaptive_lifo(0.01, patience=0.02, scale=0) if why == "shed" else None
        room = 9 if why == "shed" else 1
        one = {"limit": 1} if policy is Bulkhead else {}
        guard = new_guard(policy(**one, max_wait=9.0, max_waiting=room, shed=shed))
        calls = [asyncio.ensure_future(_call(guard, refusals)) for _ in range(6)]
        await asyncio.wait(calls)
        assert len(refusals) >= 3
        assert _left(refusals) == 0

    run_virtual(main())
