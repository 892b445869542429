"""A fence at a database: who comes with a token of the past is refused."""

from __future__ import annotations

import asyncio
import threading

import pytest

from seawall.durable import Database, Fence, Sqlite
from seawall.errors import LeaseLost
from tests.leases.sites import AWAITED, Site, run


@pytest.mark.parametrize("site", AWAITED, indirect=True)
def test_a_lower_token_is_refused_on_awaited_connections(site: Site):
    """The same token passes again and again, a lower one never, and resources are apart."""

    async def scenario():
        database = await site.pod()
        fence, other = Fence(database, "reports"), Fence(database, "bills")
        for token in (5, 5, 9):
            async with database.atransaction() as conn:
                await fence.acheck(conn, token)
        async with database.atransaction() as conn:
            with pytest.raises(LeaseLost, match="'reports' has seen token 9: the lease of token 8"):
                await fence.acheck(conn, 8)
            await other.acheck(conn, 1)
        async with database.atransaction() as conn:
            with pytest.raises(TypeError, match="acheck"):
                fence.check(conn, 9)

    run(site, scenario)


@pytest.mark.parametrize("site", ["psycopg", "sqlalchemy", "sqlite"], indirect=True)
def test_a_lower_token_is_refused_on_blocking_connections(site: Site):
    """The same, and what is undone with its transaction was never there."""

    async def scenario():
        database = await site.pod()
        fence = Fence(database, "reports")

        def work():
            with pytest.raises(ZeroDivisionError), database.transaction() as conn:
                raise ZeroDivisionError(fence.check(conn, 100))
            with database.transaction() as conn:
                fence.check(conn, 5)
                with pytest.raises(LeaseLost):
                    fence.check(conn, 4)

        await asyncio.to_thread(work)
        with database.transaction() as conn, pytest.raises(TypeError, match=r"write `fence\.check"):
            await fence.acheck(conn, 9)

    run(site, scenario)


@pytest.mark.parametrize("site", ["psycopg"], indirect=True)
def test_a_later_holder_waits_for_the_transaction_of_an_earlier_one(site: Site):
    """What an earlier holder has checked is committed before a later one passes, never after."""
    order = []

    async def scenario():
        database = await site.pod()
        fence = Fence(database, "reports")
        checked, go_on = threading.Event(), threading.Event()

        def early():
            with database.transaction() as conn:
                fence.check(conn, 1)
                checked.set()
                go_on.wait()
                order.append("early")

        def late():
            checked.wait()
            with database.transaction() as conn:
                fence.check(conn, 2)
                order.append("late")

        threads = [threading.Thread(target=work) for work in (early, late)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(checked.wait)
        threads[1].join(0.2)
        assert order == []
        go_on.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert order == ["early", "late"]

    run(site, scenario)


def test_a_connection_without_a_transaction_is_refused(tmp_path):
    """The check would be committed without what it protects."""
    source = Sqlite(tmp_path / "plain.db")
    database = Database(source, name="fence-plain")
    connection = source.connect()
    with pytest.raises(RuntimeError, match="begin one"):
        Fence(database, "reports").check(connection, 1)
    connection.close()
    database.close()
    source.close()
