from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Bulkhead, Guard, RedisStore
from seawall.dashboard import Dashboard, Visit, _auth, _csrf, _listening
from seawall.dashboard._answers import POLICY, to_json
from seawall.testing import run_virtual
from tests.dashboard.app_support import HOME, ORIGIN, Browser, Shown, Viewer, get, post
from tests.shared.conftest import client, new_store, redis_url
from tests.support import falsified, let_pass
from tests.web.support import ask, http_scope, serve

__all__ = ["client", "new_store", "redis_url"]

ISOLATE = {"pod": "here", "guard": "vendor", "layer": 0, "act": "isolate"}
PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "<!--",
    "\u2028\u2029&amp;",
    "data: x\n\nevent: message\ndata: {}",
)

pytestmark = pytest.mark.alone  # some start real servers


def operated(**options: Any) -> Shown:
    return Shown(operate=lambda _: "ann", **options)


# --- What is sent ---


@pytest.mark.parametrize("path", ["/", "/state", "/session", "/nothing", "/act", "/page/x.js"])
def test_every_answer_is_locked_down(path: str):
    """Whatever is answered, its headers allow no frame, sniffing, keeping, or other origin."""

    async def main() -> None:
        refused = Dashboard(allow=lambda _: False)
        for app in (operated(), refused):
            headers = (await get(app, path, ORIGIN)).headers
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["x-frame-options"] == "DENY"
            assert "camera=()" in headers["permissions-policy"]
            assert not [name for name in headers if name.startswith("access-control")]

    run_virtual(main())


def test_the_policy_lets_only_our_own_files_run():
    """No inline script, no eval, no other host, no frame, no form: exactly this policy."""
    assert POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )


@pytest.mark.parametrize("name", PAYLOADS)
def test_names_break_out_of_nothing(name: str):
    """A guard may be called anything: what is sent is plain JSON in one line, without markup."""

    async def main() -> None:
        guard = Guard(name, Bulkhead(1))
        app = Shown(title=name, operate=lambda _: name)
        viewer = Viewer(app)
        await let_pass(0.5)
        body = (await get(app, "/state")).body
        assert not re.search(rb"[<>&\x00-\x1f\x7f-\xff]", body)
        assert json.loads(body)["views"][0]["guards"][0]["name"] == name
        assert viewer.answer.body.count(b"\n") == 5
        assert viewer.events[0]["title"] == name
        await viewer.leave()
        guard.close()

    run_virtual(main())


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_json_has_no_character_that_could_end_a_script(value: Any):
    """Any text comes through whole, and none of it is markup, a line break, or not ASCII."""
    written = to_json({"x": value, str(value): 1})
    assert not re.search(rb"[<>&\x00-\x1f\x7f-\xff]", written)
    assert json.loads(written)["x"] == value


@given(
    st.text(max_size=30)
    | st.sampled_from(["../app.py", "..%2fapp.py", "/etc/passwd", "....//x", "index.html\0", "."])
)
def test_no_path_leads_out_of_the_table_of_files(name: str):
    """What is asked for is looked up by name: a path that is none of them is not found."""

    async def main() -> None:
        answer = await get(Shown(), f"/page/{name}")
        assert answer.status == 404

    asyncio.run(main())


# --- Who may look ---


def asked_of(
    *headers: tuple[str, str], client: Any = ("127.0.0.1", 5), server: Any = ("127.0.0.1", 80)
) -> int:
    """Return with which status this machine's own dashboard answers such a request."""

    async def main() -> int:
        answer = await ask(Shown(), "/session", headers=headers, client=client, server=server)
        assert answer.status in (200, 403)
        assert answer.status == 200 or "machine itself alone" in answer.json()["detail"]
        return answer.status

    return asyncio.run(main())


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:80", "[::1]", "[::1]:8000"],
)
def test_this_machine_may_look(host: str):
    """From loopback to loopback, by a loopback's name: that is this machine."""
    assert asked_of(("host", host)) == 200
    assert asked_of(("host", host), client=("::1", 5), server=("::1", 80)) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "localhost:80@evil",
        "10.0.0.1",
        "0.0.0.0",  # noqa: S104 - refused
        "[::]",
        "[::1",
        "::1",
        "",
        "localhost,evil.example",
        "localhost:port",
    ],
)
def test_a_name_that_others_point_here_is_refused(host: str):
    """DNS rebinding: the connection is local, but the browser believes it is at another site."""
    assert asked_of(("host", host)) == 403
    assert asked_of() == 403
    assert asked_of(HOME, ("host", host)) == 403


@pytest.mark.parametrize(
    "header",
    ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-X", "Via", "X-Real-IP"],
)
@pytest.mark.parametrize("value", ["127.0.0.1", "", "for=127.0.0.1"])
def test_what_comes_through_a_proxy_is_refused(header: str, value: str):
    """A proxy on this machine speaks for the whole world, whatever it says."""
    assert asked_of(HOME, (header, value)) == 403


@pytest.mark.parametrize(
    "addresses",
    [
        {"client": ("10.0.0.7", 5)},
        {"client": ("::ffff:10.0.0.7", 5)},
        {"client": ("fe80::1%lo", 5)},
        {"client": ("localhost", 5)},
        {"client": None},
        {"client": None, "server": ("/run/app.sock", None)},
        {"server": ("10.0.0.7", 80)},
        {"server": ("0.0.0.0", 80)},  # noqa: S104
        {"server": None},
    ],
)
def test_other_addresses_are_refused(addresses: dict[str, Any]):
    """Another machine, an address that others reach, a socket without an address: not this one."""
    assert asked_of(HOME, **addresses) == 403


LOCAL_CASES = st.fixed_dictionaries(
    {
        "host": st.sampled_from(["localhost:8000", "127.0.0.1", "evil.example", None]),
        "client": st.sampled_from(["127.0.0.1", "::1", "10.0.0.7", None]),
        "server": st.sampled_from(["127.0.0.1", "::1", "10.0.0.7", None]),
        "proxy": st.sampled_from([None, None, "via", "forwarded", "x-forwarded-for"]),
    }
)


def only_the_local_is_let_in(case: dict[str, Any]) -> None:
    headers = [] if case["host"] is None else [("host", case["host"])]
    headers += [] if case["proxy"] is None else [(case["proxy"], "x")]
    client = None if case["client"] is None else (case["client"], 5)
    server = None if case["server"] is None else (case["server"], 80)
    right = (
        case["host"] in ("localhost:8000", "127.0.0.1")
        and case["client"] in ("127.0.0.1", "::1")
        and case["server"] in ("127.0.0.1", "::1")
        and case["proxy"] is None
    )
    assert (asked_of(*headers, client=client, server=server) == 200) == right


@given(LOCAL_CASES)
def test_nothing_but_the_right_combination_is_local(case: dict[str, Any]):
    """Each part counts: with all of them right it is this machine, else it is not."""
    only_the_local_is_let_in(case)


@pytest.mark.parametrize("part", ["_is_loopback_name", "_is_of_proxy", "is_loopback"])
def test_each_part_of_being_local_is_needed(part: str, monkeypatch: pytest.MonkeyPatch):
    """Without one of the checks, somebody would be let in who is not this machine."""
    monkeypatch.setattr(_auth, part, lambda _: part != "_is_of_proxy")
    assert falsified(only_the_local_is_let_in, LOCAL_CASES)


def _raises(_visit: Visit) -> bool:
    raise OSError("the directory of users is away\nFAKE LOG LINE")


async def _later(visit: Visit) -> bool:
    await let_pass(0.01)
    return visit.header("authorization") == "Bearer right"


async def _hangs(_visit: Visit) -> bool:
    await asyncio.Event().wait()
    return True


@pytest.mark.parametrize(
    ("allow", "status"),
    [
        (lambda _: True, 200),
        (lambda _: False, 403),
        (lambda _: None, 403),
        (lambda _: "yes", 403),
        (lambda _: 1, 403),
        (lambda _: object(), 403),
        (_raises, 403),
        (_hangs, 403),
        (_later, 200),
        (lambda visit: visit.cookies.get("login") == "a=b", 200),
        (lambda visit: visit.query["key"] == "v 1", 200),
        (lambda visit: visit.client == "10.0.0.7", 200),
        (lambda visit: visit.scope["user"] == "ann", 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/state", "/events", "/session", "/nothing"])
def test_only_true_lets_in(allow: Any, status: int, path: str):
    """What fails, hangs, or says anything but True is refused, on every path; nothing is 500."""

    async def main() -> None:
        app = Shown(allow=allow, local=False)
        answer = await get(
            app,
            path,
            ("authorization", "Bearer right"),
            ("cookie", "x=1; login=a=b"),
            query_string=b"key=v+1",
            client=("10.0.0.7", 5),
            user="ann",
            method="HEAD" if path == "/events" else "GET",
        )
        wanted = (status,) if status == 403 else (200, 404)
        assert answer.status in wanted

    run_virtual(main())


def test_a_callback_that_fails_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture):
    """Whoever is refused by a failure cannot fill the log, nor write lines into it."""

    async def main() -> None:
        app = Shown(allow=_raises)
        for _ in range(50):
            await get(app, "/")
        await let_pass(61.0)
        await get(app, "/")

    run_virtual(main())
    assert len(caplog.records) == 2
    assert "\n" not in caplog.records[0].getMessage()


def test_a_cookie_that_is_given_twice_counts_for_nothing():
    """Nobody knows who set which of two cookies of one name; neither is believed."""
    twice = http_scope(headers=[("cookie", "a=1; b=2; a=3"), ("cookie", "c=4; b=5")])
    assert dict(Visit.of(twice).cookies) == {"c": "4"}
    many = http_scope(headers=[("cookie", ";".join(f"n{i}=1" for i in range(10_000)))])
    assert len(Visit.of(many).cookies) == 100


# --- Who may act: everything must be right ---


def acted(changed: dict[str, str | None], *, method: str = "POST", path: str = "/act") -> bool:
    """Tell whether a request acts that has these headers instead of the right ones."""

    async def main() -> bool:
        policy = Breaker(consecutive=3)
        guard = Guard("vendor", policy)
        app = operated(secret="s" * 16)
        browser = Browser(app)
        await browser.open()
        other = Browser(operated(secret="s" * 16))
        await other.open()
        special = {"OTHER TOKEN": other.token, "OTHER COOKIE": other.cookie}
        headers = {**browser.headers, **changed}
        sent = [
            (name, special.get(value, value))
            for name, value in headers.items()
            if value is not None
        ]
        body = json.dumps(ISOLATE).encode()
        answer = await ask(app, path, method=method, headers=sent, body=body)
        isolated = policy.state == "isolated"
        assert (answer.status == 200 and method == "POST") == isolated
        assert answer.status < 500
        guard.close()
        return isolated

    return asyncio.run(main())


def test_an_operator_with_the_page_acts():
    """With all of it right, the act is done."""
    assert acted({})
    assert acted({"sec-fetch-site": "same-origin"})
    assert acted({"content-type": "Application/JSON; charset=utf-8"})


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": None},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "https://localhost:8000"},
        {"origin": "http://localhost"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": None, "referer": "http://localhost:8000/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": ""},
        {"cookie": None},
        {"cookie": "seawall_session="},
        {"cookie": f"seawall_session={'a' * 43}"},
        {"cookie": "OTHER COOKIE"},
        {"x-seawall-token": None},
        {"x-seawall-token": ""},
        {"x-seawall-token": "OTHER TOKEN"},
        {"x-seawall-token": "é" * 64},
        {"content-type": None},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=application/json"},
    ],
    ids=str,
)
def test_a_forged_request_does_nothing(changed: dict[str, str | None]):
    """One thing wrong is enough, whatever it is."""
    assert not acted(changed)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "post"])
@pytest.mark.parametrize("header", ["x-http-method-override", "x-http-method", "x-method-override"])
def test_no_other_method_acts(method: str, header: str):
    """Only POST acts: no other method, and no header that asks for another one."""
    assert not acted({header: "POST"}, method=method)
    assert not acted({header: "POST"}, method=method, path="/session")


HEADER_CASES = st.fixed_dictionaries(
    {
        "origin": st.sampled_from(["http://localhost:8000", "http://evil.example", None]),
        "sec-fetch-site": st.sampled_from([None, "same-origin", "cross-site"]),
        "cookie": st.sampled_from(["RIGHT", "RIGHT", "OTHER COOKIE", None]),
        "x-seawall-token": st.sampled_from(["RIGHT", "RIGHT", "OTHER TOKEN", None]),
        "content-type": st.sampled_from(["application/json", "text/plain", None]),
    }
)


def only_the_right_request_acts(case: dict[str, Any]) -> None:
    right = (
        case["origin"] == "http://localhost:8000"
        and case["sec-fetch-site"] in (None, "same-origin")
        and (case["cookie"], case["x-seawall-token"])
        in (("RIGHT", "RIGHT"), ("OTHER COOKIE", "OTHER TOKEN"))
        and case["content-type"] == "application/json"
    )
    assert acted({name: value for name, value in case.items() if value != "RIGHT"}) == right


@given(HEADER_CASES)
def test_nothing_but_the_right_combination_acts(case: dict[str, Any]):
    """Of all combinations, those act in which everything is right (a whole other session is)."""
    only_the_right_request_acts(case)


@pytest.mark.parametrize("safeguard", ["_check_origin", "compare_digest", "_session"])
def test_each_safeguard_is_needed(safeguard: str, monkeypatch: pytest.MonkeyPatch):
    """Without one of them, some forged request would act."""
    if safeguard == "_check_origin":
        monkeypatch.setattr(_csrf.Sessions, safeguard, lambda *_: None)
    elif safeguard == "compare_digest":
        monkeypatch.setattr(_csrf.hmac, safeguard, lambda *_: True)
    else:
        # A session that is taken from nowhere is everybody's.
        monkeypatch.setattr(_csrf, safeguard, lambda _: "everybody")
    assert falsified(only_the_right_request_acts, HEADER_CASES)


ROLES = st.fixed_dictionaries(
    {
        "allow": st.sampled_from([True, False, None, "raises"]),
        "operate": st.sampled_from(["ann", True, False, None, "", "  ", 7, "raises", "absent"]),
        "awaited": st.booleans(),
    }
)


@given(ROLES)
def test_who_may_not_act_gets_no_session_and_does_nothing(case: dict[str, Any]):
    """A session is for who may look and act; the token of somebody who may not is worth nothing."""

    def saying(what: Any) -> Any:
        def say(_visit: Visit) -> Any:
            if what == "raises":
                raise LookupError
            return what

        async def asay(visit: Visit) -> Any:
            return say(visit)

        return asay if case["awaited"] else say

    async def main() -> None:
        policy = Breaker(consecutive=3)
        guard = Guard("vendor", policy)
        ann = Browser(operated(secret="s" * 16))
        await ann.open()
        operate = None if case["operate"] == "absent" else saying(case["operate"])
        app = Shown(allow=saying(case["allow"]), operate=operate, secret="s" * 16)
        session = await get(app, "/session")
        may_look = case["allow"] is True
        name = {"ann": "ann", True: "operator"}.get(case["operate"]) if may_look else None
        assert session.status == (200 if may_look else 403)
        assert ("set-cookie" in session.headers) == (name is not None)
        if may_look:
            assert session.json()["operator"] == name
            assert bool(session.json()["token"]) == (name is not None)
        await post(app, "/act", ISOLATE, ann.headers.items())
        assert (policy.state == "isolated") == (name == "ann")
        guard.close()

    asyncio.run(main())


def test_the_session_is_a_cookie_that_scripts_and_other_sites_have_not():
    """It is random, strict, hidden, for this mount alone, and secure where the page is."""

    async def main() -> None:
        app = operated()
        seen = set()
        for _ in range(3):
            answer = await get(app, "/w/session", root_path="/w")
            cookie, *rest = answer.headers["set-cookie"].split("; ")
            seen.add(cookie)
            assert rest == ["Path=/w", "HttpOnly", "SameSite=Strict"]
            assert re.fullmatch("[0-9a-f]{64}", answer.json()["token"])
        assert len(seen) == 3
        again = await get(app, "/session", ("cookie", seen.pop()))
        assert "set-cookie" not in again.headers
        https = await get(app, "/session", scheme="https")
        assert https.headers["set-cookie"].endswith("; Secure")
        strange = await get(app, "/a;b\r\nx/session", root_path="/a;b\r\nx")
        assert "; Path=/; " in strange.headers["set-cookie"]

    run_virtual(main())


def test_a_token_is_that_of_its_operator_and_secret():
    """A session that an intruder planted in a browser has a token that is worth nothing there."""
    sessions = _csrf.Sessions("s" * 16, None)
    visit = Visit.of(http_scope(headers=[("cookie", f"seawall_session={'a' * 43}")]))
    token, _ = sessions.open(visit, "ann")
    assert sessions.open(visit, "bob")[0] != token
    assert sessions.open(visit, "ann")[0] == token
    assert _csrf.Sessions("t" * 16, None).open(visit, "ann")[0] != token
    assert _csrf.Sessions(None, None).open(visit, "ann")[0] != token
    assert sessions.open(visit, "\ud800")[0] != token


def test_behind_a_proxy_its_origin_counts():
    """With `origins`, exactly those pages act, whatever the Host says; cookies are secure."""

    async def main() -> None:
        policy = Breaker(consecutive=3)
        guard = Guard("vendor", policy)
        app = operated(allow=lambda _: True, local=False, origins=["https://ops.example.com"])
        browser = Browser(app)
        opened = await browser.open()
        assert opened.headers["set-cookie"].endswith("; Secure")
        refused = await browser.act(ISOLATE)
        assert refused.status == 403
        assert "origins=" in refused.json()["detail"]
        headers = {**browser.headers, "origin": "https://ops.example.com"}
        assert (await post(app, "/act", ISOLATE, headers.items())).status == 200
        assert policy.state == "isolated"
        guard.close()

    run_virtual(main())


# --- Bodies ---


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 16_000, 400),
        (b"x" * 16_385, 413),
        (b'{"a": ' + b"1" * 6000 + b"}", 400),
        (b"[]", 422),
        (b"null", 422),
        (b'"isolate"', 422),
    ],
)
def test_a_body_that_is_no_small_json_is_refused(body: bytes, status: int):
    """Too large, too deep, no JSON, no object: refused, each in its way."""

    async def main() -> None:
        browser = Browser(operated())
        await browser.open()
        assert (await browser.act(body)).status == status

    run_virtual(main())


@pytest.mark.parametrize("length", ["16385", "9" * 5000, "-1", "x", "²"])
def test_a_body_that_is_announced_too_large_is_not_read(length: str):
    """The length that is told is believed if it is too large; none of the body is waited for."""

    async def main() -> None:
        browser = Browser(operated())
        await browser.open()
        headers = {**browser.headers, "content-length": length}
        assert (await post(browser.app, "/act", b"{}", headers.items())).status == 413

    run_virtual(main())


@pytest.mark.parametrize(
    ("pace", "status"), [(0.1, 413), (3.0, 408), (float("inf"), 408), (None, 400)]
)
def test_a_body_without_end_is_cut_off(pace: float | None, status: int):
    """Who sends for ever is stopped by the size, who sends slowly by the time."""

    async def main() -> None:
        browser = Browser(operated())
        await browser.open()
        scope = http_scope("/act", method="POST", headers=browser.headers.items())
        sent: list[Any] = []

        async def receive() -> Any:
            if pace is None:
                return {"type": "http.disconnect"}
            if pace == float("inf"):
                await asyncio.Event().wait()
            await let_pass(pace)
            return {"type": "http.request", "body": b" " * 1000, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        await browser.app(scope, receive, send)
        assert sent[0]["status"] == status

    run_virtual(main())


# --- A service that others reach does not start ---


@pytest.fixture
def listener() -> Any:
    """Return a socket that all machines could reach, if it listened."""
    with socket.socket() as bound:
        bound.bind(("0.0.0.0", 0))  # noqa: S104 - that is what is refused
        yield bound


@pytest.mark.parametrize("listening", [True, False])
def test_local_is_not_made_where_others_reach(listener: socket.socket, listening: bool):  # noqa: FBT001
    """A process that listens beyond loopback, or is about to, has no dashboard without `allow`."""
    if listening:
        listener.listen()
    place = f"0.0.0.0:{listener.getsockname()[1]}"
    with pytest.raises(RuntimeError, match=rf"listens on {place}.*127\.0\.0\.1.*allow=function"):
        Dashboard(local=True)
    Dashboard(allow=lambda _: False)
    listener.close()
    Dashboard(local=True)


def test_what_does_not_listen_for_others_is_no_matter():
    """Loopback, unix sockets, connections and UDP are not what others reach."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket() as fresh,
    ):
        datagrams.bind(("0.0.0.0", 0))  # noqa: S104
        assert fresh.fileno() >= 0
        assert _listening.listens_beyond_loopback() is None


def test_where_nobody_tells_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
):
    """On a system that does not list open files, each request is still checked."""
    listener.listen()
    monkeypatch.setattr(_listening, "FOLDERS", ("/nowhere",))
    assert _listening.listens_beyond_loopback() is None
    assert asked_of(HOME, client=("10.0.0.7", 5)) == 403


def exposed() -> socket.socket:
    """Return a socket that other machines reach."""
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104 - that is what is refused


def test_a_lifespan_that_others_reach_fails():
    """What was made before the port was bound finds it at start-up, and the server is told."""

    async def main() -> None:
        sent: list[Any] = []
        app, mounted = Shown(), Shown()

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message)

        with exposed():
            await app({"type": "lifespan"}, receive, send)
            with pytest.raises(RuntimeError, match="other machines reach"):
                async with mounted:
                    pass
        assert [one["type"] for one in sent] == ["lifespan.startup.failed"]
        assert "allow=function" in sent[0]["message"]
        assert app.watchers == mounted.watchers == []

    run_virtual(main())


@pytest.mark.parametrize("later", [0.0, 11.0])
def test_a_port_that_is_opened_later_closes_the_page(
    later: float, caplog: pytest.LogCaptureFixture
):
    """It is looked for at the first request and now and then; found, everybody is refused."""

    async def main() -> None:
        app = Shown()
        if later:
            assert (await get(app, "/session")).status == 200
        with exposed():
            await let_pass(later)
            for _ in range(5):
                answer = await get(app, "/session")
                assert answer.status == 403
                assert "Other machines reach" in answer.json()["detail"]
        await let_pass(11.0)
        assert (await get(app, "/session")).status == 403

    run_virtual(main())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Bind the server to 127.0.0.1, or write allow=function" in record.getMessage()


# --- Real servers ---

OPEN_TO_ALL = """
import logging, threading, time, urllib.error, urllib.request
import uvicorn
from seawall.dashboard import Dashboard

logging.basicConfig(level=logging.ERROR)
app = Dashboard(local=True)
config = uvicorn.Config(app, host="0.0.0.0", port=0, log_level="error")
server = uvicorn.Server(config)


def look():
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    for path in ("", "state", "events"):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5)
            print("let in")
        except urllib.error.HTTPError as error:
            print(error.code)
            error.close()
    server.should_exit = True


thread = threading.Thread(target=look)
thread.start()
server.run()
thread.join()
"""

BOUND_BEFORE = """
import uvicorn
from seawall.dashboard import Dashboard

app = Dashboard(local=True)
config = uvicorn.Config(app, host="0.0.0.0", port=0)
listener = config.bind_socket()  # as with several workers: bound before the app is started
uvicorn.Server(config).run(sockets=[listener])
print("served")
"""


def run_service(source: str) -> subprocess.CompletedProcess[str]:
    """Run a service as a program of its own."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(  # noqa: S603 - the programs above
        [sys.executable, "-c", source],
        env={"PYTHONPATH": str(root / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_real_server_on_all_addresses_shows_nothing():
    """Uvicorn binds after the start: each request is refused, and one record says what to do."""
    ran = run_service(OPEN_TO_ALL)
    assert ran.stdout.split() == ["403", "403", "403"], ran.stderr
    assert ran.stderr.count("Bind the server to 127.0.0.1, or write allow=function") == 1


def test_a_real_server_that_was_bound_before_does_not_start():
    """With its port bound already, the service ends at start-up, with an error that says why."""
    ran = run_service(BOUND_BEFORE)
    assert ran.returncode != 0 or "served" not in ran.stdout
    assert "other machines reach" in ran.stderr
    assert ran.returncode == 3


STOPPED = """
import os, signal, threading, time, urllib.request
import uvicorn
from seawall.dashboard import Dashboard

server = uvicorn.Server(uvicorn.Config(Dashboard(local=True, every=0.1), port=0, log_level="error"))


def look():
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=5) as stream:
        while not stream.readline().startswith(b"data: "):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        while stream.readline():
            pass
    print("ended")


thread = threading.Thread(target=look)
thread.start()
signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
server.run()
thread.join()
print("stopped")
"""


def test_who_looks_does_not_keep_a_service_from_stopping():
    """A real server that is told to stop ends the stream, and then itself, without a time limit."""
    ran = run_service(STOPPED)
    assert ran.stdout.split() == ["ended", "stopped"], ran.stderr


def test_it_is_live_in_a_real_service():
    """Mounted in FastAPI, behind the edge, it streams; an operator acts; then the service stops."""
    from fastapi import FastAPI

    from seawall.web.fastapi import protect

    policy = Breaker(consecutive=3)
    vendor = Guard("vendor", policy)
    app = FastAPI()
    app.mount("/seawall", Shown(operate=lambda _: "ann", every=0.05))
    edge = protect(app, timeout=0.3)
    with serve(app) as url, httpx.Client(base_url=f"{url}/seawall/") as client:
        assert client.get(f"{url}/seawall", follow_redirects=True).status_code == 200
        token = client.get("session").json()["token"]
        seen: list[Any] = []
        with client.stream("GET", "events") as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 12:  # twice as long as a request may take to begin its answer
                    break
        assert len(seen) == 12
        headers = {"origin": url, "x-seawall-token": token}
        assert client.post("act", json=ISOLATE).status_code == 403
        done = client.post("act", json=ISOLATE, headers=headers)
        assert done.json() == {"done": "Isolated Breaker of vendor."}
    assert policy.state == "isolated"
    vendor.close()
    edge.close()


def test_pods_that_share_a_store_are_shown_by_each(new_store: Callable[..., RedisStore]):
    """With `shared`, a pod shows the others, live, and says that it cannot act on them."""

    async def main() -> None:
        one, two = (
            Dashboard(
                local=True,
                operate=lambda _: "ann",
                shared=new_store(),
                pod=name,
                every=0.05,
                secret="s" * 16,
            )
            for name in ("one", "two")
        )
        async with one, two:
            for _ in range(200):
                views = (await get(one, "/state")).json()["views"]
                if len(views) == 2:
                    break
                await let_pass(0.05)
            assert [(view["pod"]["name"], view["operable"]) for view in views] == [
                ("one", True),
                ("two", False),
            ]
            browser = Browser(one)
            await browser.open()
            body = {"pod": "two", "guard": "vendor", "layer": 0, "act": "isolate"}
            assert (await browser.act(body)).status == 409

    asyncio.run(main())
