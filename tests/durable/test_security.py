"""What nobody can do by an Idempotency-Key, nor by writing into the table of records."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.durable import Database, Sqlite, asgi, migrate
from seawall.durable.asgi import IdempotentRequests, scope_text
from seawall.durable.idempotency import Idempotency
from seawall.models import idempotency as model
from tests.durable.asgi_support import KEY, USER, Shop, edge_of, first, post, said, user
from tests.durable.conftest import Opening, opening_by
from tests.support import falsified
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
        ({"require": 1}, "True or False"),
        ({"wait": -1}, "0 or more"),
        ({"max_request_body": 0}, "1 or more"),
        ({"never_store": "x-a"}, "a list of headers"),
    ],
)
def test_arguments_are_checked(database: Database, options: dict[str, Any], says: str):
    """A mistake is told where it is made, with what to write instead."""
    given_options = {"idempotency": Idempotency(database), "routes": ["/orders"], "scope": user}
    with pytest.raises((TypeError, ValueError), match=says):
        IdempotentRequests(Shop(), **{**given_options, **options})


def test_somebody_unknown_has_no_scope(quick: Opening):
    """None, nothing, and a tuple with a part missing are refused; what is no text is an error."""
    shop = Shop()
    answers: list[Any] = [None, "", ("acme", None), ("", "ann"), ()]

    async def main() -> None:
        async with edge_of(quick, shop, scope=lambda _: answers.pop()) as app:
            for _ in range(5):
                assert (await post(app)).status == 403
            answers.append(7)
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
        """Nobody is answered with what another, another method or another path was answered."""
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

    @settings(max_examples=40)
    @given(ASKED)
    def check(asked: list[Asked]) -> None:
        crossing.check(asked)

    check()


@pytest.mark.parametrize("without", ["scope", "path", "operation"])
def test_without_its_parts_a_name_would_cross(
    database: Database, monkeypatch: pytest.MonkeyPatch, without: str
):
    """Ablation: parts put together without a bound, no path in the payload, no method."""
    if without == "scope":
        monkeypatch.setattr(asgi, "scope_text", "".join)
    elif without == "path":
        monkeypatch.setattr(asgi, "fingerprint_of", lambda *parts: model.fingerprint_of(parts[-1]))
    else:
        monkeypatch.setattr(
            asgi, "Keyed", lambda whose, _operation, *rest: asgi_keyed(whose, "same", *rest)
        )
    asgi_keyed = _KEYED
    assert falsified(Crossing(database).check, ASKED)


_KEYED = asgi.Keyed


@given(
    st.lists(
        st.one_of(
            st.text(min_size=1, max_size=300),
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


async def _leave_secrets(opening: Opening) -> tuple[str, list[Answer]]:
    shop = Shop(headers=[*SECRETS, (b"location", b"/orders/1")])
    async with edge_of(opening, shop, never_store=["X-Session"]) as app:
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


def test_without_the_list_they_would_be(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: without the list of headers that are never stored, they are in the table."""
    monkeypatch.setattr(model, "NEVER_STORED", frozenset())
    stored, _ = asyncio.run(_leave_secrets(quick))
    assert "very-secret-1" in stored
    assert "very-secret-3" in stored


async def _leave_a_key(opening: Opening) -> str:
    async with edge_of(opening, Shop()) as app:
        await post(app)
        return await table(app.idempotency.database)


def test_keys_are_stored_hashed(opening: Opening):
    """Who reads the table learns no key: with one, somebody could ask for its answer."""
    assert "8e03978e" not in asyncio.run(_leave_a_key(opening))


def test_without_the_hash_they_would_be_there(quick: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: a key that is not hashed is found in the table."""
    monkeypatch.setattr(model, "_digest", lambda _person, parts: b"".join(map(bytes, parts)))
    assert "8e03978e" in asyncio.run(_leave_a_key(quick))


# How much is stored


@pytest.mark.parametrize("parts", [(b"x" * 101,), (b"x" * 60, b"x" * 41), (b"x" * 50,) * 9])
def test_large_answers_leave_a_tombstone(opening: Opening, parts: tuple[bytes, ...]):
    """The first has it all; a repeat its status alone, and nothing is ever done again."""
    length = str(sum(map(len, parts))).encode()
    shop = Shop(*parts, headers=[(b"content-length", length), (b"etag", b"1")])

    async def main() -> None:
        async with edge_of(opening, shop, idempotency={"max_body": 100}) as app:
            assert (await post(app)).body == b"".join(parts)
            for _ in range(3):
                again = await post(app)
                assert (again.status, again.body) == (201, b"")
                assert again.headers["idempotent-body"] == "dropped"
                assert again.headers["content-length"] == "0"
                assert not first(again)
            assert "xxx" not in await table(app.idempotency.database)
            assert shop.orders == [b"book"]
            assert app.snapshot()["dropped_bodies"] == 1

    asyncio.run(main())


def test_endless_headers_leave_a_tombstone(quick: Opening):
    """More headers than a record holds are as a body that is too large."""
    shop = Shop(headers=[(b"x-%d" % n, b"y" * 100) for n in range(1000)])

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            await post(app)
            again = await post(app)
            assert (again.status, again.headers["idempotent-body"]) == (201, "dropped")
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
