"""Secrets inside error texts are hidden, whatever they are made of, wherever errors are shown."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seawall
from seawall import _redaction as module
from seawall import registry
from seawall._failures import described
from seawall._redaction import printable, redacted, safe_line, safe_text
from seawall.events import HealthChanged, subscribe
from seawall.web import Edge, Health, Unhealthy
from tests.support import falsified
from tests.web.support import ask

SECRET = "hunter2"  # noqa: S105 - it is to be found in texts
NASTY = st.text("'\"/\\@:?#&=%[](){}<>,;.!$*+-_~|^`", max_size=5)
"""What a generated password may be full of."""


def secrets_between(parts: tuple[str, str]) -> str:
    """Return a password with odd characters before, in and after it."""
    return f"{parts[0]}{SECRET}{parts[1]}"


PASSWORDS = st.tuples(NASTY, NASTY).map(secrets_between)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("404 for 'https://u:hunter2@v:8443/hunter2?k=hunter2#hunter2'", "404 for 'https://v:8443/...'"),
        ("to postgres://bob:h'u/n\"hunter2@w?r#1@db:5432/x now", "to postgres://*** now"),
        ("redis://:hunter2@[::1]:6379/0 is away", "redis://[::1]:6379/... is away"),
        ("http://v/p?token=a'hunter2\"c timed out", "http://v/... timed out"),
        ("with url: /hunter2/a?b=hunter2 (Caused by x)", "with url: /... (Caused by x)"),
        ("https://vendor/a@hunter2 is away", "https://*** is away"),
        ("GET /a?token='hunter2' failed", "GET /a?... failed"),
        ("bob:hunter2@db:5432 refused", "***@db:5432 refused"),
        ("bob:hunter2://@db:5432 refused", "*** refused"),
        ("login failed for bob/hunter2@//db:1521/x", "login failed for ***"),
        ("headers: Authorization=Bearer hunter2", "headers: Authorization=***"),
        ("bob@home:hunter2@db refused", "***@db refused"),
        ("http://bob:hunter2 and@db", "http://*** and@db"),
        ("401 with Authorization: Bearer hunter2 hunter2", "401 with Authorization: ***"),
        ("Proxy-Authorization: Basic hunter2==", "Proxy-Authorization: ***"),
        ("X-Api-Key: hunter2 hunter2", "X-Api-Key: ***"),
        ("Cookie: a=hunter2; b=hunter2", "Cookie: ***"),
        ("{'Authorization': 'Bearer hunter2', 'b': 'c'}", "{'Authorization': ***"),
        ("[(b'authorization', b'Bearer hunter2')]", "[(b'authorization', ***"),
        ('{"password":"x\\"hunter2"}', '{"password":***'),
        ('{\\"api_key\\": \\"hunter2\\"}', '{\\"api_key\\": ***'),
        ("host=db password=hunter\\ hunter2 user=x", "host=db password=*** user=x"),
        ("password='it's hunter2' for bob", "password=*** for bob"),
        ("PASSWORD = hunter2, user=bob", "PASSWORD = *** user=bob"),
        ("client_secret=hunter2&x=1", "client_secret=***"),
        ("auth=('bob', 'hunter2')", "auth=***"),
        ("the bearer hunter2 is unknown", "the bearer ***"),
        ("basic aHVudGVyMg== is wrong", "basic ***"),
        ("bearer x-api-key: hunter2", "bearer ***"),
        ("İ password=hunter2", "i̇ password=***"),
    ],
)  # fmt: skip
def test_what_is_hidden(text: str, shown: str) -> None:
    """URLs, logins, queries, named values and headers lose what may be secret, and no more."""
    assert redacted(text) == shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    "text",
    [
        "Error 111 connecting to 127.0.0.1:6379. Connection refused.",
        'password authentication failed for user "bob"',
        "max_tokens=5 is too much, at 12:30:00",
        "why? because; really?",
        "write to ops@example.com",
        "no route to http://vendor:8080",
        "All connection attempts failed",
        "basic usage of a token",
        "",
    ],
)
def test_what_is_harmless_stays(text: str) -> None:
    """A text without secrets is shown as it is."""
    assert redacted(text) == text


FRAMES = st.sampled_from(
    [
        "cannot reach https://bob:{}@vendor:443/x today",
        "cannot reach postgresql+asyncpg://{}@db/x today",
        "'https://vendor/path?key={}' timed out",
        "Max retries exceeded with url: /hook/{} (x)",
        "bob:{}@db:5432 refused",
        "bob/{}@db refused",
        "sent Authorization=Bearer {}",
        "Authorization: Bearer {}",
        "bad header Proxy-Authorization: {} sent",
        "x-api-key: {}",
        "headers={{'Cookie': 'a={}; b=c'}}",
        'body {{"password": "{}", "user": "bob"}}',
        "dsn: host=db password={} dbname=x",
        "connect(user='bob', password='{}', port=1)",
        'connect(user="bob", token="{}")',
        "?access_token={} is old",
    ]
)


def hidden(case: tuple[str, str, str]) -> None:
    """Check that a password in such a text is not shown."""
    frame, password, other = case
    text = frame.format(password)
    assert SECRET not in redacted(text)
    assert SECRET not in redacted(f"{other} {text} {other}")
    assert SECRET not in safe_line(f"{text} {other}")
    assert SECRET not in described(OSError(text))


CASES = st.tuples(FRAMES, PASSWORDS, st.text(max_size=20))


@given(CASES)
def test_no_password_is_shown_whatever_it_is_made_of(case: tuple[str, str, str]) -> None:
    """Quotes, slashes, question marks and at signs in a password do not end it."""
    hidden(case)


def test_an_address_that_ends_at_a_quote_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if a quote ends a URL, as in the text around it."""
    import re

    monkeypatch.setattr(module, "_ADDRESS", re.compile(r"(\S*?)://([^\s'\"<>]*)"))
    assert falsified(hidden, CASES)


@given(st.text(max_size=300), st.integers(1, 80))
def test_any_text_becomes_one_short_printable_line(text: str, longest: int) -> None:
    """Nothing raises, and no line break, control character or half of a pair is left."""
    for line in (safe_line(text, longest), printable(text, longest)):
        assert line.isprintable()
        assert len(line) <= longest
    assert redacted(redacted(text)).count(SECRET) == 0


@given(st.integers(3_900, 4_100))
def test_a_cut_makes_no_secret_look_like_a_host(length: int) -> None:
    """Where a long text is cut, half of a URL is left out: it may be half of a password."""
    url = f"https://{SECRET}-{'p' * 50}@vendor/"
    short = "https://v/" + "x" * 90  # much is hidden, so that what comes late is shown
    many = " ".join([short] * 60)
    for text in (f"{many[:length]} {url}", f"{many[: length - len(url) // 2]} {url}"):
        assert SECRET not in safe_line(text, 4_000)
        assert SECRET not in safe_text(text)


@pytest.mark.parametrize(
    "part",
    ["a", "a ", "://", "@", ":@", "a:b@", "?", "password=", "password='", "password   ", "token: ",
     "x-", "authorization", "api_", "\\", "'", '"', "bearer ", "url: /", 'secret = "', "pass",
     "http://a:b@c/d "],
)  # fmt: skip
def test_redaction_takes_linear_time(part: str) -> None:
    """Four times the text takes about four times the time, not sixteen times."""

    def seconds(length: int) -> float:
        text = (part * length)[:length]
        took = []
        for _ in range(5):
            began = time.process_time()
            redacted(text)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(65_536) < 10 * max(seconds(16_384), 0.0005)


class Mute(Exception):
    """An error that cannot say anything."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_errors_are_described_by_kind_and_first_line() -> None:
    """Below the first line drivers tell parameters; an error without words has its kind."""
    assert described(ValueError("a\nb")) == "ValueError: a"
    assert described(ValueError("\n  a  \nb")) == "ValueError: a"
    assert described(ValueError()) == "ValueError"
    assert described(Mute()) == "Mute"
    assert described(ValueError("x" * 900), 20) == "ValueError: xxxxxxx…"
    assert described(ValueError("a\x1b[31mb\0")) == "ValueError: a\\x1b[31mb\\x00"
    strange = type("A\nB", (Exception,), {})
    assert described(strange("c")) == "A\\nB: c"


# Where errors are shown

LEAKY = f"cannot connect: postgres://bob:it's/{SECRET}@db/x, Authorization: Bearer {SECRET}"


def test_errors_of_health_checks_are_redacted_everywhere() -> None:
    """Neither the probes, nor a snapshot, nor an event shows the password of a check's error."""
    changed: list[HealthChanged] = []

    async def main() -> None:
        health = Health(details=lambda _incoming: True, name="redacted")

        def broken() -> None:
            raise ConnectionError(LEAKY)

        health.add("raises", broken)
        health.add("returns", lambda: Unhealthy(LEAKY))
        health.add("says", lambda: LEAKY)
        edge = Edge(plain, name="redacted-edge", health=health)
        answer = await ask(edge, "/health/deep")
        shown = json.dumps([health.snapshot(), edge.snapshot(), seawall.snapshot()], default=str)
        for text in (answer.body.decode(), shown, *(event.output for event in changed)):
            assert SECRET not in text
        assert "ConnectionError: cannot connect: postgres://***" in shown

    stop = subscribe(changed.append, HealthChanged)
    try:
        asyncio.run(main())
    finally:
        stop()
    assert len(changed) == 4


async def plain(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer with 200."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Leaky:
    """Something whose snapshot fails."""

    def snapshot(self) -> dict[str, Any]:
        """Fail with a password in the text."""
        raise ConnectionError(LEAKY)


def test_errors_of_snapshots_are_redacted() -> None:
    """What cannot be read tells why, without the password."""
    thing = Leaky()
    registry.enter(thing, "leaky", "one")
    (shown,) = seawall.snapshot()["leaky"]
    assert shown["snapshot_error"].startswith("ConnectionError: cannot connect: postgres://***")
    assert SECRET not in json.dumps(shown)
