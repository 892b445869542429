"""What frees a key, what keeps it, and that no failure makes one useless."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from seawall.durable import KeyInFlight, Replay, RequestOutcome, idempotent_request
from seawall.durable.http.completion import IdempotentRequest
from seawall.web.asgi_types import Message
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.completed_support import PAID, Till
from tests.durable.http.support import USER, Shop, edge_of, first, post, said, set_time
from tests.durable.postgres import Postgres


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests that do not depend on it."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


async def posted(app: Any) -> tuple[int, Any, bool]:
    """Send the request; return its status, the reason of a problem, and whether it is the first.

    Also where the app raises, as it does for whoever logs outside.
    """
    sent: list[Message] = []
    with suppress(Exception):
        answer = await post(app, on_send=sent.append)
        problem = answer.headers.get("content-type") == "application/problem+json"
        return answer.status, answer.json()["reason"] if problem else None, first(answer)
    replayed = (b"idempotent-replayed", b"true") in sent[0]["headers"]
    problem = json.loads(sent[1]["body"]) if sent[0]["status"] >= 400 else {}
    return sent[0]["status"], problem.get("reason"), not replayed


# Connections that are dropped


class DroppingTill(Till):
    """A till whose first transaction loses its connection at some stage."""

    stage = ""
    admin: Any = None

    async def _drop(self, stage: str) -> None:
        if stage != self.stage:
            return
        self.stage = ""
        if self.admin is None:
            raise sqlite3.OperationalError("disk I/O error")
        await self.admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE state LIKE 'idle in transaction%'"
        )

    async def take(self, claim: Any) -> Any:
        """Take a payment in one transaction, unless it is dropped."""
        pay = f"INSERT INTO {self.payments} VALUES (100)"  # noqa: S608 - our own
        if self.stage == "connect":
            self.stage = ""
            raise ConnectionRefusedError
        if self.admin is None:
            with self.database.transaction() as conn:
                await self._drop("insert")
                self.database.connection(conn).run(said(pay))
                await self._drop("complete")
                back = claim.complete(conn, PAID)
                await self._drop("commit")
            return back
        async with self.database.atransaction() as conn:
            await self.database.connection(conn).arun(said("SELECT 1"))  # some begin only now
            await self._drop("insert")
            await self.database.connection(conn).arun(said(pay))
            await self._drop("complete")
            back = await claim.acomplete(conn, PAID)
            await self._drop("commit")
        return back


@pytest.mark.parametrize("keep", [None, range(200, 300)], ids=["default", "successes"])
@pytest.mark.parametrize("stage", ["connect", "insert", "complete", "commit"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "sqlalchemy", "sqlite"])
def test_a_dropped_connection_leaves_its_key_usable(
    driver: str, stage: str, keep: Any, postgres: Postgres, tmp_path: Path
):
    """What was rolled back is done by the next request with the key, and once.

    By default that is known once the handler has called `complete`. A failure before that may come
    after effects of any kind, so it needs `keep=`, by which the route says that there are none.
    """

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            till: Any = await DroppingTill(database).prepare()
            if driver != "sqlite":
                till.admin = await asyncpg.connect(postgres.url)
            till.app.keep = None if keep is None else lambda outcome: outcome.status in keep
            till.stage = stage
            status, reason, is_first = await posted(till.app)
            freed = reason == "not_done"
            assert (status, is_first, await till.paid()) == (500, True, 0)
            if keep is not None or stage == "commit":
                assert freed
            elif stage != "complete":  # not every driver knows by then that it has lost it
                assert not freed
            if freed:
                assert await posted(till.app) == (201, None, True)
                assert await posted(till.app) == (201, None, False)
            else:
                assert await posted(till.app) == (500, "failed", False)
            assert await till.paid() == int(freed)
            if till.admin is not None:
                await till.admin.close()

    asyncio.run(main())


def test_a_commit_whose_acknowledgement_is_lost_is_waited_for(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A COMMIT may still be on its way when the handler fails: the key is not freed before it."""
    monkeypatch.setattr(
        IdempotentRequest, "_is_open", lambda _self: False
    )  # as of a lost connection

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            till = await Till(database).prepare()
            late: list[asyncio.Task[None]] = []

            async def commit(connection: Any, transaction: Any, admin: Any) -> None:
                blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                while not await admin.fetchval(blocked):
                    pass  # the wait is the query's
                await transaction.commit()
                await connection.close()
                await admin.close()

            async def loses(scope: Any, _receive: Any, _send: Any) -> None:
                till.runs += 1
                connection = await asyncpg.connect(postgres.url)
                admin = await asyncpg.connect(postgres.url)
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute(f"INSERT INTO {till.payments} VALUES (100)")  # noqa: S608
                await idempotent_request(scope, required=True).acomplete(connection, PAID)
                late.append(asyncio.create_task(commit(connection, transaction, admin)))
                raise ConnectionResetError("COMMIT: no answer")

            till.app.app = loses
            status, reason, _ = await posted(till.app)
            assert (status, reason) != (500, "not_done")
            await asyncio.gather(*late)
            answer = await post(till.app)
            assert (answer.status, answer.body, first(answer)) == (201, b"paid", False)
            assert (till.runs, await till.paid()) == (1, 1)

    asyncio.run(main())


def test_a_key_that_cannot_be_freed_is_not_called_free(
    quick: Opening, monkeypatch: pytest.MonkeyPatch
):
    """The database goes away after the look at the record: 503, and the key is in flight."""

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()

            async def away(*_claim: Any) -> bool:
                raise ConnectionRefusedError

            async def fail() -> None:
                raise ValueError("no money")

            till.inside = fail
            monkeypatch.setattr(till.idempotency, "aabandon", away)
            assert await posted(till.app) == (503, "store_unavailable", True)
            assert (await post(till.app)).status == 409

    asyncio.run(main())


# What `keep=` says


def test_statuses_that_are_kept(quick: Opening):
    """With `keep=` as statuses all others free the key, also of what is raised."""

    async def break_down(shop: Shop) -> None:
        if shop.status == 500:
            raise RuntimeError("broken")

    shop = Shop(more=break_down)

    async def main() -> None:
        async with edge_of(quick, shop, keep={201, 404}) as app:
            shop.status = 500
            assert await posted(app) == await posted(app) == (500, "not_done", True)
            shop.status = 202
            assert await posted(app) == await posted(app) == (202, None, True)
            shop.status = 404
            assert await posted(app) == (404, None, True)
            assert await posted(app) == (404, None, False)
            assert len(shop.orders) == 5
            assert app.snapshot()["abandoned"] == 4

    asyncio.run(main())


def test_a_function_decides_what_is_kept(quick: Opening, caplog: pytest.LogCaptureFixture):
    """It sees the outcome; None is for the default, and an error in it must not free the key."""
    seen: list[RequestOutcome] = []
    said: list[Any] = [False, None, None]

    def keep(outcome: RequestOutcome) -> bool | None:
        seen.append(outcome)
        found: bool | None = said.pop(0)
        return found

    shop = Shop(headers=[(b"x-a", b"b")])

    async def main() -> None:
        async with edge_of(quick, shop, keep=keep) as app:
            assert await posted(app) == (201, None, True)
            shop.status = 404
            assert await posted(app) == (404, None, True)
            shop.status = 500
            assert await posted(app) == (500, None, True)
            assert await posted(app) == (500, None, False)
            answers = [await post(app, "/orders", ("idempotency-key", "b"), USER) for _ in range(2)]
            assert [first(answer) for answer in answers] == [True, False]

    with caplog.at_level(logging.ERROR, "seawall"):
        asyncio.run(main())
    assert [outcome.status for outcome in seen] == [201, 404, 500, 500]
    assert seen[0] == RequestOutcome(201, [(b"x-a", b"b")])
    assert "IndexError" in caplog.text


def test_a_function_sees_what_was_raised_and_rolled_back(quick: Opening):
    """With the default in its place: a handler may be told apart from what it calls."""
    seen: list[RequestOutcome] = []

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()

            async def fail() -> None:
                raise ValueError("no money")

            till.app.keep = seen.append  # type: ignore[assignment]
            till.inside = fail
            await posted(till.app)
            till.inside, till.before = Till(database).inside, fail
            await posted(till.app)

    asyncio.run(main())
    assert [(o.status, type(o.error), o.rolled_back) for o in seen] == [
        (500, ValueError, True),
        (500, ValueError, False),
    ]


# What an operator forgets


def test_a_forgotten_key_is_carried_out_again(opening: Opening):
    """`forget` removes what was kept, of that caller, operation and key alone."""
    shop = Shop(status=500)

    async def main() -> None:
        async with edge_of(opening, shop, scope=lambda i: ("acme", i.header("x-user"))) as app:
            await post(app)
            assert not await app.aforget(("acme", "bob"), "POST /orders", "8e03978e-40d5")
            assert not await app.aforget(("acme", "ann"), "POST /pay", "8e03978e-40d5")
            assert not await app.aforget(("acme", "ann"), "POST /orders", "another")
            assert not first(await post(app))
            assert await app.aforget(("acme", "ann"), "POST /orders", "8e03978e-40d5")
            assert not await app.aforget(("acme", "ann"), "POST /orders", "8e03978e-40d5")
            shop.status = 201
            assert await posted(app) == (201, None, True)
            assert app.idempotency.snapshot()["forgotten"] == 1

    asyncio.run(main())


def test_what_is_in_flight_is_not_forgotten(opening: Opening):
    """Somebody is at it; when its lease is over it may be forgotten, and its owner is refused."""

    async def main() -> None:
        async with opening() as database:
            till = await Till(database).prepare()
            await set_time(database, 0)
            found: Any = await till.idempotency.areserve("ann", "pay", "k", b"")
            with pytest.raises(KeyInFlight) as caught:
                await till.idempotency.aforget("ann", "pay", "k")
            assert caught.value.retry_after == 30.0
            await set_time(database, 31)
            assert await till.idempotency.aforget("ann", "pay", "k")
            assert not await till.idempotency.acomplete(found.claim, 1)

    asyncio.run(main())


def test_forgetting_while_blocking(quick: Opening):
    """The twin for code that does not await."""

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()
            found: Any = till.idempotency.reserve("ann", "pay", "k", b"")
            till.idempotency.complete(found.claim, 1)
            assert isinstance(till.idempotency.reserve("ann", "pay", "k", b""), Replay)
            assert till.app.forget("ann", "pay", "k")
            assert not till.idempotency.forget("ann", "pay", "k")

    asyncio.run(main())
