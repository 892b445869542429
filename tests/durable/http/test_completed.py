"""A handler completes its request in its own transaction: effect, events and answer are one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from seawall import CircuitOpen
from seawall.durable import (
    Answer,
    FromRow,
    Idempotency,
    IdempotentRequests,
    KeyMissing,
    NewEvent,
    Outbox,
    Replay,
    Reply,
    idempotent_request,
)
from seawall.durable.database.connections import TextQuery
from seawall.durable.http import request as _asgi_request
from seawall.durable.http.completion import IdempotentRequest, response_of
from seawall.durable.http.middleware import SCOPE_KEY
from seawall.durable.idempotency import lease_renewal as _uncut
from seawall.durable.idempotency import records as _idempotency_records
from seawall.errors import LeaseLost
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.completed_support import PAID, Till
from tests.durable.http.support import KEY, USER, first, post, said, set_time
from tests.durable.postgres import Postgres

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["asyncpg", "sqlite"])
def two(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a database of each dialect."""
    return opening_by(request.param, postgres, tmp_path)


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


async def fail() -> None:
    """Have something go wrong."""
    raise ValueError("no money")


def test_effect_event_and_answer_are_one(opening: Opening):
    """One record, one transaction: the first has what is stored, and so has who comes again."""

    async def main() -> None:
        async with opening() as database:
            till = await Till(database).prepare()
            answer = await post(till.app)
            assert (answer.status, answer.body, first(answer)) == (201, b"paid", True)
            again = await post(till.app)
            assert (again.status, again.body, first(again)) == (201, b"paid", False)
            del again.headers["idempotent-replayed"]
            assert again.headers == answer.headers
            assert answer.headers["content-length"] == "4"
            assert (till.runs, await till.paid(), await till.events()) == (1, 1, 1)
            counts = till.app.snapshot()
            assert {n: c for n, c in counts.items() if c} == {"executed": 1, "replays": 1}
            assert till.idempotency.snapshot()["completed"] == 1
            records = f"SELECT count(*) FROM {database.names.table('idempotency')}"  # noqa: S608 - our own
            assert await database.arun(lambda: said(records)) == [(1,)]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["raises", "refuses", "says 404"])
def test_what_was_rolled_back_is_not_completed(two: Opening, how: str):
    """That `complete` was called proves nothing: without its commit the key is free."""

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()

            async def refuse() -> None:
                raise CircuitOpen("bank")

            async def refused(scope: Any, receive: Any, send: Any) -> None:
                try:
                    await take(scope, receive, send)
                except CircuitOpen:
                    if how == "refuses":
                        raise
                    await Reply(404, [], b"no")(scope, receive, send)

            till.inside = fail if how == "raises" else refuse
            take, till.app.app = till.app.app, refused
            if how == "says 404":
                assert (await post(till.app)).status == 404
            else:
                with pytest.raises((ValueError, CircuitOpen)):
                    await post(till.app)
            assert (await till.paid(), await till.events()) == (0, 0)
            till.inside = Till(database).inside
            answer = await post(till.app)
            assert (answer.status, first(answer), await till.paid()) == (201, True, 1)

    asyncio.run(main())


@pytest.mark.parametrize(("fails", "status"), [(1, 201), (2, 503)])
def test_what_cannot_be_looked_up_is_not_told(
    quick: Opening, monkeypatch: pytest.MonkeyPatch, fails: int, status: int
):
    """A database that is away after the commit: tried again, then 503; the repeat is answered."""
    look, left = _asgi_request.RequestExecution._read_record, fails
    monkeypatch.setattr(_asgi_request, "PAUSES", (0.0,))

    async def away(self: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ConnectionRefusedError
        return await look(self)

    monkeypatch.setattr(_asgi_request.RequestExecution, "_read_record", away)

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()
            assert (await post(till.app)).status == status
            answer = await post(till.app)
            assert (answer.status, answer.body, till.runs) == (201, b"paid", 1)

    asyncio.run(main())


def test_without_the_record_a_rollback_would_be_told_as_done(
    quick: Opening, monkeypatch: pytest.MonkeyPatch
):
    """Ablation: who believes that `complete` was called tells of a payment that is not there."""

    async def believed(_self: Any) -> Any:
        return Replay(PAID)

    monkeypatch.setattr(_asgi_request.RequestExecution, "_read_record", believed)

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()
            till.inside, sent = fail, []
            with pytest.raises(ValueError, match="no money"):
                await post(till.app, on_send=sent.append)
            assert (sent[0]["status"], await till.paid()) == (201, 0)

    asyncio.run(main())


# The fence


async def overtaken(till: Till) -> tuple[Any, Any, list[Any]]:
    """Let a request stand still before its transaction until another one has taken over."""
    await set_time(till.database, 0)
    go, there = asyncio.Event(), asyncio.Event()

    async def stand_still() -> None:
        if till.runs == 1:
            there.set()
            await go.wait()

    till.before = stand_still
    sent: list[Any] = []
    late = asyncio.ensure_future(post(till.app, on_send=sent.append))
    await there.wait()
    await set_time(till.database, 31)
    answer = await post(till.app)
    go.set()
    (done,) = await asyncio.gather(late, return_exceptions=True)
    return answer, done, sent


def test_a_late_owner_rolls_back(two: Opening):
    """Who was taken over cannot commit: one payment, one event, and LeaseLost where it tried."""

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()
            answer, late, sent = await overtaken(till)
            assert (answer.status, first(answer)) == (201, True)
            assert isinstance(late, LeaseLost)
            assert [m.get("status") or m.get("body") for m in sent] == [201, b"paid"]
            assert (b"idempotent-replayed", b"true") in sent[0]["headers"]
            assert (till.runs, await till.paid(), await till.events()) == (2, 1, 1)

    asyncio.run(main())


def test_without_the_fence_a_late_owner_would_pay_again(
    two: Opening, monkeypatch: pytest.MonkeyPatch
):
    """Ablation: by the key alone, without owner and epoch, both transactions are committed."""

    def unfenced(claim: Any, said: Any, _terms: Any, *_members: Any) -> Any:
        text = "UPDATE {idempotency} SET status = :status WHERE key_hash = :key_hash RETURNING 1"
        asked = {"status": said["status"], "key_hash": claim.key_hash}
        return bool((yield TextQuery(text, asked)))

    monkeypatch.setattr(_idempotency_records, "complete_with", unfenced)

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()
            await overtaken(till)
            assert await till.paid() == 2

    asyncio.run(main())


def test_a_second_completion_is_refused_and_adds_no_events(two: Opening):
    """Said twice, also after an acknowledgement that was lost: LeaseLost, and the first counts."""

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()

            async def again(_back: Any) -> None:
                till.after = Till(database).after
                with pytest.raises(LeaseLost, match="completed already"):
                    await till.take(found[0])

            async def caught(scope: Any, receive: Any, send: Any) -> None:
                found.append(idempotent_request(scope, required=True))
                await till(scope, receive, send)

            found: list[IdempotentRequest] = []
            till.after, till.app.app = again, caught
            answer = await post(till.app)
            assert (answer.status, answer.body) == (201, b"paid")
            assert (await till.paid(), await till.events()) == (1, 1)

    asyncio.run(main())


# The stored one counts


def test_the_stored_answer_counts(two: Opening, caplog: pytest.LogCaptureFixture):
    """A handler that answers otherwise, or fails after its commit: what is stored is sent."""

    async def otherwise(_back: Any) -> Any:
        return Reply(200, [], b"something else")

    async def lost(_back: Any) -> Any:
        raise ConnectionResetError("COMMIT: no answer")

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()
            till.after = otherwise
            answer = await post(till.app)
            assert (answer.status, answer.body, first(answer)) == (201, b"paid", True)
            assert till.app.snapshot()["differed"] == 1
            assert "what is stored is sent" in caplog.text
            till.after = lost
            sent: list[Any] = []
            with pytest.raises(ConnectionResetError):
                await post(till.app, "/orders", ("idempotency-key", "b"), USER, on_send=sent.append)
            assert [m.get("status") or m.get("body") for m in sent] == [201, b"paid"]
            assert (await post(till.app, "/orders", ("idempotency-key", "b"), USER)).status == 201
            assert (till.runs, await till.paid()) == (2, 2)

    with caplog.at_level(logging.WARNING, "seawall"):
        asyncio.run(main())


def test_cookies_and_large_bodies_are_for_the_first(quick: Opening):
    """The first is sent what the handler returned; what is kept of it is what always is."""

    async def main() -> None:
        async with quick() as database:
            large = Answer(201, [(b"set-cookie", b"a=b"), (b"location", b"/7")], b"x" * 100)
            till = await Till(database, large, max_body=10).prepare()
            answer = await post(till.app)
            assert (answer.body, answer.headers["set-cookie"]) == (b"x" * 100, "a=b")
            again = await post(till.app)
            assert (again.status, again.body, again.headers["location"]) == (201, b"", "/7")
            assert again.headers["idempotent-body"] == "dropped"
            assert "set-cookie" not in again.headers
            assert till.app.snapshot()["dropped_bodies"] == 1
            assert till.app.snapshot()["differed"] == 0

    asyncio.run(main())


# A transaction that is open when the answer is sent


async def open_too_long(till: Till) -> None:
    """Answer first, and commit then: as a dependency does that commits when the answer is sent."""

    async def early(scope: Any, receive: Any, send: Any) -> None:
        async def answer() -> None:
            await Reply(*PAID[:3])(scope, receive, send)

        till.inside = answer
        await till.take(idempotent_request(scope, required=True))

    till.app.app = early
    await post(till.app)


def test_who_answers_before_its_commit_is_told(two: Opening, monkeypatch: pytest.MonkeyPatch):
    """It raises where the answer is sent, so that the transaction is rolled back: nobody hangs."""
    monkeypatch.setattr(_asgi_request, "PAUSES", (0.0,))

    async def main() -> None:
        async with two() as database:
            till = await Till(database).prepare()
            with pytest.raises(RuntimeError, match="commit before you return"):
                await asyncio.wait_for(open_too_long(till), 20)
            assert (await till.paid(), await till.events()) == (0, 0)
            till.app.app, till.inside = till, Till(database).inside
            assert (await post(till.app)).status == 201

    asyncio.run(main())


def test_a_connection_that_broke_has_no_transaction(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was said on it is lost, and the key is free: nobody is told to commit."""
    monkeypatch.setattr(_asgi_request, "PAUSES", (0.0,))

    async def main() -> None:
        async with opening_by("psycopg", postgres, tmp_path)() as database:
            till = await Till(database).prepare()

            async def broken(scope: Any, _receive: Any, _send: Any) -> None:
                async with database.atransaction() as conn:
                    await idempotent_request(scope, required=True).acomplete(conn, PAID)
                    await conn.close()
                    raise ConnectionResetError

            till.app.app = broken
            with pytest.raises(ConnectionResetError):
                await post(till.app)
            till.app.app = till
            assert (await post(till.app)).status == 201

    asyncio.run(main())


def test_unless_looked_at_it_would_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch, postgres: Postgres, tmp_path: Path
):
    """Ablation: the record is locked by the transaction that waits for the record."""
    monkeypatch.setattr(IdempotentRequest, "_is_open", lambda _self: False)
    monkeypatch.setattr(_uncut, "PATIENCE", 0.1)

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            till = await Till(database).prepare()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(open_too_long(till), 0.3)

    asyncio.run(main())


# A worker that is killed


@pytest.mark.parametrize(
    ("driver", "mode"),
    [("asyncpg", "completed"), ("sqlite", "completed"), ("sqlite", "as without")],
)
def test_killed_between_commit_and_answer(
    driver: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """SIGKILL after the commit: the repeat is answered at once, and no lease is waited for."""
    postgres = None if driver == "sqlite" else request.getfixturevalue("postgres")
    url = str(tmp_path / "test.db") if postgres is None else postgres.url

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            till = await Till(database).prepare()
            response_of = json.dumps([url, database.names.schema, mode])
            child = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "tests.durable.http.completed_support", response_of],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                check=False,
                timeout=40,
            )
            assert child.returncode == -signal.SIGKILL
            assert await till.paid() == 1
            answer = await post(till.app)
            if mode == "completed":
                assert (answer.status, answer.body, first(answer)) == (201, b"paid", False)
            else:
                assert answer.status == 409
            assert (till.runs, await till.paid()) == (0, 1)

    asyncio.run(main())


# What it can be completed with, and by whom


def test_what_it_can_be_completed_with(quick: Opening):
    """JSON is 200; a response of Starlette's is returned as it is; a stream has no body yet."""
    assert response_of({"a": 1})[0] == Reply(
        200, [(b"content-type", b"application/json")], b'{"a":1}'
    )
    response = JSONResponse({"a": 1}, 201, {"Location": "/7"})
    assert response_of(response)[0] is response
    assert response_of(response)[1] == (201, response.raw_headers, b'{"a":1}')
    own = Answer(202, [(b"Content-Length", b"7"), (b"x", b"y")], b"ab")
    assert response_of(own)[1] == (202, [(b"x", b"y"), (b"content-length", b"2")], b"ab")
    with pytest.raises(TypeError, match="stream"):
        response_of(StreamingResponse(iter([b"a"])))
    with pytest.raises(TypeError, match="bytes have no type"):
        response_of(b"paid")
    for wrong in (Response(status_code=103), Answer(99, [], b"")):
        with pytest.raises(ValueError, match="status"):
            response_of(wrong)

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()
            name = _asgi_request.RequestName("ann", "POST /orders", "k", b"")
            found: Any = await till.idempotency.areserve("ann", "POST /orders", "k", b"")
            claim = IdempotentRequest(name, found.claim, till.idempotency, frozenset())
            assert repr(claim) == "<IdempotentRequest 'POST /orders'>"
            with database.transaction() as conn:
                with pytest.raises(TypeError, match="write the name without the a"):
                    await claim.acomplete(conn, 1)
                event = NewEvent("payment", FromRow("id"), "paid", {})
                with pytest.raises(TypeError, match="no row here"):
                    claim.complete(conn, 1, outbox=till.outbox, events=[event])
            assert not claim._attempted
            conn = database.source.connect()
            with pytest.raises(RuntimeError, match="no transaction"):
                claim.complete(conn, 1)
            conn.close()

    asyncio.run(main())


def test_in_fastapi_a_handler_returns_what_it_completed_with(quick: Opening):
    """A plain `def` handler, its own response, and a key that is required by the handler."""
    app = FastAPI()
    found: list[Any] = []

    @app.post("/orders")
    def order(request: Request) -> Any:
        claim = idempotent_request(request, required=True)
        with found[0].transaction() as conn:
            return claim.complete(conn, JSONResponse({"order": 1}, 201, {"Location": "/orders/1"}))

    @app.exception_handler(KeyMissing)
    async def missing(_request: Request, _error: KeyMissing) -> Any:
        return JSONResponse({}, 400)

    async def main() -> None:
        async with quick() as database:
            found.append(database)
            around = IdempotentRequests(
                app, Idempotency(database, unscoped=True), routes=["/orders"], unscoped=True,
                required=False,
            )  # fmt: skip
            transport = httpx.ASGITransport(around)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                assert (await client.post("/orders")).status_code == 400
                for _ in range(2):
                    answer = await client.post("/orders", headers=[KEY])
                    assert (answer.status_code, answer.json()) == (201, {"order": 1})
                    assert answer.headers["location"] == "/orders/1"
            counts = {n: c for n, c in around.snapshot().items() if c}
            assert counts == {"executed": 1, "replays": 1}

    asyncio.run(main())
    assert idempotent_request({SCOPE_KEY: "garbled"}) is None
    with pytest.raises(KeyMissing):
        idempotent_request({}, required=True)


# Dispatchers


class Waker:
    """A dispatcher of this process."""

    woken = 0

    def wake(self) -> None:
        """Count it."""
        self.woken += 1


def test_dispatchers_are_told(postgres: Postgres, tmp_path: Path):
    """Those of this process when it is committed; others by NOTIFY, also from `once.answer`."""

    async def main() -> None:
        import asyncpg

        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            till = await Till(database).prepare()
            waker, heard, channel = Waker(), asyncio.Queue[str](), till.outbox.channel
            till.outbox._register(waker)
            till.options = {"notify": True}
            listener = await asyncpg.connect(postgres.url)
            await listener.add_listener(
                till.outbox.channel, lambda *response_of: heard.put_nowait(response_of[2])
            )
            await post(till.app)
            assert waker.woken == 1
            assert await asyncio.wait_for(heard.get(), 5) == channel
            fresh = Outbox(database)  # which has told nobody yet: it is not too soon
            naming = {"scope": "a", "operation": "b", "key": "c", "fingerprint": None}
            async with (
                database.atransaction() as conn,
                till.idempotency.once(conn, **naming) as once,
            ):
                event = NewEvent("payment", "2", "paid", {})
                once.answer(1, outbox=fresh, events=[event], notify=True)
            assert await asyncio.wait_for(heard.get(), 5) == till.outbox.channel
            await listener.close()

    asyncio.run(main())


def test_a_dependency_that_commits_too_late_is_told(
    quick: Opening, monkeypatch: pytest.MonkeyPatch
):
    """FastAPI leaves a dependency when the answer is sent: it rolls back, and nobody hangs."""
    monkeypatch.setattr(_asgi_request, "PAUSES", (0.0,))
    app, found = FastAPI(), []

    async def session() -> Any:
        with found[0].transaction() as conn:
            yield conn

    @app.post("/orders")
    async def order(request: Request, conn: Any = Depends(session)) -> Any:  # noqa: B008, FAST002 - by a local name
        conn.execute(f"INSERT INTO {found[1].payments} VALUES (100)")  # noqa: S608 - our own
        return idempotent_request(request, required=True).complete(conn, JSONResponse({}, 201))

    async def main() -> None:
        async with quick() as database:
            till = await Till(database).prepare()
            found.extend([database, till])
            till.app.app = app
            with pytest.raises(RuntimeError, match="commit before you return"):
                await asyncio.wait_for(post(till.app), 20)
            assert await till.paid() == 0
            till.app.app = till
            assert (await post(till.app)).status == 201

    asyncio.run(main())
