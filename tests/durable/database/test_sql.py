"""Statements as each database and driver wants them; names of tables whatever they are."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from string import printable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import durable
from seawall.durable.database.migrations import migrations
from seawall.durable.database.statements import (
    StatementText,
    TableNames,
    quoted,
    rendered,
    statements,
)

NAMES = TableNames("own", "x_")
ASKED = "SELECT a FROM {things} WHERE b = :b AND c = ':' || :c AND d = :b -- 100%"


def test_each_driver_has_its_own_parameters():
    """Dollars are numbered by first use; %(name)s doubles other percent signs; :name stays."""
    dollar = rendered(ASKED, "postgres", "dollar", NAMES)
    assert dollar.sql == (
        """SELECT a FROM "own"."x_things" WHERE b = $1 AND c = ':' || $2 AND d = $1 -- 100%"""
    )
    assert dollar.positional({"c": 2, "b": 1}) == [1, 2]
    assert "%(b)s" in rendered(ASKED, "postgres", "pyformat", NAMES).sql
    assert "100%%" in rendered(ASKED, "postgres", "pyformat", NAMES).sql
    assert ":b" in rendered(ASKED, "sqlite", "named", NAMES).sql


def test_time_is_the_databases_unless_a_test_says_otherwise():
    """`{now}` stands for an expression."""
    assert rendered("SELECT {now}", "sqlite", "named", NAMES, "7") == StatementText("SELECT 7", ())
    assert "clock_timestamp" in rendered("SELECT {now}", "postgres", "dollar", NAMES).sql


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12))
def test_a_quoted_name_is_one_name_whatever_is_in_it(name: str):
    """No name ends its own quotes."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"CREATE TABLE {quoted(name)} (a)")
        rows = connection.execute("SELECT name FROM sqlite_master").fetchall()
    finally:
        connection.close()
    assert rows == [(name,)]


@pytest.mark.parametrize(
    ("given_names", "error"),
    [
        ({"schema": ""}, ValueError),
        ({"schema": 7}, TypeError),
        ({"prefix": None, "schema": "a\0"}, ValueError),
        ({"prefix": "a\nb"}, ValueError),
        ({"prefix": "x" * 60}, ValueError),
    ],
    ids=["empty", "number", "zero", "line", "long"],
)
def test_names_that_cannot_be_are_refused(given_names: dict[str, Any], error: type[Exception]):
    """What no database would take is said at once."""
    with pytest.raises(error, match="write"):
        TableNames(**given_names)


def test_both_databases_have_the_same_steps():
    """A step of one is a step of the other, with statements of its own."""
    postgres, sqlite = migrations("postgres"), migrations("sqlite")
    assert [(step.version, step.name) for step in postgres] == [
        (step.version, step.name) for step in sqlite
    ]
    assert [step.version for step in postgres] == list(range(1, len(postgres) + 1))
    assert all(set(text) <= set(printable) for step in postgres for text in step.statements)


FILES = ("dead_letters", "fifo", "idempotency", "inbox", "jobs", "later", "leases", "outbox")


@pytest.mark.parametrize("file", FILES)
def test_comments_are_no_part_of_a_statement(file: str):
    """A word of theirs may look like a parameter; what both databases share is in one place."""
    postgres, sqlite = statements("postgres", file), statements("sqlite", file)
    assert not any("--" in text for text in (*postgres.values(), *sqlite.values()))
    folder = Path(durable.__file__).parent / "sql"
    paths = [folder / name / f"{file}.sql" for name in ("postgres", "sqlite")]
    own = [path.read_text() if path.exists() else "" for path in paths]
    for name in postgres.keys() & sqlite.keys():
        apart = [f"-- name: {name}\n" in text for text in own]
        assert all(apart) == (postgres[name] != sqlite[name]), name
