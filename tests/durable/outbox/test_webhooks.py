"""Signed webhooks, held against an independent implementation of Standard Webhooks."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook as Independent
from standardwebhooks import WebhookVerificationError
from werkzeug.datastructures import Headers

from seawall.durable import Database, Inbox, OutboxEvent, Sqlite, Webhook, migrate, webhooks
from seawall.durable.webhooks import sign_webhook, verify_webhook
from seawall.errors import BadSignature, NotDelivered
from seawall.web.fastapi import protect

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests
OTHER = "whsec_" + base64.b64encode(bytes(range(64))).decode().rstrip("=")
BODY = b'{"type":"order.made","total":30}'
NOW = 1_700_000_000
HEADERS = sign_webhook(SECRET, BODY, message_id="msg_1", now=NOW)

IDS = st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True)


def refused(headers: dict[str, str], body: bytes = BODY, secret: str = SECRET) -> None:
    with pytest.raises(BadSignature):
        verify_webhook(secret, headers, body, now=NOW)


@given(IDS, st.text(max_size=60), st.sampled_from([SECRET, OTHER]))
def test_the_independent_package_accepts_ours(message_id: str, text: str, secret: str):
    """Its verification takes our headers, also when a second secret signs with the first."""
    headers = sign_webhook([OTHER, SECRET], text.encode(), message_id=message_id)
    Independent(secret).verify(text.encode(), headers, json_parse=False)


@given(IDS, st.text(max_size=60), st.sampled_from([SECRET, OTHER]))
def test_ours_accepts_the_independent_package(message_id: str, text: str, secret: str):
    """We verify its signature, with the other secret before it or behind it, and learn the id."""
    sent = datetime.fromtimestamp(NOW, UTC)
    headers = {
        "Webhook-Id": message_id,  # the case of a header's name means nothing
        "WEBHOOK-TIMESTAMP": str(NOW),
        "webhook-signature": Independent(secret).sign(message_id, sent, text),
    }
    for secrets in (secret, [SECRET, OTHER], (OTHER, SECRET)):
        assert verify_webhook(secrets, headers, text.encode(), now=NOW + 300) == message_id


def test_headers_of_flask_are_read():
    """They have names and values as those of others have, and are not a Mapping."""
    verify_webhook(SECRET, Headers(HEADERS), BODY, now=NOW)
    twice = Headers([*HEADERS.items(), ("Webhook-Id", "msg_2")])
    with pytest.raises(BadSignature):
        verify_webhook(SECRET, twice, BODY, now=NOW)


def test_a_change_of_any_byte_is_refused():
    """Each bit of each byte of body, id, time and signature counts, as in the other package."""
    verify_webhook(SECRET, HEADERS, BODY, now=NOW)
    tried = 0
    for place in range(len(BODY)):
        for bit in range(8):
            changed = bytearray(BODY)
            changed[place] ^= 1 << bit
            refused(HEADERS, bytes(changed))
            tried += 1
    for name, value in HEADERS.items():
        for place in range(len(value)):
            for bit in range(7):
                changed = bytearray(value.encode())
                changed[place] ^= 1 << bit
                refused(HEADERS | {name: changed.decode()})
                tried += 1
    assert tried == 8 * len(BODY) + 7 * sum(map(len, HEADERS.values()))


def test_what_is_cut_or_moved_between_the_parts_is_refused():
    """Id, time and body cannot exchange bytes; a header is neither missing nor there twice."""
    refused(HEADERS | {"webhook-id": f"msg_1.{NOW}"})
    refused(HEADERS | {"webhook-timestamp": f"0{NOW}"})
    refused(HEADERS | {"webhook-timestamp": f"{NOW}.0"})
    refused(HEADERS | {"Webhook-Id": "msg_1"})
    refused(HEADERS | {"webhook-signature": HEADERS["webhook-signature"].removeprefix("v1,")})
    refused(HEADERS | {"webhook-signature": HEADERS["webhook-signature"].replace("v1,", "v2,")})
    refused(HEADERS | {"webhook-signature": "v1, " * 2000 + HEADERS["webhook-signature"]})
    for name in HEADERS:
        refused({other: value for other, value in HEADERS.items() if other != name})


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_no_header_is_too_strange(message_id: str, sent: str, signature: str):
    """Whatever a stranger sends is refused in the same way."""
    named = zip(HEADERS, (message_id, sent, signature), strict=True)
    refused(dict(named))
    refused(HEADERS | {"webhook-signature": signature})


@pytest.mark.parametrize("age", [-301, 301, 10**6])
def test_old_and_future_messages_are_refused(age: int):
    """The signature is good and the time is not; both packages say so."""
    with pytest.raises(BadSignature, match="300 s ago"):
        verify_webhook(SECRET, HEADERS, BODY, now=NOW + age)
    sent = sign_webhook(
        SECRET, BODY, message_id="m", now=int(datetime.now(UTC).timestamp()) - age * 2
    )
    with pytest.raises(WebhookVerificationError):
        Independent(SECRET).verify(BODY, sent)
    with pytest.raises(BadSignature):
        verify_webhook(SECRET, sent, BODY)
    assert verify_webhook(SECRET, HEADERS, BODY, now=NOW + age, tolerance=10**6) == "msg_1"


def test_another_secret_is_refused():
    """By ours and by the other package; and by both secrets of a rotation that is over."""
    refused(HEADERS, secret=OTHER)
    with pytest.raises(BadSignature):
        verify_webhook([OTHER, OTHER], HEADERS, BODY, now=NOW)
    headers = sign_webhook(OTHER, BODY, message_id="msg_1")
    with pytest.raises(WebhookVerificationError):
        Independent(SECRET).verify(BODY, headers)


def test_the_comparison_is_what_refuses(monkeypatch: pytest.MonkeyPatch):
    """Ablation: without it any signature is good."""
    refused(HEADERS, secret=OTHER)
    monkeypatch.setattr(webhooks, "compare_digest", lambda _one, _other: True)
    verify_webhook(OTHER, HEADERS, BODY, now=NOW)


@pytest.mark.parametrize(
    "secret", ["whsec_ZmV3Yml0cw==", "hunter2hunter2hunter2hunter2", b"x" * 32]
)
def test_a_bad_secret_is_refused_and_not_shown(secret: str):
    """A malformed secret may still be a real one, so the error does not show it."""
    with pytest.raises((TypeError, ValueError), match="whsec_") as raised:
        sign_webhook(secret, BODY, message_id="m")
    assert str(secret)[-8:] not in str(raised.value)


# A receiver


@pytest.fixture
def receiver(tmp_path: Path):
    """Return an app that takes each message once, and the list of what it took."""
    source = Sqlite(tmp_path / "receiver.db")
    database = Database(source, name=f"receiver {tmp_path.name}")
    migrate(database)
    inbox = Inbox(database)
    source.run(lambda raw: raw.execute("CREATE TABLE taken (body blob)"))
    app = FastAPI()

    @app.post("/events", status_code=204)
    async def events(request: Request) -> None:
        body = await request.body()
        message_id = verify_webhook([OTHER, SECRET], request.headers, body)
        with (
            database.transaction() as connection,
            inbox.once(connection, "events", message_id) as first,
        ):
            if first:
                connection.execute("INSERT INTO taken VALUES (?)", [body])

    protect(app)
    yield app, lambda: source.run(lambda raw: raw.execute("SELECT body FROM taken").fetchall())
    database.close()
    source.close()


def test_a_replay_has_one_effect(receiver: tuple[FastAPI, Callable[[], list[tuple[bytes]]]]):
    """A recorded request that is sent again is answered, and does nothing."""
    app, taken = receiver

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            good = sign_webhook(SECRET, BODY, message_id="msg_1")
            another_id = good | {"webhook-id": "msg_2"}  # a replay that pretends to be new
            posts = [
                (good, BODY),
                (good, BODY),
                (another_id, BODY),
                (good, BODY + b" "),
                ({}, BODY),
            ]
            return [
                (await client.post("/events", content=body, headers=headers)).status_code
                for headers, body in posts
            ]

    assert asyncio.run(main()) == [204, 204, 403, 403, 403]
    assert taken() == [(BODY,)]


def test_the_sink_and_the_receiver_agree(receiver: tuple[FastAPI, Callable[[], list]]):
    """An event that is delivered twice is taken once; that of a stranger is not taken."""
    app, taken = receiver
    event = OutboxEvent("abc", "order", "7", 1, "order.made", BODY, {}, 1.0)

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as client:
            for secret in (SECRET, [SECRET, OTHER]):
                hook = Webhook("http://receiver/events", client=client, secret=secret)
                await hook(event)
                hook.close()
            strange = "whsec_" + "YWJj" * 8
            hook = Webhook("http://receiver/events", client=client, secret=strange)
            with pytest.raises(NotDelivered, match="403"):
                await hook(event._replace(id="abd"))
            hook.close()

    asyncio.run(main())
    assert taken() == [(BODY,)]
