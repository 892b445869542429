"""Any history of requests, crashes and waiting is answered as a few lines of a model say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.http import request as _asgi_request
from seawall.durable.http import responses as _asgi_answers
from seawall.durable.http.middleware import IdempotentRequests
from seawall.durable.idempotency.idempotency import Idempotency
from tests.durable.http.support import Shop, first, post, set_time, user
from tests.support import examples, falsified
from tests.web.support import http_scope

LEASE, TTL = 30, 1000


class Step(NamedTuple):
    """Let time pass; then ask, with a key and a payload, for what ends with this status."""

    passes: int
    key: str
    payload: bytes
    status: int
    """0: its worker is cut off in the middle."""


STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.builds(
        Step,
        st.sampled_from([0, 0, 0, 10, LEASE - 1, LEASE, TTL]),
        st.sampled_from(["a", "a", "b"]),
        st.sampled_from([b"x", b"x", b"y"]),
        st.sampled_from([201, 201, 500, 404, 0, 0]),
    ),
    min_size=1,
    max_size=10,
)


class Record(NamedTuple):
    """What the model knows of a key."""

    payload: bytes
    answer: bytes | None
    begun: int


class History:
    """Plays a history against the middleware and the model."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._now = self._serial = self._runs = 0
        self._step = Step(0, "", b"", 0)
        self._begun = asyncio.Event()
        self._app = IdempotentRequests(
            self._answer, Idempotency(database, lease=LEASE, ttl=TTL), routes=["/"], scope=user
        )

    async def _answer(self, _scope: Any, _receive: Any, send: Any) -> None:
        self._runs += 1
        if not self._step.status:
            self._begun.set()
            await asyncio.Event().wait()
        headers = [(b"x-run", str(self._runs).encode())]
        start = {"type": "http.response.start", "status": self._step.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._body()})

    def _body(self) -> bytes:
        return f"{self._step.status} in run {self._runs}".encode()

    def check(self, steps: list[Step]) -> None:
        """Each request is carried out, answered again or refused as the model says."""
        self._serial += 1
        asyncio.run(self._play(steps))

    async def _play(self, steps: list[Step]) -> None:
        known: dict[str, Record] = {}
        self._now += TTL  # nothing of an earlier history counts
        for step in steps:
            self._now += step.passes
            self._step = step
            await set_time(self._database, self._now)
            before, record = self._runs, known.get(step.key)
            if record is not None and record.begun + TTL <= self._now:
                record = None  # its time is over
            status, body, again = await self._ask(step)
            runs = record is None or (
                record.payload == step.payload
                and record.answer is None
                and record.begun + LEASE <= self._now
            )
            assert self._runs - before == runs
            if runs:
                assert (status, again) == (step.status, False)
                known.pop(step.key, None)
                if step.status == 0:
                    known[step.key] = Record(step.payload, None, self._now)
                elif step.status != 404:
                    known[step.key] = Record(step.payload, body, self._now)
            elif record is not None and record.payload != step.payload:
                assert status == 422
            elif record is not None and record.answer is None:
                assert status == 409
            else:
                assert record is not None
                assert (body, again) == (record.answer, True)

    async def _ask(self, step: Step) -> tuple[int, bytes, bool]:
        self._begun = asyncio.Event()
        key = ("idempotency-key", f"{self._serial}-{step.key}")
        asked = asyncio.ensure_future(
            post(self._app, "/", key, ("x-user", "ann"), body=step.payload)
        )
        begun = asyncio.ensure_future(self._begun.wait())
        await asyncio.wait([asked, begun], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if not asked.done():
            asked.cancel()
            await asyncio.wait([asked])
            return 0, b"", False
        answer = await asked
        return answer.status, answer.body, not first(answer)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Return a database that serves one event loop after the other."""
    source = Sqlite(tmp_path / "records.db")
    database = Database(source, name="records")
    migrate(database)
    yield database
    database.close()
    source.close()


@pytest.fixture
def history(database: Database) -> History:
    """Return what plays histories."""
    return History(database)


def test_every_history_is_as_the_model_says(history: History):
    """Requests, workers that are cut off, and time, in any order."""

    @examples(50)
    @given(STEPS)
    def check(steps: list[Step]) -> None:
        history.check(steps)

    check()


def _without_a_record(_outcome: Any) -> bool:
    return False


def _always(_outcome: Any) -> bool:
    return True


@pytest.mark.parametrize("rule", [_without_a_record, _always])
def test_without_the_rule_what_to_keep(
    history: History, monkeypatch: pytest.MonkeyPatch, rule: Any
):
    """Ablation: where nothing is kept it is done twice, where all is kept a 404 is final."""
    monkeypatch.setattr(_asgi_answers, "keeps", rule)
    assert falsified(history.check, STEPS)


def test_without_a_claim_that_stays(history: History, monkeypatch: pytest.MonkeyPatch):
    """Ablation: if who is cut off gave its claim back, its effect could happen twice at once."""
    execute = _asgi_request.RequestExecution._execute

    async def giving_back(self: Any, claim: Any, scope: Any, body: bytes) -> None:
        try:
            await execute(self, claim, scope, body)
        except asyncio.CancelledError:
            await self.abandon()
            raise

    monkeypatch.setattr(_asgi_request.RequestExecution, "_execute", giving_back)
    assert falsified(history.check, STEPS)


# What is answered

_NAMES = st.one_of(
    st.sampled_from(["X-A", "x-a", "Link", "Vary", "Content-Type"]),
    st.text("!#$%&'*+-.^_`|~09azAZ", min_size=1),
)
_VALUES = st.binary(max_size=20).filter(lambda value: not set(value) & {0, 10, 13})
Headers = list[tuple[bytes, bytes]]
HEADERS: st.SearchStrategy[Headers] = st.lists(
    st.tuples(_NAMES.map(str.encode), _VALUES), max_size=8
)


async def _no_body() -> Any:
    return {"type": "http.request", "body": b""}


def test_any_answer_comes_back_byte_for_byte(database: Database):
    """Whatever the headers are called and contain, in their order, and whatever the body is."""
    records = Idempotency(database)

    async def main(headers: Headers, parts: list[bytes]) -> None:
        shop = Shop(*parts, headers=headers)
        app = IdempotentRequests(shop, records, routes=["/"], scope=user)
        key = ("idempotency-key", token_hex(8))
        for marks in ([], [(b"idempotent-replayed", b"true")]):
            messages: list[Any] = []

            async def send(message: Any, to: list[Any] = messages) -> None:
                to.append(message)

            scope = http_scope("/", method="POST", headers=[key, ("x-user", "ann")])
            await app(scope, _no_body, send)
            assert messages[0]["headers"] == [*headers, *marks]
            assert b"".join(message["body"] for message in messages[1:]) == b"".join(parts)
        assert len(shop.orders) == 1

    @examples(50)
    @given(HEADERS, st.lists(st.binary(max_size=20), min_size=1, max_size=3))
    def check(headers: Headers, parts: list[bytes]) -> None:
        asyncio.run(main(headers, parts))

    check()
