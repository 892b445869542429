"""What an attacker cannot do with an Idempotency-Key or by writing into the table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

from seawall.durable import Database, Sqlite, amigrate, migrate
from seawall.durable.http import (
    middleware as asgi,
)
from seawall.durable.http import (
    request as _asgi_request,
)
from seawall.durable.http import (
    responses as _asgi_answers,
)
from seawall.durable.http.middleware import IdempotentRequests, scope_text
from seawall.durable.idempotency import records as _idempotency_records
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.models import idempotency as model
from seawall.web import Edge
from seawall.web.request import INCOMING
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import KEY, USER, Shop, edge_of, first, post, said, user
from tests.support import examples, falsified
from tests.web.support import Answer, ask


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Return a database that serves one event loop after the other."""
    source = Sqlite(tmp_path / "records.db")
    database = Database(source, name="records")
    migrate(database)
    yield database
    database.close()
    source.close()


async def table(database: Database) -> str:
    """Return all that is stored, as one text."""
    rows = await database.arun(lambda: said("SELECT * FROM {idempotency}"))
    return " ".join(
        value.decode("latin-1") if isinstance(value, bytes) else str(value)
        for row in rows
        for value in row
    )


# Whose a key is


def test_without_a_scope_it_refuses_to_start(database: Database):
    """Who does not say whose a request is cannot begin, unless all callers are said to be one."""
    records = Idempotency(database)
    shop: Any = Shop()
    with pytest.raises(TypeError, match="whose a request is"):
        IdempotentRequests(shop, records, routes=["/orders"])
    with pytest.raises(TypeError, match="plain function"):
        IdempotentRequests(shop, records, routes=["/orders"], scope=_awaited)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave out scope"):
        IdempotentRequests(shop, records, routes=["/orders"], scope=user, unscoped=True)
    with pytest.raises(ValueError, match=re.escape("Idempotency(..., unscoped=True)")):
        IdempotentRequests(shop, records, routes=["/orders"], unscoped=True)

    async def main() -> None:
        shared = Idempotency(database, unscoped=True)
        app = IdempotentRequests(shop, shared, routes=["/orders"], unscoped=True)
        assert first(await post(app, "/orders", KEY))
        assert not first(await post(app, "/orders", KEY))

    asyncio.run(main())


async def _awaited(_incoming: Any) -> str:
    return "ann"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"idempotency": None}, "pass an Idempotency"),
        ({"routes": "/orders"}, "write a list"),
        ({"routes": []}, "write which"),
        ({"routes": ["orders"]}, "write a path"),
        ({"routes": ["/" + "x" * 300]}, "200 bytes"),
        ({"methods": "POST"}, "write a list"),
        ({"methods": ["post"]}, "write them as"),
        ({"methods": ["GET"]}, "no effect"),
        ({"required": 1}, "True or False"),
        ({"wait": -1}, "0 or more"),
        ({"max_request_body": 0}, "1 or more"),
        ({"never_store": "x-a"}, "write a list"),
        ({"never_store": [7]}, "a list of headers"),
        ({"trust": "10.0.0.0/8"}, "pass a Trust"),
    ],
)
def test_arguments_are_checked(database: Database, options: dict[str, Any], says: str):
    """A wrong argument raises immediately, with what to write instead."""
    given_options = {"idempotency": Idempotency(database), "routes": ["/orders"], "scope": user}
    with pytest.raises((TypeError, ValueError), match=says):
        IdempotentRequests(Shop(), **{**given_options, **options})


def test_somebody_unknown_has_no_scope(quick: Opening):
    """None, nothing, and a tuple with a part missing are refused; what is no text is an error."""
    shop = Shop()
    answers: list[Any] = [None, "", ("acme", None), ("", "ann"), ()]
    mistakes: list[Any] = [7.5, True, b"ann", ("acme", ["ann"]), object()]

    async def main() -> None:
        async with edge_of(quick, shop, scope=lambda _: answers.pop()) as app:
            for _ in range(5):
                assert (await post(app)).status == 403
            for mistake in mistakes:
                answers.append(mistake)
                with pytest.raises(TypeError, match="return text"):
                    await post(app)
            assert shop.orders == []

    asyncio.run(main())


PEOPLE = [("acme", "ann"), ("acm", "eann"), ("acme",), ("acmeann",), ('["acme", "ann"]',)]
PATHS = ["/orders", "/carts", "/orders/1/pay", "/orders/2/pay"]
Asked = tuple[int, str, str, str]
ASKED: st.SearchStrategy[list[Asked]] = st.lists(
    st.tuples(
        st.integers(0, len(PEOPLE) - 1),
        st.sampled_from(["POST", "PATCH"]),
        st.sampled_from(PATHS),
        st.sampled_from(["k", "l"]),
    ),
    min_size=2,
    max_size=8,
)


class Crossing:
    """Asks in the name of several callers, and looks who is answered with whose answer."""

    def __init__(self, database: Database) -> None:
        self._serial = 0
        self._app = IdempotentRequests(
            self._answer,
            Idempotency(database),
            routes=["/orders", "/carts", "/orders/{id}/pay"],
            scope=lambda incoming: PEOPLE[int(incoming.header("x-person") or "")],
        )

    async def _answer(self, scope: Any, _receive: Any, send: Any) -> None:
        person = dict(scope["headers"])[b"x-person"].decode()
        own = f"{person} {scope['method']} {scope['path']}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": own})

    def check(self, asked: list[Asked]) -> None:
        """Assert that each answer belongs to its user, method and path."""
        self._serial += 1
        asyncio.run(self._main(asked))

    async def _main(self, asked: list[Asked]) -> None:
        done: set[Asked] = set()
        for person, method, path, key in asked:
            named = ("idempotency-key", f"{self._serial}-{key}")
            answer = await ask(
                self._app, path, method=method, headers=[named, ("x-person", str(person))]
            )
            if answer.status == 200:
                assert answer.body == f"{person} {method} {path}".encode()
                assert first(answer) == ((person, method, path, key) not in done)
                done.add((person, method, path, key))
            else:
                # The same key for another resource of one route: refused, not answered.
                other = path.replace("1", "3").replace("2", "1").replace("3", "2")
                assert answer.status == 422
                assert (person, method, other, key) in done


def test_a_replay_never_crosses(database: Database):
    """Not between tenants, principals, methods, routes or resources, whatever they are called."""
    crossing = Crossing(database)

    @examples(40)
    @given(ASKED)
    def check(asked: list[Asked]) -> None:
        crossing.check(asked)

    check()


@pytest.mark.parametrize("without", ["scope", "bounds", "path", "operation"])
def test_without_its_parts_a_name_would_cross(
    database: Database, monkeypatch: pytest.MonkeyPatch, without: str
):
    """Ablation: all callers one, parts put together without a bound, no path, no method."""
    if without == "scope":
        monkeypatch.setattr(asgi, "scope_text", lambda _said: "everybody")
    elif without == "bounds":
        monkeypatch.setattr(asgi, "scope_text", "".join)
    elif without == "path":
        monkeypatch.setattr(asgi, "fingerprint_of", lambda *parts: model.fingerprint_of(parts[-1]))
    else:
        monkeypatch.setattr(
            asgi, "RequestName", lambda whose, _operation, *rest: asgi_name(whose, "same", *rest)
        )
    asgi_name = _NAME
    assert falsified(Crossing(database).check, ASKED)


_NAME = asgi.RequestName


@given(
    st.lists(
        st.one_of(
            st.text(min_size=1, max_size=300),
            st.integers(-3, 3),
            st.tuples(st.integers(-3, 3), st.sampled_from(["1", "-1"])),
            st.sampled_from(["0", "1", "-1", "[1]", UUID(int=1)]),
            st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3).map(tuple),
            st.sampled_from(["#", "[", '["a"]', "\0", "\ud800", "x" * 250, "x" * 251]),
        ),
        unique_by=lambda said: said if isinstance(said, tuple) else (said,),
        max_size=8,
    )
)
def test_scopes_stay_apart(scopes: list[Any]):
    """Different callers are different texts, short enough and storable, whatever they are."""
    texts = [scope_text(scope) for scope in scopes]
    assert len(set(texts)) == len(scopes)
    for text in texts:
        assert text is not None
        assert model.check_name("scope", text) == text


# Who proves whose a request is


class Login:
    """Authenticates requests, and replaces any header in which a client names itself."""

    def __init__(self, app: Any, *, in_place: bool) -> None:
        self._app = app
        self._in_place = in_place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Remove any header in which a client names itself."""
        proven = dict(scope["headers"])[b"authorization"].removeprefix(b"Bearer of-")
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-user"]
        headers.append((b"x-user", proven))
        if self._in_place:
            scope["headers"][:] = headers
        else:
            scope["headers"] = headers
        await self._app(scope, receive, send)


async def _pretend(opening: Opening, *, in_place: bool) -> tuple[Answer, Answer]:
    """Return the answers to ann, and to eve who pretends to be ann."""
    async with edge_of(opening, Shop(), routes=["/orders"]) as app:
        edge = Edge(Login(app, in_place=in_place), name="shop")
        asked = [(KEY, USER, ("authorization", f"Bearer of-{who}")) for who in ("ann", "eve")]
        return await post(edge, "/orders", *asked[0]), await post(edge, "/orders", *asked[1])


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_login_has_proven_counts(quick: Opening, in_place: bool):  # noqa: FBT001 - as drawn
    """The authenticated user counts, not a client's header: eve gets none of ann's answers."""
    ann, eve = asyncio.run(_pretend(quick, in_place=in_place))
    assert first(ann)
    assert first(eve)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_the_edge_saw_would_cross(
    quick: Opening,
    monkeypatch: pytest.MonkeyPatch,
    in_place: bool,  # noqa: FBT001 - as drawn
):
    """Ablation: asked with the request as it came, the scope is what a stranger wrote."""
    monkeypatch.setattr(asgi, "incoming_of", lambda scope, _trust: scope[INCOMING])
    ann, eve = asyncio.run(_pretend(quick, in_place=in_place))
    assert first(ann)
    assert not first(eve)


# What is never stored

SECRETS = [
    (b"Set-Cookie", b"session=very-secret-1"),
    (b"set-cookie", b"other=very-secret-2"),
    (b"authorization", b"Bearer very-secret-3"),
    (b"www-authenticate", b"Basic realm=very-secret-4"),
    (b"proxy-authorization", b"very-secret-5"),
    (b"proxy-authenticate", b"very-secret-6"),
    (b"Connection", b"close, X-Hop"),
    (b"x-hop", b"very-secret-7"),
    (b"keep-alive", b"very-secret-8"),
    (b"te", b"very-secret-9"),
    (b"trailer", b"very-secret-10"),
    (b"transfer-encoding", b"very-secret-11"),
    (b"upgrade", b"very-secret-12"),
    (b"x-session", b"very-secret-13"),
    (b"date", b"very-secret-14"),
]


async def _leave_secrets(opening: Opening, size: int = 10) -> tuple[str, list[Answer]]:
    shop = Shop(b"x" * size, headers=[*SECRETS, (b"location", b"/orders/1")])
    never = (name for name in ["X-Session"])  # read once, as an iterable may be
    async with edge_of(opening, shop, never_store=never, idempotency={"max_body": 100}) as app:
        request = ("/orders", KEY, USER, ("authorization", "Bearer very-secret-0"))
        answers = [await post(app, *request) for _ in range(2)]
        assert len(shop.orders) == 1
        return await table(app.idempotency.database), answers


def test_cookies_logins_and_connections_are_never_stored(opening: Opening):
    """Set-Cookie, Authorization and what is of one connection are in no record and no replay."""
    stored, (told, again) = asyncio.run(_leave_secrets(opening))
    assert "/orders/1" in stored
    assert "very-secret" not in stored
    assert told.headers["authorization"] == "Bearer very-secret-3"  # the first one has it all
    assert again.headers == {"location": "/orders/1", "idempotent-replayed": "true"}


def test_nor_are_they_in_a_tombstone(opening: Opening):
    """What is left of an answer that was too large has nothing of them either."""
    stored, (_, again) = asyncio.run(_leave_secrets(opening, size=101))
    assert "/orders/1" in stored
    assert "very-secret" not in stored
    assert again.headers["idempotent-body"] == "dropped"


def test_without_the_list_they_would_be(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: without the list of headers that are never stored, they are in the table."""
    monkeypatch.setattr(model, "NEVER_STORED", frozenset())
    stored, _ = asyncio.run(_leave_secrets(quick))
    assert "very-secret-1" in stored
    assert "very-secret-3" in stored


def _log_of_a_failure(file: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Break the table while a request is served; return what stands in the log."""

    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
        database = Database(engine, name="logged")
        await amigrate(database)

        async def lose(_shop: Shop) -> None:
            await database.arun(lambda: said("ALTER TABLE {idempotency} DROP COLUMN kept"))

        shop = Shop(b"very-secret-1", headers=[(b"x-token", b"very-secret-2")], more=lose)
        records = Idempotency(database)
        app = IdempotentRequests(shop, records, routes=["/orders"], scope=lambda _: "very-secret-3")
        assert (await post(app)).status == 503
        database.close()
        await engine.dispose()

    asyncio.run(main())
    return caplog.text


def test_a_failure_tells_no_secrets_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Drivers tell the parameters of what failed: the answer, and whose it is. We do not."""
    monkeypatch.setattr(_asgi_request, "PAUSES", ())
    told = _log_of_a_failure(tmp_path / "a.db", caplog)
    assert "POST /orders" in told
    assert "no such column" in told
    assert "very-secret" not in told
    # Ablation: all that an error says.
    monkeypatch.setattr(_asgi_request, "described", str)
    told = _log_of_a_failure(tmp_path / "b.db", caplog)
    assert all(f"very-secret-{n}" in told for n in (1, 2, 3))


async def _leave_a_key(opening: Opening) -> str:
    async with edge_of(opening, Shop()) as app:
        await post(app)
        return await table(app.idempotency.database)


def test_keys_are_stored_hashed(opening: Opening):
    """Reading the table reveals no key with which to ask for an answer."""
    assert "8e03978e" not in asyncio.run(_leave_a_key(opening))


def test_without_the_hash_they_would_be_there(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: a key that is not hashed is found in the table."""
    home = "seawall.durable.idempotency.records.key_digest"
    monkeypatch.setattr(home, lambda *parts: "".join(parts).encode())
    assert "8e03978e" in asyncio.run(_leave_a_key(quick))


# How much is stored


FOUND = {
    "location": "/orders/1",
    "content-type": "text/csv",
    "etag": '"1"',
    "last-modified": "Thu, 01 Jan 1970 00:00:00 GMT",
}
"""Where the client finds what it cannot be told again."""


async def _ask_for_much(opening: Opening, parts: tuple[bytes, ...]) -> None:
    """Check that a large answer is sent once; a repeat is sent a reference, and runs nothing."""
    headers = [(name.encode(), value.encode()) for name, value in FOUND.items()]
    length = str(sum(map(len, parts))).encode()
    more = [(b"content-length", length), (b"content-encoding", b"br"), (b"x-more", b"y" * 100)]
    shop = Shop(*parts, headers=[*headers, *more])
    async with edge_of(opening, shop, idempotency={"max_body": 100}) as app:
        assert (await post(app)).body == b"".join(parts)
        marks = {"idempotent-body": "dropped", "idempotent-replayed": "true"}
        for _ in range(3):
            again = await post(app)
            assert (again.status, again.body) == (201, b"")
            assert again.headers == {**FOUND, "content-length": "0", **marks}
        stored = await table(app.idempotency.database)
        assert "xxx" not in stored
        assert "yyy" not in stored
        assert shop.orders == [b"book"]
        assert app.snapshot()["dropped_bodies"] == 1


@pytest.mark.parametrize("parts", [(b"x" * 101,), (b"x" * 60, b"x" * 41), (b"x" * 50,) * 9])
def test_large_answers_leave_a_tombstone(opening: Opening, parts: tuple[bytes, ...]):
    """Status and reference are kept, the body is not, and the repeat says so."""
    asyncio.run(_ask_for_much(opening, parts))


@pytest.mark.parametrize("without", ["cap", "tombstone", "record"])
def test_without_a_tombstone(quick: Opening, monkeypatch: pytest.MonkeyPatch, without: str):
    """Ablation: all of it kept; nothing but the status; or no record, and it is done again."""
    if without == "cap":
        monkeypatch.setattr(_idempotency_records, "stored", _stored_whole)
        monkeypatch.setattr(_asgi_request, "RecordedExchange", _endless)
    elif without == "tombstone":
        monkeypatch.setattr(
            _asgi_answers, "tombstone", lambda status, _: model.Answer(status, [], b"")
        )
    else:
        monkeypatch.setattr(_asgi_answers, "keeps", lambda outcome: len(outcome.headers) < 2)
    with pytest.raises(AssertionError):
        asyncio.run(_ask_for_much(quick, (b"x" * 101,)))


_STORED, _EXCHANGE = _idempotency_records.stored, _asgi_request.RecordedExchange


def _stored_whole(answer: object, terms: Any, *, failed: bool) -> dict[str, Any]:
    return _STORED(answer, terms._replace(max_body=10_000), failed=failed)


def _endless(body: bytes, to: Any, settling: Any, _most: int, never: Any) -> Any:
    return _EXCHANGE(body, to, settling, 10_000, never)


@given(st.lists(st.tuples(st.sampled_from([*FOUND, "x"]), st.text("a", max_size=5000)), max_size=9))
def test_a_tombstone_is_small(headers: list[tuple[str, str]]):
    """Whatever the app said: few bytes, in the order in which it said them."""
    given_headers = [(name.encode(), value.encode()) for name, value in headers]
    *told, length, mark = _asgi_answers.tombstone(201, given_headers).headers
    assert sum(len(name) + len(value) for name, value in told) <= 4096
    rest = iter(given_headers)
    assert all(pair in rest for pair in told)
    assert (length, mark) == ((b"content-length", b"0"), (b"idempotent-body", b"dropped"))


def test_endless_headers_leave_a_tombstone(quick: Opening):
    """More headers than a record holds are as a body that is too large."""
    many = [(b"x-%d" % n, b"y" * 100) for n in range(1000)]
    shop = Shop(headers=[*many, (b"location", b"/orders/1")])

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            await post(app)
            again = await post(app)
            assert (again.status, again.headers["idempotent-body"]) == (201, "dropped")
            assert again.headers["location"] == "/orders/1"
            assert "yyy" not in await table(app.idempotency.database)
            assert len(shop.orders) == 1

    asyncio.run(main())


# What comes back is hostile


HOSTILE = [
    "headers = 'no json'",
    "headers = '7'",
    "headers = '[[\"a\"]]'",
    "headers = '[[\"a\", 1]]'",
    'headers = \'[["x\\r\\nset-cookie", "a"]]\'',
    'headers = \'[["x", "a\\r\\nset-cookie: b"]]\'',
    'headers = \'[["", "a"]]\'',
    'headers = \'[["x y", "a"]]\'',
    'headers = \'[["x", "\\u20ac"]]\'',
    'headers = \'[["content-length", "5000"]]\'',
    "headers = '" + "[" * 100_000 + "'",
    "status = 99",
    "status = 101",
    "status = 1000",
    "status = NULL",
    "state = 9",
    'body = NULL, headers = \'[["content-length", "5000"]]\'',
]


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_a_garbled_record_is_never_done_again(driver: str, request: Any, tmp_path: Path):
    """Whatever stands in a record, its request is not carried out again: 500, each time."""
    postgres = request.getfixturevalue("postgres") if driver != "sqlite" else None

    async def main() -> None:
        shop = Shop()
        async with edge_of(opening_by(driver, postgres, tmp_path), shop) as app:
            await post(app)
            database = app.idempotency.database
            rows = await database.arun(lambda: said("SELECT * FROM {idempotency}"))
            for change in HOSTILE:
                hostile = f"UPDATE {{idempotency}} SET {change}"  # noqa: S608 - our own
                await database.arun(lambda hostile=hostile: said(hostile))
                for _ in range(2):
                    answer = await post(app)
                    assert (answer.status, answer.json()["reason"]) == (500, "record_garbled")
                await database.arun(lambda: said(GOOD))
                assert (await post(app)).status == 201, change
            assert len(shop.orders) == len(rows) == 1
            assert app.snapshot()["unreadable"] == 2 * len(HOSTILE)

    asyncio.run(main())


GOOD = "UPDATE {idempotency} SET headers = '[]', status = 201, state = 1"


def test_a_cookie_in_the_table_logs_nobody_in(quick: Opening):
    """Who can write into the table cannot make the service set a cookie."""

    async def main() -> None:
        async with edge_of(quick, Shop()) as app:
            await post(app)
            text = 'UPDATE {idempotency} SET headers = \'[["Set-Cookie", "a"], ["x", "b"]]\''
            await app.idempotency.database.arun(lambda: said(text))
            assert (await post(app)).headers == {"x": "b", "idempotent-replayed": "true"}

    asyncio.run(main())
