"""What is rare and matters is seen at once: a breaker that opens, between two samples."""

from __future__ import annotations

import asyncio
import gc
import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard, events
from seawall.dashboard import debounce, sampler
from seawall.dashboard.debounce import APART, TOGETHER, EventDebounce
from seawall.events import BreakerChanged, bus
from seawall.events.bus import emit
from seawall.testing import run_virtual
from tests.dashboard.app_support import FakeWatcher, Shown, Viewer
from tests.support import examples, falsified, let_pass

pytestmark = pytest.mark.usefixtures("nobody_else")


def _happens() -> None:
    emit(BreakerChanged, "vendor", before="closed", after="open", cause="test", key=None)


def test_a_breaker_that_opens_is_seen_at_once():
    """Viewers receive the new state long before the next sample is due."""

    async def main() -> None:
        vendor = Guard("vendor", Breaker(consecutive=1))
        viewer = Viewer(Shown(every=30.0))
        await let_pass(1.0)
        assert len(viewer.events) == 1
        vendor.policies[0].isolate()
        await let_pass(0.1)
        assert len(viewer.events) == 2
        await viewer.leave()
        vendor.close()

    run_virtual(main())


def _samples(moments: list[float], seconds: float = 4.0) -> list[float]:
    """Return when it is sampled, if something rare happens at these moments."""
    taken: list[float] = []

    class Timed(FakeWatcher):
        def sample(self) -> dict[str, Any]:
            taken.append(asyncio.get_running_loop().time())
            return super().sample()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        app = Shown(every=2.0)
        app._new_watcher = Timed  # type: ignore[method-assign]
        viewer = Viewer(app)
        for moment in moments:
            loop.call_later(moment, _happens)
        await let_pass(seconds)
        await viewer.leave()
        await app.aclose()

    run_virtual(main())
    return [moment - taken[0] for moment in taken]


def _check_rushed(moments: list[float]) -> None:
    samples = _samples(moments)
    for moment in moments:
        soon = moment + TOGETHER + APART + 0.001
        assert any(moment <= sample <= soon for sample in samples)
    for before, after in pairwise(samples):
        assert after - before >= APART - 0.001


MOMENTS = st.lists(st.integers(1, 140).map(lambda tick: tick / 40), max_size=8)


@examples(40)
@given(MOMENTS)
def test_all_is_seen_soon_and_nothing_is_sampled_too_often(moments: list[float]) -> None:
    """However much happens, there is a sample soon after it, and never two too close together."""
    _check_rushed(moments)


@pytest.mark.parametrize(("name", "value"), [("APART", 0.0), ("RARE", (events.LeaseChanged,))])
def test_without_the_pace_or_the_events_that_does_not_hold(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
):
    """The rule above needs both: what it listens to, and the pause between two samples."""
    monkeypatch.setattr(debounce, name, value)
    if name == "APART":
        monkeypatch.setattr(sampler, name, value)
    assert falsified(_check_rushed, MOMENTS)


def test_nobody_looks_and_nothing_is_hurried():
    """Without viewers no additional sample is taken."""

    async def main() -> None:
        app = Shown(every=30.0)
        async with app:
            await let_pass(1.0)
            _happens()
            await let_pass(5.0)
            assert app.watchers[0].samples == 1

    run_virtual(main())


def test_it_is_heard_from_any_thread():
    """A breaker opens in the thread where the call is made."""

    async def main() -> None:
        called = asyncio.Event()
        rush = EventDebounce(lambda: 0.0, called.set)
        thread = threading.Thread(target=_happens)
        thread.start()
        async with asyncio.timeout(5):
            await called.wait()
        thread.join()
        rush.close()
        assert rush._over

    asyncio.run(main())


def test_what_is_over_or_forgotten_hears_nothing():
    """A dashboard that is closed, collected or without its loop leaves no listener."""
    called: list[int] = []

    async def main() -> None:
        closed = EventDebounce(lambda: 0.0, lambda: called.append(1))
        closed.close()
        forgotten = EventDebounce(lambda: 0.0, lambda: called.append(2))
        del forgotten
        gc.collect()
        assert bus._listeners == ()
        _happens()
        await let_pass(1.0)

    run_virtual(main())

    async def make() -> EventDebounce:
        return EventDebounce(lambda: 0.0, lambda: called.append(3))

    of_a_closed_loop = asyncio.run(make())
    _happens()
    assert of_a_closed_loop._over
    assert called == []


def test_a_child_process_leaves_the_loop_of_its_parent_alone():
    """After a fork, events in the child do not wake the parent's loop."""

    async def main() -> None:
        called: list[int] = []
        rush = EventDebounce(lambda: 0.0, lambda: called.append(1))
        rush._after_fork()
        _happens()
        await let_pass(1.0)
        assert called == []
        rush.close()

    run_virtual(main())
