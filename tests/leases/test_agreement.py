"""The SQL of leases and the pure model: the same history gives the same answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.durable.database import statements as _sql
from seawall.durable.database.connections import TextQuery, connection_of
from seawall.durable.database.leases import _asked
from seawall.durable.database.migrations import migrations
from seawall.durable.database.statements import TableNames, statements
from seawall.leases.store import Command, Release, Renew, Take, Withdraw
from seawall.models.lease import Busy, LeaseGranted, LeaseModel
from tests.durable.postgres import Postgres
from tests.support import falsified

TTL = 10
NOW = 1_000_000
COMMANDS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, TTL), st.integers(-30, 30)),
        st.sampled_from(["take", "take", "renew", "release", "take late", "withdraw"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=10,
)
Answers = Callable[[int, Command], LeaseGranted | Busy]

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
            steps = _asked(name, command)
            raced = isinstance(command, Take) and command.attempt % 2
            return connection.run(overtaken(steps) if raced else steps)

        return answer

    yield make
    raw.close()


def overtaken(steps: Any) -> Any:
    """Let the first look find nobody, as if another had taken the lease just after it."""
    next(steps)
    asked = steps.send([])
    try:
        while True:
            asked = steps.send((yield asked))
    except StopIteration as end:
        return end.value


def check_agreement(answer: Answers, commands: list[tuple[int, str, str, int]]) -> None:
    """Drive the model and the database with the same history, and compare every answer."""
    model, now, attempt, tokens = LeaseModel(), NOW, 10, [1, 2, 3]
    for jump, what, holder, which in commands:
        now = max(1, now + jump)
        token = tokens[-1 - which]
        expected: LeaseGranted | Busy | bool
        command: Command
        if what.startswith("take"):
            attempt += 1
            number = attempt - 5 if what == "take late" else attempt
            expected = model.take(now, holder, number, TTL)
            command = Take(holder, number, TTL)
        elif what == "renew":
            expected, command = model.renew(now, token, TTL), Renew(token, TTL)
        elif what == "withdraw":
            expected = model.withdraw(now, holder, attempt - which)
            command = Withdraw(holder, attempt - which)
        else:
            expected, command = model.release(now, token), Release(token)
        given_answer = answer(now, command)
        if isinstance(expected, bool):
            assert isinstance(given_answer, LeaseGranted) == expected
            assert given_answer.token == model.token
        else:
            assert given_answer == expected
        if isinstance(given_answer, LeaseGranted):
            tokens.append(given_answer.token)


def test_the_statements_do_as_the_model_does(new_lease: Callable[[], Answers]):
    """The same random history gives the same answers."""

    @settings(max_examples=300)
    @given(COMMANDS)
    def agree(commands: list[tuple[int, str, str, int]]) -> None:
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
