"""Workers that do stored calls: they share them, crash, are late, and are stopped."""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import Cache, CircuitOpen, Fallback, Guard
from seawall.clock import VirtualClock
from seawall.context import idempotency_key
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.deferred import DeferredCalls, DeferredCallWorker
from seawall.jobs import worker_loop
from tests.durable.conftest import Opening
from tests.durable.deferred.support import Vendor, at
from tests.support import falsified


def test_a_crashed_worker_is_taken_over_and_refused(opening: Opening):
    """After its lease another does the call; what the first says then is not heard."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
            first = DeferredCallWorker(later, vendor.send, lease=10)
            second = DeferredCallWorker(later, vendor.send, lease=10)
            with idempotency_key("k"):
                await later.astore(1)
            (run,) = await first._claim(1)
            claim = run.claim
            assert await second._claim(1) == []
            await at(database, 9_999_999)
            assert await second._claim(1) == []
            assert not await later.adiscard(claim.id)
            await at(database, 10_000_000)
            assert await second.run_once() == 1
            assert vendor.done == [(1, "", "k", None)]
            assert not await first._change(claim, "renew", lease=10)
            assert await first._succeeded(run, None) == "lost"
            assert await first._failed(run, ConnectionError("late")) == "lost"
            assert (await later.acounts())["done"] == 1

    asyncio.run(main())


def test_a_call_that_kills_its_worker_ends_too(opening: Opening):
    """Where nobody lives to tell how it went, the attempts count nevertheless."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
            worker = DeferredCallWorker(later, vendor.send, lease=1, attempts=2)
            await later.astore(1)
            for crash in (1, 2):
                assert len(await worker._claim(1)) == 1
                await at(database, crash * 1_000_000)
            await worker.run_once()
            (letter,) = await later.adead()
            assert (vendor.done, "nobody reported" in letter.reason) == ([], True)

    asyncio.run(main())


def test_workers_share_the_calls(opening: Opening):
    """Each call is done once, whoever of many workers gets it."""

    async def main() -> None:
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
            await asyncio.gather(*(later.astore(order) for order in range(30)))
            workers = [DeferredCallWorker(later, vendor.send, concurrency=3) for _ in range(4)]

            async def drain(worker: DeferredCallWorker) -> None:
                while await worker.run_once():
                    pass

            await asyncio.gather(*(drain(worker) for worker in workers))
            assert sorted(order for order, *_ in vendor.done) == list(range(30))

    asyncio.run(main())


def test_ordered_calls_wait_for_the_one_before(opening: Opening):
    """The oldest is done first, and what fails holds up all behind it."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor(down=True)
            for order in range(3):
                await later.astore(order)
            worker = DeferredCallWorker(later, vendor.send, ordered=True, backoff=lambda _: 5.0)
            assert await worker.run_once() == 1
            assert await worker.run_once() == 0
            vendor.down = False
            await at(database, 5_000_000)
            while await worker.run_once():
                pass
            assert [order for order, *_ in vendor.done] == [0, 1, 2]

    asyncio.run(main())


def test_running_stopping_and_cancelling(opening: Opening):
    """`run` does what comes until stopped; cancelled, it gives back what it has begun."""

    async def main() -> None:
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
            await later.astore(1)
            worker = DeferredCallWorker(later, vendor.send, poll=0.01)
            running = asyncio.create_task(worker.run())
            while not vendor.done:
                await asyncio.wait([running], timeout=0.01)
            worker.stop()
            await running

            begun, blocked = asyncio.Event(), asyncio.Event()

            async def stuck(_order: int) -> None:
                begun.set()
                await blocked.wait()

            await later.astore(2)
            cancelled = DeferredCallWorker(later, stuck)
            task = asyncio.create_task(cancelled.run())
            await begun.wait()
            with pytest.raises(RuntimeError, match="runs already"):
                await cancelled.run()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cancelled.snapshot()["returned"] == 1
            assert await DeferredCallWorker(later, vendor.send, attempts=1).run_once() == 1
            assert [order for order, *_ in vendor.done] == [1, 2]

    asyncio.run(main())


def test_the_lease_is_prolonged_while_it_runs(opening: Opening):
    """A long call keeps its claim; one that has lost it is stopped."""

    async def main() -> None:
        async with opening() as database:
            later = DeferredCalls(database, "receipts", delay=0)
            ended: list[str] = []
            taken = asyncio.Event()

            async def slow(_order: int) -> None:
                try:
                    await taken.wait()
                    ended.append("well")
                except asyncio.CancelledError:
                    ended.append("stopped")
                    raise

            def claimed_until() -> Any:
                return (yield TextQuery("SELECT max(not_before) FROM {deferred_calls}", {}))[0][0]

            async def prolonged(until: int) -> None:
                while await database.arun(claimed_until) != until:
                    await asyncio.wait([task], timeout=0.01)

            await at(database, 0)
            await later.astore(1)
            worker = DeferredCallWorker(later, slow, lease=0.6)
            task = asyncio.create_task(worker.run_once())
            await prolonged(600_000)
            await at(database, 100_000)
            await prolonged(700_000)
            await at(database, 200_000)
            assert await DeferredCallWorker(later, slow)._claim(1) == []

            def steal() -> Any:
                yield TextQuery("UPDATE {deferred_calls} SET epoch = epoch + 1", {})

            await database.arun(steal)
            assert await task == 1
            assert (ended, worker.snapshot()["lost"]) == (["stopped"], 1)

    asyncio.run(main())


def test_a_cache_does_not_answer_for_it(tmp_path: Path):
    """What was answered before is no effect: a cache in the guard is left out, as fallbacks are."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
    guard = Guard("receipts", Fallback(later), Cache(60.0))
    guard.call(vendor.send_now, 1)
    later.store(1)
    worker = DeferredCallWorker(later, vendor.send_now, guard=guard, poll=0.01)
    asyncio.run(worker.run_once())
    assert len(vendor.done) == 2
    worker.stop()
    worker.run_sync()
    source.close()


def test_an_outage_of_the_database_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Nothing is claimed while it is away; what cannot be told is done again after the lease."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    clock = VirtualClock()
    database = Database(source, name="later", clock=clock)
    migrate(database)
    later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
    later.store(1)
    worker = DeferredCallWorker(later, vendor.send, lease=30.0)
    pauses: list[float] = []

    async def let_pass(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    async def away(*_: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(worker_loop, "sleep_async", let_pass)
    caplog.set_level(logging.CRITICAL, "seawall")
    (run,) = asyncio.run(worker._claim(1))
    with monkeypatch.context() as patch:
        patch.setattr(database, "arun", away)
        assert asyncio.run(worker.run_once()) == 0
        asyncio.run(worker._work(run))
    assert len(vendor.done) == 1
    assert sum(pauses) == pytest.approx(30.0)
    assert worker.snapshot()["done"] == 0
    assert later.counts()["waiting"] == 1
    source.close()


SERIAL = count()
HISTORY = st.lists(
    st.sampled_from(["store", "store", "fail", "refuse", "done", "crash", "die", "time", "time"]),
    max_size=14,
)


class Seen(DeferredCallWorker):
    """A worker that knows of each call which claim is the latest."""

    def __init__(self, *args: Any, fenced: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fenced = fenced
        self.latest: dict[str, int] = {}

    async def _claim(self, free: int) -> list[Any]:
        runs = await super()._claim(free)
        self.latest.update((run.claim.id, run.claim.fence) for run in runs)
        return runs

    async def _room(self, *, once: bool) -> int:
        self._resume_at = float("-inf")
        return await super()._room(once=once)

    async def _change(self, claim: Any, what: str, **more: Any) -> bool:
        if self.fenced:
            told = await super()._change(claim, what, **more)
        else:

            def steps() -> Any:
                text = (
                    "UPDATE {deferred_calls} SET owner = NULL"
                    " WHERE id = :id AND state = 0 RETURNING 1"
                )
                return bool((yield TextQuery(text, {"id": claim.id})))

            told = await self.calls.database.arun(steps)
        assert told is (self.latest.get(claim.id) == claim.fence)
        if told and what.startswith("done"):
            del self.latest[claim.id]
        return told


def none_lost(folder: Path, history: list[str], *, fenced: bool = True) -> None:
    """Let workers do calls well or badly; see that each stored call is somewhere, and done once."""
    source = Sqlite(folder / f"{next(SERIAL)}.db")
    database = Database(source, name=f"history {id(source)}")
    try:
        migrate(database)
        now, done, late, outcome = 0, [], [], "done"
        database._now = "0"
        later = DeferredCalls(database, "receipts", delay=0)

        async def send(order: int) -> None:
            if outcome == "fail":
                raise ConnectionError
            if outcome == "refuse":
                raise CircuitOpen("no", retry_after=0.0)
            done.append(order)

        worker = Seen(later, send, lease=1, backoff=0.0, attempts=100, fenced=fenced)
        for order, what in enumerate(history):
            if what == "store":
                later.store(order)
            elif what == "time":
                now += 1_000_000
                database._now = str(now)
            elif what == "crash":
                late += asyncio.run(worker._claim(1))
            elif what == "die" and late:  # it was not dead after all, and says how it went
                asyncio.run(worker._failed(late.pop(0), ConnectionError("late")))
            elif what in ("fail", "refuse", "done"):
                outcome = what
                asyncio.run(worker.run_once())
        assert len(done) == len(set(done))
        assert len(done) + later.counts()["waiting"] == history.count("store")
    finally:
        database.close()
        source.close()


def test_no_stored_call_is_lost_or_done_twice(tmp_path: Path):
    """Whatever fails, is refused or crashes: each call waits, or is done; the late are refused."""

    @settings(max_examples=20)
    @given(HISTORY)
    def check(history: list[str]) -> None:
        none_lost(tmp_path, history)

    check()
    assert falsified(lambda case: none_lost(tmp_path, case, fenced=False), HISTORY)
