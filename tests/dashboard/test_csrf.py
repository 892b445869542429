from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard
from seawall.dashboard import Visit, csrf
from seawall.dashboard import app as app_module
from seawall.testing import run_virtual
from tests.dashboard.app_support import Browser, Shown, get, post
from tests.support import falsified, let_pass
from tests.web.support import ask, http_scope

ISOLATE = {"pod": "here", "guard": "vendor", "layer": 0, "act": "isolate"}


def operated(**options: Any) -> Shown:
    return Shown(operate=lambda _: "ann", **options)


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


def test_what_is_given_twice_counts_for_nothing():
    """A header that is given twice is not trusted."""

    async def main() -> None:
        policy = Breaker(consecutive=3)
        guard = Guard("vendor", policy)
        browser = Browser(operated())
        await browser.open()
        for name in ("host", "origin", "cookie", "x-seawall-token", "content-type"):
            twice = [*browser.headers.items(), (name, browser.headers[name])]
            assert (await post(browser.app, "/act", ISOLATE, twice)).status in (403, 415)
        sites = [*browser.headers.items(), *[("sec-fetch-site", "same-origin")] * 2]
        assert (await post(browser.app, "/act", ISOLATE, sites)).status == 403
        assert policy.state == "closed"
        guard.close()

    run_virtual(main())


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
        monkeypatch.setattr(csrf.Sessions, safeguard, lambda *_: None)
    elif safeguard == "compare_digest":
        monkeypatch.setattr(csrf.hmac, safeguard, lambda *_: True)
    else:
        # A session that is taken from nowhere is everybody's.
        monkeypatch.setattr(csrf.Sessions, safeguard, lambda *_: "everybody")
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
    """A session needs the right to look and to act; without it a token is worthless."""

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
    """It is random, strict, hidden, for the whole host, and secure where the page is."""

    async def main() -> None:
        app = operated()
        seen = set()
        for _ in range(3):
            answer = await get(app, "/w/session", root_path="/w")
            cookie, *rest = answer.headers["set-cookie"].split("; ")
            seen.add(cookie)
            assert rest == ["Path=/", "HttpOnly", "SameSite=Strict"]
            assert re.fullmatch("[0-9a-f]{64}", answer.json()["token"])
        assert len(seen) == 3
        again = await get(app, "/session", ("cookie", seen.copy().pop()))
        assert "set-cookie" not in again.headers
        https = await get(app, "/w/session", root_path="/w", scheme="https")
        cookie, *rest = https.headers["set-cookie"].split("; ")
        assert cookie.startswith("__Host-seawall_session=")
        assert rest == ["Path=/", "HttpOnly", "SameSite=Strict", "Secure"]
        planted = (
            "cookie",
            f"{cookie}; {seen.copy().pop()}",
        )  # by a neighbour, who can set no other
        kept = await get(app, "/w/session", planted, root_path="/w", scheme="https")
        assert kept.json()["token"] == https.json()["token"]

    run_virtual(main())


def test_a_token_is_that_of_its_operator_and_secret():
    """A session that an intruder planted in a browser has a token that is worth nothing there."""
    sessions = csrf.Sessions("s" * 16, None)
    visit = Visit.of(http_scope(headers=[("cookie", f"seawall_session={'a' * 43}")]))
    token, _ = sessions.open(visit, "ann")
    assert sessions.open(visit, "bob")[0] != token
    assert sessions.open(visit, "ann")[0] == token
    assert csrf.Sessions("t" * 16, None).open(visit, "ann")[0] != token
    assert csrf.Sessions(None, None).open(visit, "ann")[0] != token
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


def test_dashboards_of_one_host_may_share_a_session():
    """A dashboard accepts another's cookie, but issues its own token, which the other refuses.

    So the cookie can be for the whole host, whatever path a proxy shows a dashboard under.
    """

    async def main() -> None:
        policy = Breaker(consecutive=3)
        guard = Guard("vendor", policy)
        first, second = Browser(operated()), Browser(operated())
        await first.open(root_path="/a")
        opened = await get(second.app, "/session", ("cookie", first.cookie), root_path="/b")
        assert "set-cookie" not in opened.headers
        second.cookie, second.token = first.cookie, first.token
        assert (await second.act(ISOLATE)).status == 403
        second.token = opened.json()["token"]
        assert (await second.act(ISOLATE)).status == 200
        assert (await first.act({**ISOLATE, "act": "close"})).status == 200
        assert policy.state == "closed"
        guard.close()

    run_virtual(main())


def test_without_a_session_the_cookie_is_named():
    """Without cookies the answer names the cookie that is missing."""

    async def main() -> None:
        browser = Browser(operated())
        await browser.open()
        browser.cookie = "other=1"
        refused = await browser.act(ISOLATE)
        assert refused.status == 403
        assert "seawall_session" in refused.json()["detail"]

    run_virtual(main())


# --- What other sites make a browser ask for ---

SITES = st.fixed_dictionaries(
    {
        "path": st.sampled_from(["/", "/state", "/events", "/session", "/act", "/page/live.js"]),
        "method": st.sampled_from(["GET", "HEAD", "POST"]),
        "site": st.sampled_from([None, "same-origin", "none", "same-site", "cross-site", "", "x"]),
        "mode": st.sampled_from([None, "navigate", "no-cors", "cors", "same-origin"]),
    }
)


def other_sites_get_only_the_page(case: dict[str, Any]) -> None:
    async def main() -> None:
        headers = [
            (f"sec-fetch-{name}", case[name]) for name in ("site", "mode") if case[name] is not None
        ]
        method = "HEAD" if case["path"] == "/events" else case["method"]
        answer = await get(operated(), case["path"], *headers, method=method)
        ours = case["site"] in (None, "same-origin", "none")
        leads = case["path"] == "/" and case["mode"] == "navigate" and method != "POST"
        if ours or leads:
            assert answer.status != 403 or method == "POST"
        else:
            assert answer.status == 403

    asyncio.run(main())


@given(SITES)
def test_other_sites_get_only_the_page(case: dict[str, Any]):
    """A link may lead to the page; nothing else is answered that a page of elsewhere asks for."""
    other_sites_get_only_the_page(case)


def test_without_looking_at_the_site_others_are_answered(monkeypatch: pytest.MonkeyPatch):
    """It is that check which refuses them."""
    monkeypatch.setattr(app_module, "check_site", lambda *_, **__: None)
    assert falsified(other_sites_get_only_the_page, SITES)


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
        (b'{"act": "isolate", "act": "close"}', 400),
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
    """An announced length that is too large is refused without reading the body."""

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
