"""Workers whose database hangs, forgets to answer, or brings back what was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from seawall import subscribe
from seawall.context import idempotency_key, tenant
from seawall.durable import Database, Sqlite, migrate
from seawall.durable import deferred as deferred_worker
from seawall.durable.deferred import DeferredCalls, DeferredCallWorker
from seawall.events import JobDied
from seawall.jobs import worker_loop
from tests.durable.conftest import Opening
from tests.durable.deferred.support import Vendor, at


def test_one_that_is_revived_does_not_overtake_the_one_at_work(opening: Opening):
    """Ordered calls are done one at a time, also where an older one comes back meanwhile."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor(down=True)
            worker = DeferredCallWorker(later, vendor.send, ordered=True, attempts=1, lease=10)
            for order in range(2):
                await later.astore(order)
            await worker.run_once()
            (at_work,) = await worker._claim(1)
            assert await later.aretry((await later.adead())[0].id)
            assert await worker._claim(1) == []
            await worker._succeeded(at_work, None)
            (revived,) = await worker._claim(1)
            assert revived.claim.payload[0] < at_work.claim.payload[0]

    asyncio.run(main())


def test_a_word_that_got_lost_is_said_again(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """The commit of a dead letter is not acknowledged: it is told nevertheless, and once."""

    async def main() -> None:
        told: list[JobDied] = []
        stop = subscribe(told.append, JobDied)
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor(down=True)
            worker = DeferredCallWorker(later, vendor.send, attempts=1)
            change, lost = worker._change, iter([True, False, True, False])

            async def unheard(*args: Any, **more: Any) -> bool:
                done = await change(*args, **more)
                if next(lost):
                    raise ConnectionError("the commit was not acknowledged")
                return done

            async def no_time(_seconds: float) -> None: ...

            monkeypatch.setattr(worker, "_change", unheard)
            monkeypatch.setattr(worker_loop, "sleep_async", no_time)
            await later.astore(1)
            await worker.run_once()
            assert [event.cause for event in told] == ["ConnectionError: no route"]
            vendor.down = False
            with idempotency_key("k"):
                await later.astore(2)
            await worker.run_once()
            counts = worker.snapshot()
            assert (counts["dead"], counts["done"], counts["lost"]) == (1, 1, 0)
        stop()

    asyncio.run(main())


def test_a_database_that_hangs_ends_the_claim_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A call whose lease cannot be prolonged is stopped at its end, whenever that is heard."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later = DeferredCalls(database, "receipts", delay=0)
    later.store(1)
    stopped: list[int] = []

    async def main() -> None:
        never = asyncio.Event()

        async def slow(order: int) -> None:
            try:
                await never.wait()
            finally:
                stopped.append(order)

        async def hangs(*_: Any, **__: Any) -> bool:
            await never.wait()
            return True

        worker = DeferredCallWorker(later, slow, lease=0.1)
        monkeypatch.setattr(worker, "_change", hangs)
        await worker.run_once()
        assert worker.snapshot()["lost"] == 1

    asyncio.run(main())
    assert stopped == [1]
    source.close()


def test_a_worker_removes_what_is_over(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """A running worker removes calls that are done and past their time."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0, ttl=1), Vendor()
            monkeypatch.setattr(deferred_worker, "CLEAN_EVERY", 0.01)
            for order in range(3):
                with idempotency_key(str(order)):
                    await later.astore(order)
            worker = DeferredCallWorker(later, vendor.send, poll=0.01)
            await worker.run_once()
            assert (await later.acounts())["done"] == 3
            await at(database, 1_000_000)
            running = asyncio.create_task(worker.run())
            while (await later.acounts())["done"]:
                await asyncio.wait([running], timeout=0.01)
            worker.stop()
            await running

    asyncio.run(main())


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as one does who did not think of async functions."""

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def test_what_a_plain_function_returns_is_awaited(opening: Opening):
    """A call whose function only looks plain is done, in its context, before it is told as done."""

    async def main() -> None:
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor(down=True)
            with idempotency_key("k"), tenant("t"):
                await later.astore(17)
            worker = DeferredCallWorker(later, timed(vendor.send), backoff=0.0)
            assert await worker.run_once() == 1
            assert (worker.snapshot()["failed"], worker.snapshot()["done"]) == (1, 0)
            vendor.down = False
            assert await worker.run_once() == 1
            assert vendor.done == [(17, "", "k", "t")]
            assert worker.snapshot()["done"] == 1

    asyncio.run(main())


def test_what_a_plain_function_returns_is_stopped_with_its_claim(opening: Opening):
    """The lease is prolonged while it is awaited; if that is lost, it does not go on."""

    async def main() -> None:
        async with opening() as database:
            later = DeferredCalls(database, "receipts", delay=0)
            ended: list[str] = []
            asked: list[str] = []

            async def slow(_order: int) -> None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ended.append("stopped")
                    raise

            worker = DeferredCallWorker(later, timed(slow), lease=0.1)

            async def stolen(_claim: Any, what: str, **_: Any) -> bool:
                asked.append(what)
                return len(asked) < 3

            worker._change = stolen  # type: ignore[method-assign]
            await later.astore(1)
            await worker.run_once()
            assert (asked, ended) == (["renew"] * 3, ["stopped"])
            assert worker.snapshot()["lost"] == 1

    asyncio.run(main())


def test_a_plain_function_that_raises_stop_iteration_has_failed(opening: Opening):
    """No future can hold it: it is told as another error, and the worker goes on."""

    async def main() -> None:
        async with opening() as database:
            later = DeferredCalls(database, "receipts", delay=0)
            await later.astore(1)

            def nothing(_order: int) -> Any:
                return next(iter(()))

            worker = DeferredCallWorker(later, nothing, attempts=1)
            async with asyncio.timeout(10):
                await worker.run_once()
            (letter,) = await later.adead()
            assert letter.reason == "RuntimeError: coroutine raised StopIteration"

    asyncio.run(main())
