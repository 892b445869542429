"""Histories at random: the databases do what a record of a few lines does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database import statements as _sql
from seawall.durable.database.connections import TextQuery
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.models.idempotency import Fresh, KeyClaim, Mismatch, Pending, Replay
from tests.durable.postgres import Postgres
from tests.support import examples, falsified

LEASE, TTL = 4.0, 10.0
SECOND = 1_000_000

PAYLOADS = st.sampled_from(["a", "a", "a", "b", None])
CLAIMS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("reserve"), PAYLOADS),
    st.tuples(st.just("complete"), CLAIMS),
    st.tuples(st.just("complete"), CLAIMS),
    st.tuples(st.just("fail"), CLAIMS),
    st.tuples(st.just("abandon"), CLAIMS),
    st.tuples(st.just("renew"), CLAIMS),
    st.tuples(st.just("advance"), st.sampled_from([1, 2, 4, 5, 10])),
    st.tuples(st.just("advance"), st.sampled_from([1, 2, 4, 5])),
    st.tuples(st.just("clean"), st.just(0)),
)
FIRST = [("reserve", "a")]
TAKEN_OVER = [*FIRST, ("advance", 5), *FIRST]
RENEWED = [*FIRST, *[("advance", 2), ("renew", 0)] * 4, ("advance", 2)]


def histories(beginning: list[tuple[str, Any]]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Return histories that begin like that."""
    return st.lists(STEPS, max_size=12).map(lambda steps: [*beginning, *steps])


HISTORIES = st.one_of(histories(FIRST), histories(TAKEN_OVER), histories(RENEWED))


@dataclass
class Kept:
    """A record as the rules have it."""

    payload: str | None
    holder: KeyClaim
    lease_until: float
    expires: float
    answer: Any = None
    failed: bool = False


class Reference:
    """The rules for one key, in a few lines."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept: Kept | None = None

    def free(self, payload: str | None) -> Any:
        """Return None where it may be taken, else what is told."""
        kept = self.kept
        if kept is None or kept.expires <= self.now:
            return None
        if kept.payload is not None and payload is not None and kept.payload != payload:
            return Mismatch
        if kept.answer is not None:
            return Replay
        return Pending if kept.lease_until > self.now else None

    def held(self, claim: KeyClaim) -> Kept | None:
        """Return the record if it is this claim's."""
        return self.kept if self.kept is not None and self.kept.holder == claim else None


class Server:
    """A database whose time stands still unless told."""

    def __init__(self, database: Database) -> None:
        migrate(database)
        self.database = database
        self._tell("CREATE TABLE {clock} (us bigint NOT NULL)")
        self._tell("INSERT INTO {clock} VALUES (1000000000)")
        table = database.names.table("clock")
        database._now = f"(SELECT us FROM {table})"  # noqa: S608 - names of our own
        self.idempotency = Idempotency(database, lease=LEASE, ttl=TTL)
        self._keys = count()

    def _tell(self, text: str, **arguments: Any) -> None:
        def steps() -> Any:
            yield TextQuery(text, arguments)

        self.database.run(steps)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        text = "UPDATE {clock} SET us = us + CAST(:by AS bigint)"
        self._tell(text, by=int(seconds * SECOND))

    def check(self, history: list[tuple[str, Any]]) -> None:
        """Do a history with a key of its own, and compare each word with the reference's."""
        key, reference, claims = f"key-{next(self._keys)}", Reference(), []
        for number, (what, which) in enumerate(history):
            if what == "reserve":
                self._reserve(key, which, reference, claims)
            elif what == "advance":
                self.advance(which)
                reference.now += which
            elif what == "clean":
                self.idempotency.cleanup()
                if reference.kept and reference.kept.expires <= reference.now:
                    reference.kept = None
            elif which < len(claims):
                self._claimed(what, claims[which], reference, number)

    def _reserve(
        self, key: str, payload: str | None, reference: Reference, claims: list[KeyClaim]
    ) -> None:
        found = self.idempotency.reserve("scope", "operation", key, payload)
        told = reference.free(payload)
        if told is None:
            assert isinstance(found, Fresh)
            if claims:
                assert found.claim.epoch >= claims[-1].epoch
                assert not found.claim.taken_over or found.claim.epoch > claims[-1].epoch
            claims.append(found.claim)
            now = reference.now
            reference.kept = Kept(payload, found.claim, now + LEASE, now + TTL)
            return
        assert isinstance(found, told)
        kept = reference.kept
        assert kept is not None
        if isinstance(found, Pending):
            assert found.retry_after == kept.lease_until - reference.now
        if isinstance(found, Replay):
            assert (found.value, found.failed) == (kept.answer, kept.failed)

    def _claimed(self, what: str, claim: KeyClaim, reference: Reference, number: int) -> None:
        kept = reference.held(claim)
        open_ = kept is not None and kept.answer is None
        if what in {"complete", "fail"}:
            failed = what == "fail"
            assert self.idempotency.complete(claim, number, failed=failed) is (kept is not None)
            if kept is not None and open_:
                kept.answer, kept.failed = number, failed
                kept.expires = reference.now + TTL
        elif what == "abandon":
            assert self.idempotency.abandon(claim) is open_
            if open_:
                reference.kept = None
        else:
            assert self.idempotency.renew(claim) is open_
            if kept is not None and open_:
                kept.lease_until, kept.expires = reference.now + LEASE, reference.now + TTL


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Server]:
    """Return a server on SQLite."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name=f"histories {tmp_path.name}")
    yield Server(database)
    database.close()
    source.close()


@pytest.fixture
def psycopg(postgres: Postgres, tmp_path: Path) -> Iterator[Server]:
    """Return a server on PostgreSQL, asked without an event loop."""
    from psycopg_pool import ConnectionPool

    with ConnectionPool(postgres.url, min_size=1, max_size=2, open=True) as pool:
        schema = f"histories {tmp_path.name}"[:38]
        database = Database(pool, schema=schema, name=schema)
        yield Server(database)
        database.close()


@pytest.mark.parametrize("kind", ["sqlite", "psycopg"])
def test_the_databases_do_what_the_rules_say(kind: str, request: pytest.FixtureRequest):
    """Whatever is done in whatever order, every word is the reference's."""
    server: Server = request.getfixturevalue(kind)

    @examples(40)
    @given(HISTORIES)
    def search(history: list[tuple[str, Any]]) -> None:
        server.check(history)

    search()


FENCE = "AND owner = :owner AND epoch = :epoch"


@pytest.mark.parametrize(
    ("statement", "safeguard", "instead", "beginning"),
    [
        ("complete", FENCE, "", TAKEN_OVER),
        ("renew", FENCE, "", TAKEN_OVER),
        ("abandon", FENCE, "", TAKEN_OVER),
        ("complete", "AND state = 0", "", FIRST),
        ("abandon", "AND state = 0", "", FIRST),
        ("take_over", "expires_at <= {now} OR (", "(", FIRST),
        ("renew", ", expires_at = {now} + :ttl", "", RENEWED),
        ("clean", "WHERE expires_at <= {now}", "", FIRST),
    ],
)
def test_without_a_safeguard_some_history_goes_wrong(
    sqlite: Server,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    safeguard: str,
    instead: str,
    beginning: list[tuple[str, Any]],
):
    """Ablation: each condition of the statements is needed."""
    texts = _sql.statements("sqlite", "idempotency")
    assert safeguard in texts[statement]
    monkeypatch.setitem(texts, statement, texts[statement].replace(safeguard, instead))
    _sql.statement.cache_clear()
    try:
        assert falsified(_as_assertion(sqlite), histories(beginning))
    finally:
        monkeypatch.undo()
        _sql.statement.cache_clear()


def _as_assertion(server: Server) -> Any:
    def check(history: list[tuple[str, Any]]) -> None:
        from seawall.errors import Contended

        try:
            server.check(history)
        except Contended as error:  # it looked again and again: what was free could not be had
            raise AssertionError from error

    return check
