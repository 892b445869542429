from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard import Visit, authorization
from seawall.testing import run_virtual
from tests.dashboard.app_support import HOME, Shown, asked_of, get
from tests.support import falsified, let_pass
from tests.web.support import http_scope
from tests.wire.support import grows

# --- Who may look ---


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:80", "[::1]", "[::1]:8000", "localhost:"],
)
def test_this_machine_may_look(host: str):
    """From loopback to loopback, by a loopback's name: that is this machine."""
    assert asked_of(("host", host)) == 200
    assert asked_of(("host", host), client=("::1", 5), server=("::1", 80)) == 200
    mapped = "::ffff:127.0.0.1"  # IPv4, as a socket for both kinds tells it
    assert asked_of(("host", host), client=(mapped, 5), server=(mapped, 80)) == 200


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
        "localhost:80:80",
        "localhost.",
        "127.0.0.1.",
        "ann@localhost",
        "evil.localhost",
        "127.0.0.1%evil.example",
        "[::1%25evil.example]",
        "[::ffff:10.0.0.7]",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "localhost\t",
        "localhost:" + "0" * 1000,
    ],
)
def test_a_name_that_others_point_here_is_refused(host: str):
    """DNS rebinding: the connection is local, but the browser believes it is at another site."""
    assert asked_of(("host", host)) == 403
    assert asked_of() == 403
    assert asked_of(HOME, ("host", host)) == 403


@pytest.mark.parametrize(
    "header",
    [
        "Forwarded",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-X",
        "X-Forwarded",
        "X_Forwarded_For",
        "Via",
        "X-Real-IP",
        "X_Real_IP",
        "Client-IP",
        "CF-Ray",
        "CDN-Loop",
        "Fastly-Client-IP",
        "X-Amzn-Trace-Id",
        "X-Envoy-External-Address",
        "X-Original-URL",
        "X-ProxyUser-Ip",
        "X-Varnish",
    ],
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


def test_what_speaks_as_no_browser_does_is_refused():
    """A plain proxy_pass of nginx hides itself, but not that it speaks HTTP/1.0."""

    async def main() -> None:
        for version, status in (("1.0", 403), ("0.9", 403), ("1.1", 200), ("2", 200), ("3", 200)):
            answer = await get(Shown(), "/session", http_version=version)
            assert answer.status == status

    asyncio.run(main())


UNITS = st.text(alphabet="1.:[]%=;&af,@ \t\xff", min_size=1, max_size=40)


@given(UNITS)
def test_headers_without_end_cost_little(unit: str):
    """Whatever is in the headers, more of it takes no more than its share of time."""

    def look(value: str) -> None:
        visit = Visit.of(
            http_scope(headers=[("host", value), ("cookie", value)], query_string=value.encode())
        )
        assert authorization._not_local(visit)
        assert len(visit.cookies) + len(visit.query) <= 200

    # Noise may strike once, but not three times in a row.
    assert not all(grows(look, unit) for _ in range(3))


def test_of_a_query_without_end_the_beginning_is_read():
    """To decode all that a server lets through would take long, before anybody is known."""
    visit = Visit.of(http_scope(query_string=b"a=" + b"%41" * 100_000))
    assert len(visit.query["a"]) == pytest.approx(4096 / 3, abs=2)


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
    """Without any one of the checks, a remote client would be let in."""
    monkeypatch.setattr(authorization, part, lambda _: part != "_is_of_proxy")
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
    """Clients refused by a failing callback cannot flood the log or inject lines."""

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
    """Of two cookies with one name neither is trusted."""
    twice = http_scope(headers=[("cookie", "a=1; b=2; a=3"), ("cookie", "c=4; b=5")])
    assert dict(Visit.of(twice).cookies) == {"c": "4"}
    many = http_scope(headers=[("cookie", ";".join(f"n{i}=1" for i in range(10_000)))])
    assert len(Visit.of(many).cookies) == 100


class _Loud(Exception):
    def __repr__(self) -> str:
        return (
            "no such user: x, Authorization: Bearer hunter2\r\nFAKE RECORD \x1b[2J\u2028"
            + "A" * 100_000
        )


def test_what_an_error_says_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture):
    """An error may say what a stranger wrote: no line break, no escape, not more than fits."""

    def allow(_visit: Visit) -> bool:
        raise _Loud

    async def main() -> None:
        assert (await get(Shown(allow=allow), "/")).status == 403

    run_virtual(main())
    (record,) = caplog.records
    said = record.getMessage()
    assert said.isprintable()
    assert "no such user: x, Authorization: ***" in said
    assert "FAKE RECORD" in said
    assert "hunter2" not in said
    assert len(said) < 1100
