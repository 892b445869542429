"""A call that cannot be done now is stored, and done when its dependency is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seawall import Breaker, Fallback, Guard, subscribe
from seawall.context import idempotency_key, tenant
from seawall.durable import Database, Sqlite, migrate
from seawall.durable import deferred as deferred_worker
from seawall.durable.deferred import (
    DeferredCall,
    DeferredCalls,
    DeferredCallWorker,
    executing_queues,
)
from seawall.errors import DeferredCallsFull
from seawall.events import JobDied
from tests.durable.conftest import Opening
from tests.durable.deferred.support import Vendor, at
from tests.support import new_guard


def test_a_call_is_stored_and_done_when_the_vendor_is_back(opening: Opening):
    """The caller is answered by `DeferredCall`; later the call is done with its key, and once."""

    async def main() -> None:
        async with opening() as database:
            later = DeferredCalls(database, "receipts", delay=0)
            vendor = Vendor(down=True)
            guard = new_guard(Fallback(later))
            with tenant("acme"), idempotency_key("order 1"):
                result = await guard.aattempt(vendor.send, 1, note="é\0")
                again = await guard.acall(vendor.send, 1, note="é\0")
            stored = result.value
            assert isinstance(stored, DeferredCall)
            assert (result.degraded, stored.degraded, stored.again) == (True, True, False)
            assert again == DeferredCall(stored.id, "receipts", "waiting", again=True)
            await guard.acall(vendor.send, 2)
            assert (await later.acounts())["waiting"] == 2

            worker = DeferredCallWorker(later, vendor.send, guard=guard, backoff=0.0)
            assert await worker.run_once() == 2
            assert vendor.done == []
            assert worker.snapshot()["failed"] == 2
            vendor.down = False
            while await worker.run_once():
                pass
            assert sorted(vendor.done) == [(1, "é\0", "order 1", "acme"), (2, "", None, None)]
            counts = await later.acounts()
            assert (counts["waiting"], counts["done"], counts["dead"]) == (0, 1, 0)
            with tenant("acme"), idempotency_key("order 1"):
                assert (await later.astore(1, note="é\0")).state == "done"
            with idempotency_key("order 1"):
                assert (await later.astore(1, note="é\0")).state == "waiting"
            assert later.snapshot()["again"] == 2

    asyncio.run(main())


def test_it_goes_through_the_guard_without_its_fallback(opening: Opening):
    """A refusal of the breaker costs no attempt, pauses the worker, and is not stored again."""

    async def main() -> None:
        async with opening() as database:
            later = DeferredCalls(database, "receipts", delay=0)
            vendor = Vendor(down=True)
            breaker = Breaker(consecutive=1, break_for=3600)
            guard = new_guard(Fallback(later), breaker)
            send = guard(vendor.send)
            await send(1)
            asked = vendor.asked
            worker = DeferredCallWorker(later, send, attempts=1)
            assert await worker.run_once() == 1
            assert vendor.asked == asked  # the breaker is open: nobody was asked
            snapshot = worker.snapshot()
            assert (snapshot["refused"], snapshot["paused"], snapshot["dead"]) == (1, True, 0)
            assert (await later.acounts())["waiting"] == 1
            assert await worker.run_once() == 0

    asyncio.run(main())


@pytest.mark.parametrize("safe", [True, False], ids=["as it is", "with the fallback"])
def test_with_its_fallback_a_failure_would_look_like_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """The stored call is kept while it fails; through the fallback it would be lost."""
    if not safe:
        monkeypatch.setattr(deferred_worker, "WithoutFallbacks", lambda guard: guard)
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later = DeferredCalls(database, "receipts", delay=0)
    vendor = Vendor(down=True)
    guard = Guard("receipts", Fallback(later, lambda *_, **__: "less"))
    guard.call(vendor.send_now, 1)
    worker = DeferredCallWorker(later, vendor.send_now, guard=guard)
    asyncio.run(worker.run_once())
    assert (later.counts()["waiting"] == 1) is safe
    source.close()


def test_a_plain_function_in_an_event_loop_stores_too(tmp_path: Path):
    """Where nothing can be awaited although a loop runs, the level is `later.store`."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later, vendor = DeferredCalls(database, "receipts"), Vendor(down=True)
    guard = Guard("receipts", Fallback(later.store))

    async def main() -> Any:
        return guard.call(vendor.send_now, 1, note="x")

    assert isinstance(asyncio.run(main()), DeferredCall)
    assert later.counts()["waiting"] == 1
    source.close()


def test_several_calls_under_one_key_are_all_done(opening: Opening):
    """A request's key is shared by its calls: each of them is stored, and each once."""

    async def main() -> None:
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
            with idempotency_key("request"):
                for order in (1, 2, 1, 2):
                    await later.astore(order, note="x")
            assert later.snapshot()["again"] == 2
            await DeferredCallWorker(later, vendor.send).run_once()
            assert sorted(vendor.done) == [(n, "x", "request", None) for n in (1, 2)]

    asyncio.run(main())


@pytest.mark.parametrize("other", [False, True], ids=["the same object", "another of that name"])
def test_a_call_that_is_done_is_not_stored_again(tmp_path: Path, *, other: bool):
    """What fails inside a stored call, by another guard, does not make a second one of it."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later = DeferredCalls(database, "receipts", delay=0)
    vendor = Vendor(down=True)
    inner = Guard("inner", Fallback(DeferredCalls(database, "receipts") if other else later))
    later.store(1)

    def outer(order: int) -> Any:
        return inner.call(vendor.send_now, order)

    worker = DeferredCallWorker(later, outer)
    asyncio.run(worker.run_once())
    assert later.counts()["waiting"] == 1
    assert worker.snapshot()["failed"] == 1
    assert executing_queues.get() == ()
    source.close()


def test_in_the_end_it_is_a_dead_letter(opening: Opening):
    """After the last attempt, at a fatal error, or past its time: dead, told, to be revived."""

    async def main() -> None:
        told: list[JobDied] = []
        stop = subscribe(told.append, JobDied)
        async with opening() as database:
            await at(database, 1_000_000)
            later = DeferredCalls(database, "receipts", delay=0, ttl=100, keep_dead=50)
            vendor = Vendor(down=True)
            worker = DeferredCallWorker(later, vendor.send, attempts=2, backoff=0.0, concurrency=1)
            await later.astore(1, note="x")
            assert await worker.run_once() == 1
            assert await worker.run_once() == 1
            (letter,) = await later.adead()
            assert letter[1:4] == ([[1], {"note": "x"}], 2, "ConnectionError: no route")
            assert letter.traceback.startswith("Traceback (most recent call last):\n  File")
            assert letter.traceback.endswith("\nConnectionError: no route")
            await later.astore(2)
            await at(database, 102_000_000)
            assert await worker.run_once() == 1
            await later.astore(3)
            await DeferredCallWorker(later, vendor.send, give_up_on=ConnectionError).run_once()
            assert [event.cause for event in told] == [
                "ConnectionError: no route",
                "expired",
                "ConnectionError: no route",
            ]
            assert told[0].traceback == letter.traceback
            vendor.down = False
            assert await later.aretry(letter.id)
            assert not await later.aretry(letter.id)
            await worker.run_once()
            assert vendor.done == [(1, "x", None, None)]
            dead = await later.adead()
            assert [d.payload for d in dead] == [[[2], {}], [[3], {}]]
            assert await later.adiscard(dead[1].id)
            assert await later.acleanup() == 0
            await at(database, 160_000_000)
            assert await later.acleanup() == 1
        stop()

    asyncio.run(main())


def test_it_is_bounded(opening: Opening):
    """A full queue refuses, and the caller gets the error of the real call."""

    async def main() -> None:
        async with opening() as database:
            later, vendor = DeferredCalls(database, "receipts", max_waiting=2), Vendor(down=True)
            guard = new_guard(Fallback(later))
            await guard.acall(vendor.send, 1)
            with idempotency_key("k"):
                await guard.acall(vendor.send, 2)
            with pytest.raises(ConnectionError) as caught:
                await guard.acall(vendor.send, 3)
            assert "2 calls are waiting" in str(caught.value.__notes__)
            with idempotency_key("k"):
                assert (await later.astore(2)).again
            with idempotency_key("other"), pytest.raises(DeferredCallsFull):
                await later.astore(3)
            assert later.snapshot()["refused"] == 2
            assert (await later.acounts())["waiting"] == 2

    asyncio.run(main())


def test_a_done_key_is_forgotten_after_its_time(opening: Opening):
    """Within the ttl a key that was done is not stored again; after it, it is."""

    async def main() -> None:
        async with opening() as database:
            await at(database, 0)
            later, vendor = DeferredCalls(database, "receipts", delay=0, ttl=10), Vendor()
            worker = DeferredCallWorker(later, vendor.send)
            with idempotency_key("k"):
                await later.astore(1)
                await worker.run_once()
                assert (await later.astore(1)).state == "done"
                await at(database, 10_000_000)
                assert not (await later.astore(1)).again
                await worker.run_once()
            assert len(vendor.done) == 2
            await at(database, 20_000_000)
            assert await later.acleanup() == 1

    asyncio.run(main())


@pytest.mark.parametrize("call", ["", "7", "[1]", "[1, 2]", "[[], []]", "[" * 100_000])
def test_what_is_stored_may_be_anything(tmp_path: Path, call: str):
    """A call that is none is a dead letter, and does no harm."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
    later.store(1)
    source.run(lambda raw: raw.execute("UPDATE seawall_deferred_calls SET call = ?", [call]))
    asyncio.run(DeferredCallWorker(later, vendor.send).run_once())
    (letter,) = later.dead()
    assert letter[1:5] == (None, 1, "what is stored is no call", "")
    assert later.retry(letter.id)
    assert later.discard(letter.id)
    assert later.cleanup() == 0
    source.close()


def test_what_cannot_be_stored_is_told(tmp_path: Path):
    """Arguments that are no JSON, too large, or a key that is none, are refused at once."""
    source = Sqlite(tmp_path / "deferred_calls.db")
    database = Database(source, name="later")
    migrate(database)
    later = DeferredCalls(database, "receipts", max_size=100)
    for bad in (object(), float("nan"), b"bytes"):
        with pytest.raises(TypeError, match="arguments are JSON"):
            later.store(bad)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        later.store("x" * 100)
    with pytest.raises(ValueError, match="key"):
        DeferredCalls(database, "keyed", key=lambda *_: "a\0").store(1)
    with pytest.raises(TypeError, match="pass a Database"):
        DeferredCalls("deferred_calls.db", "receipts")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass DeferredCalls"):
        DeferredCallWorker(database, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass a Guard"):
        DeferredCallWorker(later, print, guard="mail")  # type: ignore[arg-type]
    assert repr(later) == "DeferredCalls('receipts')"
    assert (
        repr(DeferredCallWorker(later, print))
        == "<DeferredCallWorker of DeferredCalls('receipts')>"
    )
    keyed = DeferredCalls(database, "keyed", key=lambda order: f"order {order}")
    assert not keyed.store(1).again
    assert keyed.store(1).again
    source.close()
