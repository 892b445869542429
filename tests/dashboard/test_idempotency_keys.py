"""An operator looks up an idempotency key on the dashboard, and forgets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard import Dashboard
from seawall.dashboard.actions.idempotency_keys import answer_about_keys
from seawall.dashboard.responses import RequestRefused
from seawall.durable import Database, Idempotency, NewEvent, Outbox, Sqlite, migrate
from seawall.durable.http.middleware import read_scope, scope_text
from tests.dashboard.app_support import Browser, post
from tests.support import nobody_else
from tests.web.support import Answer

ASKED = {
    "act": "show",
    "records": "payments",
    "scope": '["acme","ann"]',
    "operation": "POST /pay",
    "key": "k-secret",
}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Idempotency]:
    """Give records with one key, of (acme, ann), and an event."""
    nobody_else(monkeypatch)
    source = Sqlite(tmp_path / "keys.db")
    database = Database(source, name="keys")
    migrate(database)
    keys = Idempotency(database, name="payments")
    naming = {"scope": scope_text(("acme", "ann")), "operation": "POST /pay", "key": "k-secret"}
    with database.transaction() as conn, keys.once(conn, **naming, fingerprint=None) as once:
        event = NewEvent("payment", "7", "paid", {"card": "4111"})
        once.answer({"card": "4111"}, outbox=Outbox(database), events=[event])
    yield keys
    database.close()
    source.close()


def asked(*bodies: Any, operator: str | None = "ann") -> list[Answer]:
    """Return the answers to posts of the page, one after the other."""

    async def main() -> list[Answer]:
        app = Dashboard(local=True, operate=lambda _: operator, pod="here")
        browser = Browser(app)
        await browser.open()
        return [await browser.act(body, "/keys") for body in bodies]

    return asyncio.run(main())


def test_a_key_is_looked_up_and_forgotten(keys: Idempotency, caplog: pytest.LogCaptureFixture):
    """State and events are shown, the answer is not; actions are logged without the key."""
    forget = {**ASKED, "act": "forget"}
    listed, shown, done, again, gone = asked({"act": "list"}, ASKED, forget, forget, ASKED)
    assert listed.json() == {"records": ["payments"]}
    record = shown.json()["record"]
    assert (record["state"], record["takeovers"]) == ("succeeded", 0)
    (event,) = record["events"]
    assert (event["type"], event["aggregate_id"], event["state"]) == ("paid", "7", "pending")
    assert b"4111" not in shown.body
    assert done.json() == {"done": "Forgotten."}
    assert again.json() == {"done": "There is no record of this key."}
    assert gone.json() == {"record": None}
    (logged,) = [each for each in caplog.records if each.name == "seawall.dashboard"]
    assert (logged.levelno, logged.seawall_act) == (logging.WARNING, "forget")  # type: ignore[attr-defined]
    assert "'ann' (127.0.0.1) forgot a key of 'POST /pay'" in logged.getMessage()
    assert "k-secret" not in caplog.text
    assert keys.snapshot()["forgotten"] == 1


def test_only_an_operator_may_ask(keys: Idempotency):
    """Also to look: and with the token of the page's session, as for every act."""
    (answer,) = asked(ASKED, operator=None)
    assert answer.status == 403

    async def forged() -> Answer:
        app = Dashboard(local=True, operate=lambda _: "ann", pod="here")
        return await post(app, "/keys", {**ASKED, "act": "forget"}, Browser(app).headers.items())

    assert asyncio.run(forged()).status == 403
    assert keys.lookup(scope_text(("acme", "ann")), "POST /pay", "k-secret") is not None


def test_what_is_in_flight_is_left_alone(keys: Idempotency):
    """A key in flight cannot be forgotten; a database error is reported without its text."""
    keys.reserve("bob", "POST /pay", "k", None)
    busy = {**ASKED, "scope": "bob", "key": "k", "act": "forget"}
    assert asked(busy)[0].status == 409

    async def broken(*_named: Any) -> None:
        raise OSError("secret host")

    keys.alookup = broken  # type: ignore[method-assign]
    (answer,) = asked(ASKED)
    assert (answer.status, b"secret" in answer.body) == (503, False)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"act": "drop"}, "act"),
        ({"records": "others"}, "records"),
        ({"records": 5}, "records"),
        ({"scope": "[1,"}, "scope"),
        ({"scope": "[1.5]"}, "scope"),
        ({"scope": None}, "scope"),
        ({"operation": ""}, "operation"),
        ({"key": "k" * 300}, "key"),
        ({"key": "a b"}, "key"),
    ],
)
@pytest.mark.usefixtures("keys")
def test_mistakes_are_told(changed: dict[str, Any], says: str):
    """With what to write instead."""
    (answer,) = asked({**ASKED, **changed})
    assert answer.status == 422
    assert says in answer.json()["detail"]


@given(st.one_of(st.none(), st.integers(), st.text(), st.dictionaries(st.text(), st.text())))
def test_no_json_is_more_than_refused(body: Any):
    """Whatever is posted is an answer or a refusal."""
    tell = logging.getLogger("seawall.test").debug
    with pytest.raises(RequestRefused):
        asyncio.run(answer_about_keys(body, "ann", "here", tell))


def test_scopes_are_read_as_they_are_stored():
    """Text, lists with numbers, and digests of long ones."""
    assert read_scope("acme") == scope_text("acme") == "acme"
    assert read_scope('["acme", 7]') == scope_text(("acme", 7))
    long = scope_text(("acme", "x" * 300))
    assert long is not None
    assert read_scope(long) == long
