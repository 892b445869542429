"""A database that is away or crashes, and a worker that dies, while a request is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seawall.durable.http import request as _asgi_request
from seawall.durable.http.middleware import IdempotentRequests, idempotent_request
from seawall.durable.idempotency.idempotency import Idempotency
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import Shop, edge_of, first, post, said, set_time, user
from tests.durable.postgres import Postgres


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


# A database that is away


class Away(Idempotency):
    """Records in a database that is away now and then."""

    fails: dict[str, int]

    def _fail(self, what: str) -> None:
        if self.fails.get(what):
            self.fails[what] -= 1
            raise ConnectionRefusedError(what)

    async def areserve(self, *args: Any, **options: Any) -> Any:
        """Reserve, unless away."""
        self._fail("reserve")
        return await super().areserve(*args, **options)

    async def acomplete(self, *args: Any, **options: Any) -> bool:
        """Complete; and lose the word of that, if told to."""
        self._fail("complete")
        done = await super().acomplete(*args, **options)
        self._fail("word")
        return done

    async def aabandon(self, *args: Any, **options: Any) -> bool:
        """Abandon, unless away."""
        self._fail("abandon")
        return await super().aabandon(*args, **options)


@pytest.mark.parametrize(
    ("fails", "status", "again", "orders"),
    [
        ({"reserve": 1}, 503, 201, 1),
        ({"complete": 1}, 201, 201, 1),
        ({"complete": 3}, 201, 201, 1),
        ({"complete": 4}, 503, 409, 1),
        ({"word": 1}, 201, 201, 1),
        ({"word": 4}, 503, 201, 1),
    ],
)
def test_nothing_is_done_or_told_without_a_record(
    opening: Opening,
    monkeypatch: pytest.MonkeyPatch,
    fails: dict[str, int],
    status: int,
    again: int,
    orders: int,
):
    """A database that is away: 503, and never a second execution within the lease."""
    monkeypatch.setattr(_asgi_request, "PAUSES", (0.0, 0.0, 0.0))

    async def main() -> None:
        async with opening() as database:
            away = Away(database)
            away.fails = dict(fails)
            shop = Shop()
            app = IdempotentRequests(shop, away, routes=["/orders"], scope=user)
            answer = await post(app)
            assert answer.status == status
            assert first(answer)
            if status == 503:
                assert answer.json()["reason"] == "store_unavailable"
                assert "retry-after" in answer.headers
            assert (await post(app)).status == again
            assert len(shop.orders) == orders

    asyncio.run(main())


def test_a_refusal_stands_where_the_claim_cannot_be_given_back(quick: Opening):
    """The answer is the app's; the next one has to wait for the lease."""

    async def main() -> None:
        async with quick() as database:
            away = Away(database)
            away.fails = {"abandon": 1}
            app = IdempotentRequests(Shop(status=404), away, routes=["/orders"], scope=user)
            assert (await post(app)).status == 404
            assert (await post(app)).status == 409

    asyncio.run(main())


# A server that crashes meanwhile


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_database_that_crashes_meanwhile_has_the_record(
    driver: str, postgres: Postgres, tmp_path: Path
):
    """PostgreSQL is stopped in immediate mode while the handler runs: once done, and recorded."""

    async def crash(_shop: Shop) -> None:
        await asyncio.to_thread(postgres.crash_and_restart)

    async def main() -> None:
        shop = Shop(more=crash)
        async with edge_of(opening_by(driver, postgres, tmp_path), shop) as app:
            answer = await post(app)
            assert (answer.status, first(answer)) == (201, True)
            again = await post(app)
            assert (again.status, first(again)) == (201, False)
            assert len(shop.orders) == 1

    asyncio.run(main())


# The effect in a transaction of its own


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_with_once_inside_the_effect_happens_once(
    driver: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """A worker that dies after its commit and before its record: the next one finds it done."""
    postgres = None if driver == "sqlite" else request.getfixturevalue("postgres")

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            await set_time(database, 0)
            orders = database.names.table("orders")
            await database.arun(lambda: said(f"CREATE TABLE {orders} (id integer)"))
            insert = f"INSERT INTO {orders} VALUES (1)"  # noqa: S608 - our own
            records, runs = Idempotency(database), 0

            async def take(name: Any) -> Any:
                if driver == "sqlite":
                    with database.transaction() as raw, records.once(raw, **name) as once:
                        if once.first:
                            raw.execute(insert)
                            once.answer("taken")
                        return once.value
                async with database.atransaction() as raw, records.once(raw, **name) as once:
                    if once.first:
                        await raw.execute(insert)
                        once.answer("taken")
                    return once.value

            async def app(scope: Any, _receive: Any, send: Any) -> None:
                nonlocal runs
                runs += 1
                answer = await take(idempotent_request(scope).part("order"))  # type: ignore[union-attr]
                if runs == 1:
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await asyncio.Event().wait()
                await send({"type": "http.response.start", "status": 201, "headers": []})
                await send({"type": "http.response.body", "body": answer.encode()})

            middleware = IdempotentRequests(app, records, routes=["/orders"], scope=user)
            await asyncio.wait([asyncio.ensure_future(post(middleware))])
            assert (await post(middleware)).status == 409
            await set_time(database, 31)
            answer = await post(middleware)
            assert (answer.status, answer.body, runs) == (201, b"taken", 2)
            rows = await database.arun(lambda: said(f"SELECT id FROM {orders}"))  # noqa: S608 - our own
            assert rows == [(1,)]

    asyncio.run(main())
