"""Requests that are cancelled, and handlers that outlive their lease."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from seawall import CircuitOpen
from seawall.clock import current_clock
from seawall.context import deadline_var
from seawall.durable.http import request as _asgi_request
from seawall.durable.http.middleware import IdempotentRequests
from seawall.durable.idempotency import lease_renewal as _uncut
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.lease_renewal import LeaseRenewal, uninterrupted
from seawall.models.idempotency import Fresh
from seawall.testing import run_virtual
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import Shop, edge_of, post, set_time, user
from tests.durable.postgres import Postgres
from tests.support import let_pass


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


# Cancellation


def test_a_cancelled_request_stays_pending_until_its_lease_is_over(quick: Opening):
    """The effect may have happened, so nobody runs at once; after the lease the next one does."""

    async def main() -> None:
        async with quick() as database:
            await set_time(database, 0)
            never = asyncio.Event()

            async def hold(shop: Shop) -> None:
                if len(shop.orders) == 1:
                    await never.wait()

            shop = Shop(more=hold)
            app = IdempotentRequests(shop, Idempotency(database), routes=["/orders"], scope=user)
            asked = asyncio.create_task(post(app))
            await shop.busy.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert (await post(app)).status == 409
            await set_time(database, 31)
            assert (await post(app)).status == 201
            assert len(shop.orders) == 2

    asyncio.run(main())


class CancelledAt:
    """Awaits something, and is cancelled when it waits for the nth time."""

    def __init__(self, nth: int, work: Any) -> None:
        self._left = nth
        self._work = work

    def __await__(self) -> Any:
        """Pass on what is waited for, and what comes of it."""
        inner = self._work.__await__()
        step, value = inner.send, None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if not self._left:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
            try:
                step, value = inner.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 - as it comes
                step, value = inner.throw, error


def test_a_cancellation_at_any_step_leaves_nothing_stuck(opening: Opening):
    """Cancelled wherever it waits: after the lease at the latest the key is good, no task left."""

    async def main() -> None:
        async with opening() as database:
            await set_time(database, 0)
            shop = Shop(b"a", b"b", more=lambda _shop: let_pass(0))
            app = IdempotentRequests(shop, Idempotency(database), routes=["/orders"], scope=user)
            tasks = asyncio.all_tasks()
            for nth in range(1, 200):
                name = (("idempotency-key", f"k{nth}"), ("x-user", "ann"))

                async def cancelled(nth: int = nth, name: Any = name) -> int:
                    return (await CancelledAt(nth, post(app, "/orders", *name))).status

                asked = asyncio.create_task(cancelled())
                await asyncio.wait([asked])
                assert (await post(app, "/orders", *name)).status in {201, 409}
                await set_time(database, 31 * nth)
                assert (await post(app, "/orders", *name)).status == 201
                assert asyncio.all_tasks() <= tasks
                if not asked.cancelled():
                    break
            assert asked.result() == 201
            assert nth > 2

    asyncio.run(main())


def test_what_is_being_recorded_is_recorded():
    """A cancellation during the last step counts after it; one that hangs is given up in time."""

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), []

        async def write(seconds: float) -> str:
            await let_pass(seconds)
            done.append(seconds)
            return "written"

        assert await uninterrupted(write(1.0)) == "written"
        for seconds, ends in ((3.0, 3.0), (100.0, 1.0 + _uncut.PATIENCE)):
            began = loop.time()
            task = asyncio.ensure_future(uninterrupted(write(seconds)))
            await let_pass(1.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert loop.time() - began == ends
        assert done == [1.0, 3.0]

    run_virtual(main())


def test_what_fails_in_a_cancelled_request_is_seen():
    """An error that nobody waits for any more raises nothing elsewhere."""

    async def main() -> None:
        async def fail() -> None:
            await let_pass(2.0)
            raise RuntimeError

        task = asyncio.ensure_future(uninterrupted(fail()))
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


# Leases


def test_a_lease_is_renewed_while_the_work_goes_on():
    """Every third of it; sooner where the database is away; no more when it is lost or stopped."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began, asked = loop.time(), []
        answers: list[Any] = [True, OSError("away"), True, False]

        async def renew() -> bool:
            asked.append(loop.time() - began)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

        renewal = LeaseRenewal(30.0, renew)
        await let_pass(100.0)
        await renewal.stop()
        assert asked == [10.0, 20.0, 22.5, 32.5]
        short = LeaseRenewal(30.0, renew)
        await let_pass(9.0)
        await short.stop()
        await let_pass(30.0)
        answers.append(True)
        third = LeaseRenewal(30.0, renew)
        await let_pass(15.0)
        await third.stop()
        await third.stop()
        await let_pass(30.0)
        assert len(asked) == 5

    run_virtual(main())


def test_long_work_keeps_its_claim(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """The middleware renews the lease of a handler that takes longer, and of no other."""
    renewed = asyncio.Event()

    async def hold(_shop: Shop) -> None:
        await renewed.wait()

    shop = Shop(more=hold)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            ask_for_more = app.idempotency.arenew

            async def renew(claim: Any) -> bool:
                held = await ask_for_more(claim)
                renewed.set()
                return held

            monkeypatch.setattr(app.idempotency, "arenew", renew)
            app.idempotency.lease = 0.03  # the database's own is as it was
            assert (await post(app)).status == 201
            assert app.snapshot()["refused_late"] == 0

    asyncio.run(main())


# What is recorded when a request is cancelled at its very end


class Slow(Idempotency):
    """Records that take a moment to be written."""

    recording: asyncio.Event

    async def acomplete(self, *args: Any, **options: Any) -> bool:
        """Complete it, a moment later."""
        self.recording.set()
        await let_pass(0.01)
        return await super().acomplete(*args, **options)


async def _cancelled_while_recording(opening: Opening) -> int:
    async with opening() as database:
        slow = Slow(database)
        slow.recording = asyncio.Event()
        app = IdempotentRequests(Shop(), slow, routes=["/orders"], scope=user)
        asked = asyncio.create_task(post(app))
        await slow.recording.wait()
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        return (await post(app)).status


def test_a_request_that_is_cancelled_at_its_end_is_recorded(opening: Opening):
    """The work is done, so that its record is written, whatever becomes of the request."""
    assert asyncio.run(_cancelled_while_recording(opening)) == 201


def test_without_that_it_would_be_done_again(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: cut off while recording, what was done stays pending, and is done again later."""

    async def cut(work: Any) -> Any:
        return await work

    monkeypatch.setattr(_asgi_request, "uninterrupted", cut)
    assert asyncio.run(_cancelled_while_recording(quick)) == 409


# Deadlines


async def _too_late(opening: Opening) -> tuple[int, int, bool]:
    """Let the deadline of a request pass while its handler works; return what is told, and held."""
    held: list[bool] = []

    async def pass_it(_shop: Shop) -> None:
        deadline_var.set([-1.0, current_clock(), None, True])

    async with opening() as database:
        app = IdempotentRequests(
            Shop(more=pass_it), Idempotency(database), routes=["/orders"], scope=user
        )
        told = await post(app)
        deadline_var.set(None)
        found = await app.idempotency.areserve("ann", "a stream", "k", None)
        assert isinstance(found, Fresh)

        async def renew() -> bool:
            try:
                held.append(await app.idempotency.arenew(found.claim))
            finally:
                asked.set()
            return True

        asked = asyncio.Event()
        deadline_var.set([-1.0, current_clock(), None, True])
        renewal = LeaseRenewal(0.003, renew)
        await asked.wait()
        await renewal.stop()
        deadline_var.set(None)
        return told.status, (await post(app)).status, held[:1] == [True]


def test_a_deadline_is_for_the_work(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """When it is over, what was done is recorded all the same, and a stream keeps its lease."""
    opening = opening_by("asyncpg", postgres, tmp_path)
    assert asyncio.run(_too_late(opening)) == (201, 201, True)
    # Ablation: a lease that is renewed only within the deadline is lost.
    monkeypatch.setattr(_uncut, "deadline_var", ContextVar("another"))
    assert asyncio.run(_too_late(opening_by("asyncpg", postgres, tmp_path))) == (201, 201, False)


# Who comes too late


class Lost(Idempotency):
    """Records in a database that is away when somebody asks again."""

    away = False

    async def areserve(self, *args: Any, **options: Any) -> Any:
        """Reserve, unless away."""
        if self.away:
            raise ConnectionRefusedError
        return await super().areserve(*args, **options)


@pytest.mark.parametrize(("away", "status", "again"), [(False, 409, 201), (True, 503, 201)])
def test_a_late_answer_is_never_told_as_if_it_counted(
    quick: Opening,
    away: bool,  # noqa: FBT001 - as drawn
    status: int,
    again: int,
):
    """Who took over has done nothing and gone: the late one is told to ask again."""

    async def main() -> None:
        async with quick() as database:
            await set_time(database, 0)
            late = asyncio.Event()

            async def slow(shop: Shop) -> None:
                shop.status = 404 if len(shop.orders) > 1 else 201
                if len(shop.orders) == 1:
                    await late.wait()
                    shop.status = 201

            shop, records = Shop(more=slow), Lost(database)
            app = IdempotentRequests(shop, records, routes=["/orders"], scope=user)
            zombie = asyncio.create_task(post(app))
            await shop.busy.wait()
            await set_time(database, 31)
            assert (await post(app)).status == 404
            records.away = away
            late.set()
            answer = await zombie
            assert answer.status == status
            assert "retry-after" in answer.headers
            records.away, shop.more = False, None
            shop.status = 201
            assert (await post(app)).status == again
            assert len(shop.orders) == 3

    asyncio.run(main())


@pytest.mark.parametrize("raises", [False, True])
def test_who_was_taken_over_is_told_what_was_done(quick: Opening, raises: bool):  # noqa: FBT001 - as drawn
    """Nothing was done by the late one, since the other had done it: its client is told that."""

    async def main() -> None:
        async with quick() as database:
            await set_time(database, 0)
            late = asyncio.Event()

            async def slow(shop: Shop) -> None:
                if len(shop.orders) == 1:
                    await late.wait()
                    shop.status = 409  # there is such an order
                    if raises:
                        raise CircuitOpen("open", retry_after=3.0)

            shop = Shop(more=slow)
            app = IdempotentRequests(shop, Idempotency(database), routes=["/orders"], scope=user)
            seen: list[Any] = []
            zombie = asyncio.create_task(post(app, on_send=seen.append))
            await shop.busy.wait()
            await set_time(database, 31)
            assert (await post(app)).status == 201
            late.set()
            await asyncio.wait([zombie])
            assert (zombie.exception() is not None) == raises
            assert (seen[0]["status"], seen[1]["body"]) == (201, b'{"order": 1}')
            assert (await post(app)).status == 201
            counts = app.snapshot()
            assert (counts["refused_late"], counts["abandoned"]) == (1, 0)

    asyncio.run(main())
