from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard
from seawall.dashboard import Dashboard, responses
from seawall.dashboard.responses import Asset
from seawall.dashboard.watcher import Watcher
from seawall.testing import run_virtual
from tests.dashboard.app_support import Others, Shown, get
from tests.dashboard.views_support import Wall

PAGE = Asset(b"text/html; charset=utf-8", b"<!doctype html><head><!-- scripts --></head>")


class Paged(Shown):
    """One that has a page of its own, whatever is installed."""

    def _asset(self, name: str) -> Asset | None:
        files = {"index.html": PAGE, "page.js": Asset(b"text/javascript; charset=utf-8", b"1")}
        return files.get(name)


# --- Routes ---


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
        ("/state", "application/json"),
        ("/state/", "application/json"),
        ("/session", "application/json"),
        ("/audit", "application/json"),
    ],
)
@pytest.mark.parametrize("root", ["", "/seawall", "/a/b/"])
def test_routes_answer_below_the_mount(path: str, kind: str, root: str):
    """Each route is found as a whole app's, and below wherever it is mounted; HEAD has no body."""

    async def main() -> None:
        app = Paged()
        where = root.rstrip("/") + path
        answer = await get(app, where, root_path=root)
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
        head = await get(app, where, method="HEAD", root_path=root)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]

    run_virtual(main())


class Hourly(Dashboard):
    """One whose wall clock is moved by hand."""

    def __init__(self, wall: Wall) -> None:
        self.watcher = Watcher(pod="pod-1", wall=wall)
        super().__init__(local=True, every=1000.0)

    def _new_watcher(self) -> Watcher:
        return self.watcher


@pytest.mark.parametrize(("span", "step"), [("3600", 10), ("43200", 60)])
def test_the_hours_of_a_guard_are_asked_for_by_its_name(span: str, step: int):
    """They are given by pod, with the seconds between two points; a guard of no pod has none."""

    async def main() -> None:
        wall = Wall()
        dashboard, guard = Hourly(wall), Guard("a b", Breaker())
        for _ in range(50):
            wall.now += 5.0
            dashboard.watcher.sample()
        async with dashboard:
            asked = [f"guard={name}&span={span}".encode() for name in ("a+b", "c")]
            answers = [await get(dashboard, "/hours", query_string=one) for one in asked]
        guard.close()
        told, none = (json.loads(answer.body) for answer in answers)
        assert (told["guard"], told["step"]) == ("a b", step)
        past = told["pods"]["pod-1"]
        assert len(past["at"]) == 250 // step
        assert past["guard"]["breaker"] == ["closed"] * len(past["at"])
        assert none["pods"] == {}

    run_virtual(main())


@pytest.mark.parametrize(
    "query", ["", "guard=a", "span=3600", "guard=a&span=7", "guard=&span=3600"]
)
def test_hours_of_no_guard_or_another_span_are_refused(query: str):
    """The answer says what to write."""

    async def main() -> None:
        answer = await get(Shown(), "/hours", query_string=query.encode())
        assert answer.status == 400
        assert "hours?guard=vendor&span=3600 or 43200" in json.loads(answer.body)["detail"]

    run_virtual(main())


def test_without_its_slash_the_page_sends_to_where_its_files_are_found():
    """The mount's own path leads to the same with a slash, as relative URLs need it."""

    async def main() -> None:
        answer = await get(Paged(), "/x/my wall", root_path="/x/my wall")
        assert (answer.status, answer.headers["location"]) == (307, "./my%20wall/")

    run_virtual(main())


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nothing", 404, None),
        ("GET", "/page/", 404, None),
        ("GET", "/page/nothing.js", 404, None),
        ("GET", "/page/index.html", 404, None),
        ("GET", "/act", 405, "POST"),
        ("HEAD", "/act", 405, "POST"),
        ("POST", "/", 405, "GET, HEAD"),
        ("POST", "/state", 405, "GET, HEAD"),
        ("PUT", "/events", 405, "GET, HEAD"),
        ("OPTIONS", "/act", 405, "POST"),
        ("DELETE", "/page/page.js", 405, "GET, HEAD"),
    ],
)
def test_what_is_not_there_is_told(method: str, path: str, status: int, allow: str | None):
    """Unknown paths are 404, wrong methods 405 with what is allowed, both as problem+json."""

    async def main() -> None:
        answer = await get(Paged(), path, method=method)
        assert (answer.status, answer.headers.get("allow")) == (status, allow)
        assert answer.headers["content-type"] == "application/problem+json"

    run_virtual(main())


def test_a_websocket_is_refused():
    """A websocket is refused before it is accepted."""

    async def main() -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await Shown()({"type": "websocket", "headers": []}, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    run_virtual(main())


def test_the_installed_page_has_only_files_of_its_own():
    """What the index names is served, and has a kind; its place for more scripts is there."""
    files = responses.assets()
    assert "index.html" in files
    assert responses.SCRIPTS.search(files["index.html"].body)
    assert all(asset.kind in responses.KINDS.values() for asset in files.values())


def test_scripts_of_a_subclass_are_put_into_the_page():
    """A subclass adds scripts and styles by name; names cannot break out of their tags."""

    class More(Paged):
        _scripts = ("demo.css", 'x" onload="y.js')

    async def main() -> None:
        page = (await get(More(), "/")).body.decode()
        assert '<link rel="stylesheet" href="page/demo.css">' in page
        assert '<script type="module" src="page/x&quot; onload=&quot;y.js"></script>' in page

    run_virtual(main())


@pytest.mark.parametrize("path", ["//evil.example", "//evil.example/", "/\\evil.example"])
def test_no_path_leads_elsewhere(path: str):
    """A path that a browser might take for another host is none of ours."""

    async def main() -> None:
        for root in ("", "/seawall"):
            answer = await get(Paged(), root + path, root_path=root)
            assert "location" not in answer.headers
            assert answer.status == 404

    run_virtual(main())


@given(st.text(min_size=1, max_size=20))
def test_a_mount_of_any_name_leads_to_itself(name: str):
    """Where the page sends to is below where it is, in one line, whatever that is called."""

    async def main() -> None:
        root = "/" + name
        answer = await get(Paged(), root, root_path=root)
        where = answer.headers.get("location", "./")
        assert re.fullmatch(r"\./[A-Za-z0-9_.~%-]*/?", where)

    asyncio.run(main())


# --- Arguments ---


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "allow=function.*local=True"),
        ({"local": False}, ValueError, "show itself to everybody"),
        ({"operate": lambda _: "ann"}, ValueError, "show itself to everybody"),
        ({"allow": True}, TypeError, "pass a function"),
        ({"local": "yes"}, TypeError, "True or False"),
        ({"local": True, "operate": "ann"}, TypeError, "pass a function"),
        ({"local": True, "secret": "short"}, ValueError, "16 or more"),
        ({"local": True, "secret": 7}, TypeError, "text or bytes"),
        ({"local": True, "origins": "https://x"}, TypeError, "write a list"),
        ({"local": True, "origins": ["https://x/path"]}, ValueError, "without a path"),
        ({"local": True, "origins": ["ftp://x"]}, ValueError, "scheme and a host"),
        ({"local": True, "pods": 7}, TypeError, "async def views"),
        ({"local": True, "pods": Others(), "shared": 7}, ValueError, "one of them"),
        ({"local": True, "shared": 7}, TypeError, "RedisStore that the pods share"),
        ({"local": True, "title": ""}, TypeError, "title='orders'"),
        ({"local": True, "pod": 7}, TypeError, "pod='orders'"),
        ({"local": True, "every": 0}, ValueError, "more than 0"),
        ({"local": True, "max_viewers": 0}, ValueError, "1 or more"),
    ],
)
def test_arguments_are_checked_at_once(options: dict[str, Any], error: type[Exception], words: str):
    """A dashboard that would show itself to everybody, or makes no sense, is not made."""
    with pytest.raises(error, match=words):
        Dashboard(**options)


def test_repr_says_who_may_look_and_act():
    """What a dashboard is for is seen at a glance."""
    assert repr(Dashboard(local=True)) == (
        "<Dashboard 'Seawall': for this machine, read only, 0 look>"
    )
    open_to_some = Dashboard(allow=lambda _: True, operate=lambda _: None, title="Orders")
    assert repr(open_to_some) == (
        "<Dashboard 'Orders': for whom allow() lets in, operate() says who acts, 0 look>"
    )
