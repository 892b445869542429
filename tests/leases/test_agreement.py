"""The SQL of leases and the pure model: the same history gives the same answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import given

from seawall.durable.database import statements as _sql
from seawall.durable.database.connections import TextQuery, connection_of
from seawall.durable.database.leases import _command_steps
from seawall.durable.database.migrations import migrations
from seawall.durable.database.statements import TableNames, statements
from seawall.leases.store import Command, Take
from seawall.models.lease import Busy, LeaseGranted
from tests.durable.postgres import Postgres
from tests.leases.harness import COMMANDS, Answers, History, check_agreement
from tests.support import examples, falsified

_serial = count()


@pytest.fixture(params=["sqlite", "postgres"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Return each database in turn."""
    return request.param


@pytest.fixture
def new_lease(dialect: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Answers]]:
    """Return a function that makes a lease on one connection; each answers a command at a time."""
    names = TableNames(None, f"agree{next(_serial)}_")
    if dialect == "sqlite":
        raw: Any = sqlite3.connect(":memory:", isolation_level=None)
    else:
        server: Postgres = request.getfixturevalue("postgres")
        raw = psycopg.connect(server.url, autocommit=True)

    def make_tables() -> Any:
        (step,) = [step for step in migrations(dialect) if step.name == "leases"]
        for text in step.statements:
            yield TextQuery(text, {})
        yield TextQuery("CREATE TABLE {test_clock} (us bigint NOT NULL)", {})
        yield TextQuery("INSERT INTO {test_clock} VALUES (1)", {})

    def set_clock(now: int) -> Any:
        yield TextQuery("UPDATE {test_clock} SET us = :us", {"us": now})

    clock = f"(SELECT us FROM {names.table('test_clock')})"  # noqa: S608 - our own table
    connection = connection_of(raw, names, clock)
    connection.run(make_tables())

    def make() -> Answers:
        name = f"n{next(_serial)}"

        def answer(now: int, command: Command) -> LeaseGranted | Busy:
            connection.run(set_clock(now))
            steps = _command_steps(name, command)
            raced = isinstance(command, Take) and command.attempt % 2
            return connection.run(overtaken(steps) if raced else steps)

        return answer

    yield make
    raw.close()


def overtaken(steps: Any) -> Any:
    """Let the first check find the lease free, as if another took it just afterwards."""
    next(steps)
    asked = steps.send([])
    try:
        while True:
            asked = steps.send((yield asked))
    except StopIteration as end:
        return end.value


def test_the_statements_do_as_the_model_does(new_lease: Callable[[], Answers]):
    """The same random history gives the same answers."""

    @examples(300)
    @given(COMMANDS)
    def agree(commands: History) -> None:
        check_agreement(new_lease(), commands)

    agree()


MISTAKES = [
    ("take", "ends_at <= excluded.token", "ends_at < excluded.token"),
    ("take", "attempt < excluded.attempt", "attempt >= 0"),
    ("take", "{leases}.token + 1 ELSE", "{leases}.token ELSE"),
    ("take", "{leases}.holder = excluded.holder AND ", ""),
    ("renew", "token = :token AND ends_at > {now}", "token = :token"),
    ("renew", "token = :token", ":token > 0"),
    ("release", "token = :token AND ends_at > {now}", "token = :token"),
    ("release", "token = :token", ":token > 0"),
    ("withdraw", "holder = :holder AND ", "length(:holder) > 0 AND "),
    ("withdraw", "attempt <= :attempt", ":attempt IS NOT NULL"),
    ("clamp", "SET ends_at = {now} + ttl", "SET ends_at = ends_at"),
]  # fmt: skip


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES)
def test_a_mistake_in_a_statement_is_noticed(
    new_lease: Callable[[], Answers], monkeypatch, name: str, right: str, wrong: str
):
    """Without any one of its safeguards a statement and the model disagree."""
    text = statements("sqlite", "leases")[name]
    assert right in text
    monkeypatch.setitem(statements("sqlite", "leases"), name, text.replace(right, wrong))
    _sql.statement.cache_clear()
    try:
        assert falsified(lambda commands: check_agreement(new_lease(), commands), COMMANDS)
    finally:
        _sql.statement.cache_clear()
