"""Effects on Django's own connection: they are committed or rolled back with `atomic()`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from seawall.durable import (
    Database,
    Dispatcher,
    DjangoAlias,
    Idempotency,
    Inbox,
    Jobs,
    JobWorker,
    Outbox,
    migrate,
)
from seawall.errors import KeyReused
from tests.support import let_pass


class Shop:
    """What a view does: an effect of each kind, with rows of its own."""

    def __init__(self, database: Database) -> None:
        source = database.source
        assert isinstance(source, DjangoAlias)
        self.database = database
        self.alias = source.alias
        self.outbox = Outbox(database)
        self.inbox = Inbox(database)
        self.jobs = Jobs(database)
        self.idempotency = Idempotency(database)
        self.table = f'"orders {database.name.removeprefix("django ")}"'

    @property
    def connection(self) -> Any:
        """Django's connection of this thread."""
        return self.database.source.connection

    def orders(self) -> int:
        """Return how many orders are committed."""
        with self.connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {self.table}")  # noqa: S608 - our own name
            return int(cursor.fetchone()[0])

    def order(self, key: str = "k1", fingerprint: str = "hat") -> bool:
        """Place an order once; return whether this was the first time."""
        conn = self.connection
        with self.idempotency.once(
            conn, scope="acme", operation="order", key=key, fingerprint=fingerprint
        ) as once:
            if once.first:
                with conn.cursor() as cursor:
                    cursor.execute(f"INSERT INTO {self.table} VALUES (7)")  # noqa: S608
                self.outbox.add(conn, "order", 7, "order.made", {"total": 30})
                self.jobs.submit(conn, "invoice", {"order": 7}, scope="acme")
                once.answer({"order": 7})
        return once.first

    def told(self) -> list[Any]:
        """Deliver all events; return their payloads."""
        heard: list[Any] = []

        async def deliver() -> None:
            dispatcher = Dispatcher(self.outbox, lambda event: heard.append(event.json()))
            await dispatcher.run_once()

        asyncio.run(deliver())
        return heard

    def counts(self) -> dict[str, int]:
        """Return how many jobs there are, by state."""
        return {state: count for state, (count, _age) in self.jobs.counts().items() if count}


@pytest.fixture
def shop(database: Database) -> Shop:
    return Shop(database)


def test_what_an_atomic_block_writes_is_committed_with_it(shop: Shop) -> None:
    """The order, its event, its job and its key: all at once."""
    with transaction.atomic(using=shop.alias):
        assert shop.order()
    assert shop.orders() == 1
    assert shop.told() == [{"total": 30}]
    assert sum(shop.counts().values()) == 1
    with transaction.atomic(using=shop.alias):
        assert not shop.order()
    assert shop.orders() == 1
    with pytest.raises(KeyReused), transaction.atomic(using=shop.alias):
        shop.order(fingerprint="coat")


def test_what_an_atomic_block_writes_is_gone_when_it_is_rolled_back(shop: Shop) -> None:
    """No order, no event, no job, and the key is free."""

    @transaction.atomic(using=shop.alias)
    def fail() -> None:
        assert shop.order()
        with shop.inbox.once(shop.connection, "billing", "m1") as first:
            assert first
        raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert (shop.orders(), shop.told(), shop.counts()) == (0, [], {})
    assert shop.idempotency.lookup("acme", "order", "k1") is None
    assert not shop.inbox.seen("billing", "m1")
    with transaction.atomic(using=shop.alias):
        assert shop.order()
    assert shop.orders() == 1


def test_a_savepoint_that_is_rolled_back_takes_its_effects_with_it(shop: Shop) -> None:
    """An inner `atomic()` fails, the outer one is committed."""

    @transaction.atomic(using=shop.alias)
    def fail() -> None:
        shop.order()
        raise LookupError

    with transaction.atomic(using=shop.alias):
        with pytest.raises(LookupError):
            fail()
        assert shop.order("k2")
    assert shop.orders() == 1
    assert shop.told() == [{"total": 30}]
    assert shop.idempotency.lookup("acme", "order", "k1") is None


def test_rollback_set_by_hand_takes_the_effects_with_it(shop: Shop) -> None:
    """`set_rollback(True)` is how Django's own views give up without an exception."""
    with transaction.atomic(using=shop.alias):
        shop.order()
        transaction.set_rollback(True, using=shop.alias)
    assert (shop.orders(), shop.told()) == (0, [])


@pytest.mark.parametrize(
    "write",
    [
        lambda shop: shop.outbox.add(shop.connection, "order", 7, "order.made", {}),
        lambda shop: shop.order(),
        lambda shop: shop.inbox.once(shop.connection, "billing", "m1").__enter__(),
    ],
)
def test_without_atomic_nothing_is_written(shop: Shop, write: Callable[[Shop], Any]) -> None:
    """Each statement would be committed by itself."""
    with pytest.raises(RuntimeError, match="has no transaction: begin one"):
        write(shop)
    assert shop.told() == []


def test_a_transaction_of_its_own_does_not_join_that_of_the_view(shop: Shop) -> None:
    """It would be rolled back with it, though its result was returned as committed."""
    with transaction.atomic(using=shop.alias), pytest.raises(RuntimeError, match="atomic"):
        shop.idempotency.reserve("acme", "pay", "k", "x")


def test_with_autocommit_off_a_transaction_of_its_own_is_refused(shop: Shop) -> None:
    """Django's `atomic()` would not commit it, and nobody would notice."""
    connection = shop.connection
    connection.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit is off"), shop.database.transaction():
            raise AssertionError
        with pytest.raises(RuntimeError, match="autocommit is off"):
            migrate(shop.database)
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    with shop.database.transaction() as begun:
        assert begun.in_atomic_block


def test_threads_of_ours_leave_no_connection_behind(shop: Shop) -> None:
    """Nobody tells Django that they are done, as it is told at the end of a request."""
    left: list[Any] = []

    async def main() -> None:
        await shop.jobs.asubmit(None, "invoice", {"order": 7}, scope="acme")
        left.append(await asyncio.to_thread(lambda: shop.connection.connection))

    asyncio.run(main())
    assert left == [None]
    assert sum(shop.counts().values()) == 1


def test_migrating_again_does_nothing(shop: Shop) -> None:
    """Any process may do it at every start."""
    assert migrate(shop.database) == []


def test_a_worker_executes_jobs_on_djangos_connections(shop: Shop) -> None:
    """In threads, each of which has a connection of its own."""
    done: list[Any] = []
    with transaction.atomic(using=shop.alias):
        shop.order()

    async def main() -> None:
        worker = JobWorker(shop.jobs, {"invoice": lambda job: done.append(job.payload)})
        running = asyncio.ensure_future(worker.run())
        while not done:
            await let_pass(0.01)
        worker.stop(5.0)
        await running

    asyncio.run(main())
    assert done == [{"order": 7}]


def test_the_proxy_that_django_calls_connection_is_accepted(shop: Shop) -> None:
    """`from django.db import connection` is what views import."""
    from django.db import connections
    from django.utils.connection import ConnectionProxy

    proxy = ConnectionProxy(connections, shop.alias)
    with transaction.atomic(using=shop.alias):
        shop.outbox.add(proxy, "order", 7, "order.made", {"total": 1})
    assert shop.told() == [{"total": 1}]


@pytest.mark.parametrize("bad", ["", None, 7])
def test_an_alias_is_a_name(bad: Any) -> None:
    """The error says what to write."""
    with pytest.raises(TypeError, match="such as 'default'"):
        DjangoAlias(bad)
