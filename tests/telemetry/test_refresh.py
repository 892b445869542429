from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import seawall
from seawall import registry
from seawall.durable import Database, DeferredCalls, Jobs, Outbox, Sqlite, migrate
from seawall.telemetry import Refresher, arefresh
from seawall.testing import run_virtual
from tests.support import let_pass
from tests.telemetry.world import World


class Kept:
    """Something whose state a store knows."""

    def __init__(self, name: str, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.asked = self.cancelled = 0
        self.most = self.now = 0
        self._seconds, self._error = seconds, error
        registry.enter(self, "kept", name, ask="ask", local=False)

    async def ask(self) -> None:
        self.asked += 1
        try:
            await let_pass(self._seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        registry.answered(self, {"waiting": self.asked})


def _shown(name: str) -> dict[str, Any]:
    (found,) = [one for one in seawall.snapshot()["kept"] if one["name"] == name]
    return found


def test_the_database_is_asked_for_what_waits_there(world: World):
    """Outbox, jobs and calls for later have their numbers and ages."""
    assert asyncio.run(arefresh(world.outbox, world.jobs, world.later)) == 3
    shown = seawall.snapshot()
    (outbox,) = [one for one in shown["outbox"] if one["name"] == "w-outbox"]
    assert outbox["stored"]["pending"] == 1
    assert outbox["stored"]["blocked"] == 0
    (jobs,) = [one for one in shown["jobs"] if one["name"] == "w-jobs"]
    assert jobs["stored"]["queued"][0] == 1


@pytest.mark.parametrize("kind", [Outbox, Jobs, DeferredCalls])
def test_who_watches_does_not_open_a_database_again(kind: Any, tmp_path: Path):
    """What is in one that was closed is asked only where somebody names it."""
    file = Sqlite(tmp_path / "closed.db")
    database = Database(file, name="closed")
    migrate(database)
    thing = kind(database, name="closed")
    asyncio.run(arefresh())
    (entry,) = [entry for one, entry in registry.entered() if one is thing]
    assert entry.answer is not None
    entry.answer = None
    database.close()
    assert database.closed
    asyncio.run(arefresh())
    assert entry.answer is None
    assert asyncio.run(arefresh(thing)) == 1
    assert entry.answer is not None
    file.close()


def test_whoever_asks_makes_it_known(world: World):
    """A dispatcher surveys its outbox anyway: nobody else has to."""
    registry.enter(world.outbox, "outbox", "w-outbox", ask="asurvey", local=False)
    asyncio.run(world.workers[0]._survey_and_clean())
    (outbox,) = [one for one in seawall.snapshot()["outbox"] if one["name"] == "w-outbox"]
    assert outbox["stored"] == world.workers[0].snapshot()["survey"]


def test_a_question_that_fails_or_takes_long_hides_no_other():
    """Each has its time, and what was known before stays known."""
    slow, bad, good = Kept("slow", 60.0), Kept("bad", error=OSError("gone")), Kept("good", 1.0)
    registry.answered(bad, {"waiting": 7})

    assert run_virtual(arefresh(slow, bad, good, timeout=2.0)) == 1
    assert slow.cancelled == 1
    assert _shown("slow")["stored_error"] == "no answer within 2 s"
    assert _shown("bad")["stored_error"] == "OSError: gone"
    assert _shown("bad")["stored"] == {"waiting": 7}
    assert _shown("good")["stored"] == {"waiting": 1}
    assert "stored_error" not in _shown("good")


def test_few_are_asked_at_once():
    """A hundred queues are no flood for their store."""
    now = most = 0

    class Counted(Kept):
        async def ask(self) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await super().ask()
            now -= 1

    kept = [Counted(f"many {number}", 1.0) for number in range(30)]
    assert run_virtual(arefresh(*kept)) == 30
    assert most == 8


def test_cancelled_it_ends_and_leaves_nothing():
    """Questions under way are given up with it."""
    kept = Kept("left", 60.0)

    async def main() -> None:
        asking = asyncio.create_task(arefresh(kept, timeout=100.0))
        await let_pass(1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert kept.cancelled == 1


def test_what_has_nothing_to_ask_for_is_refused():
    """With what to pass instead."""
    with pytest.raises(TypeError, match="pass an Outbox, Jobs, DeferredCalls or PriorityQueue"):
        asyncio.run(arefresh(object()))


def test_a_refresher_asks_again_and_again_until_closed():
    """At once, then after each pause; closed, no more."""
    kept = Kept("again")

    async def main() -> None:
        refresher = Refresher(every=15.0)
        async with refresher:
            with pytest.raises(RuntimeError, match="make another Refresher"):
                await refresher.__aenter__()
            await let_pass(31)
        asked = kept.asked
        assert asked == 3
        await let_pass(60)
        assert kept.asked == asked
        await refresher.aclose()

    run_virtual(main())
