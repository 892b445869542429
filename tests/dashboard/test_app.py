from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from typing import Any

import pytest

from seawall import Breaker, Bulkhead, Guard, current_deadline, deadline
from seawall.clock import current_clock
from seawall.dashboard import Dashboard, _assets, _live, _sse
from seawall.dashboard._assets import Asset
from seawall.testing import run_virtual
from seawall.web.lifecycle import Lifecycle
from tests.dashboard.app_support import FakeWatcher, Shown, Viewer, get, view_of
from tests.support import let_pass

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
    """Whoever asks for a websocket is turned away before it is accepted."""

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
    files = _assets.assets()
    assert "index.html" in files
    assert _assets.SCRIPTS.search(files["index.html"].body)
    assert all(asset.kind in _assets.KINDS.values() for asset in files.values())


def test_scripts_of_a_subclass_are_put_into_the_page():
    """A subclass adds scripts and styles by name; names cannot break out of their tags."""

    class More(Paged):
        _scripts = ("demo.css", 'x" onload="y.js')

    async def main() -> None:
        page = (await get(More(), "/")).body.decode()
        assert '<link rel="stylesheet" href="page/demo.css">' in page
        assert '<script type="module" src="page/x&quot; onload=&quot;y.js"></script>' in page

    run_virtual(main())


# --- Messages ---


def test_state_is_one_message_with_its_past():
    """One look has title, time, the guards in their stacks, the past, and no operator."""

    async def main() -> None:
        vendor = Guard("vendor", Breaker(consecutive=3), Bulkhead(5))
        message = (await get(Shown(title="Orders"), "/state")).json()
        assert message["title"] == "Orders"
        assert message["at"] == 1001.0
        assert message["operator"] is None
        assert message["extra"] is None
        assert list(message["history"]) == ["here"]
        (view,) = message["views"]
        assert [part["title"] for part in view["guards"][0]["stack"]] == ["Breaker", "Bulkhead"]
        assert view["operable"] is False
        vendor.close()

    run_virtual(main())


def test_events_come_each_second_and_the_past_once():
    """A stream begins with the past, then has a message for each sample, and says when to retry."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(3.5)
        first, *rest = viewer.events
        assert first["history"] is not None
        assert [one["history"] for one in rest] == [None] * 3
        assert [one["at"] for one in viewer.events] == [1001.0, 1002.0, 1003.0, 1004.0]
        assert viewer.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert viewer.answer.body.startswith(b"retry: 2000\n\nevent: message\ndata: {")
        await viewer.leave()
        assert "0 look" in repr(app)

    run_virtual(main())


def test_many_viewers_share_one_sampler():
    """However many look, a sample a second is taken, and its views are written once."""

    async def main() -> None:
        app = Shown()
        viewers = [Viewer(app) for _ in range(20)]
        await let_pass(5.5)
        assert [watcher.samples for watcher in app.watchers] == [6]
        assert {len(viewer.events) for viewer in viewers} == {6}
        for viewer in viewers:
            await viewer.leave()

    run_virtual(main())


def test_sampling_takes_a_tenth_of_the_loop_at_most():
    """Where a look takes long, it is taken less often: the service goes first."""

    class Slow(FakeWatcher):
        def sample(self) -> dict[str, Any]:
            current_clock().sleep(0.5)
            return super().sample()

    async def main() -> None:
        app, watcher = Shown(), Slow()
        app._new_watcher = lambda: watcher  # type: ignore[method-assign]
        async with app:
            await let_pass(55.0)
        assert 9 <= watcher.samples <= 11

    run_virtual(main())


def test_a_slow_viewer_skips_and_nothing_is_queued():
    """Who does not take a message gets the newest one next, not those in between."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(1.5)
        viewer.takes.clear()
        await let_pass(10.0)
        viewer.takes.set()
        await let_pass(1.0)
        times = [one["at"] for one in viewer.events]
        assert len(times) == 5
        assert times[-1] == 1013.0
        await viewer.leave()

    run_virtual(main())


def test_a_viewer_that_takes_nothing_is_let_go():
    """Who does not take a message for half a minute has no place any more."""

    async def main() -> None:
        app = Shown(max_viewers=1)
        viewer = Viewer(app)
        await let_pass(1.5)
        viewer.takes.clear()
        await let_pass(2 * _sse.TAKEN_WITHIN + 5.0)
        assert viewer.task.done()
        assert (await get(app, "/state")).status == 200
        await viewer.task

    run_virtual(main())


def test_the_cap_on_viewers_holds_and_places_come_back():
    """One more than `max_viewers` is told to come back; who leaves makes room."""

    async def main() -> None:
        app = Shown(max_viewers=2)
        first, second = Viewer(app), Viewer(app)
        await let_pass(0.5)
        refused = await get(app, "/events")
        assert refused.status == 503
        assert refused.headers["retry-after"] == "5"
        await first.leave()
        third = Viewer(app)
        await let_pass(1.5)
        assert third.events
        await second.leave()
        await third.leave()

    run_virtual(main())


def test_a_viewer_that_hangs_up_in_the_middle_frees_its_place():
    """An error of the server's `send` ends the stream, and nothing is left of it."""

    async def main() -> None:
        app = Shown(max_viewers=1)

        def broken(message: dict[str, Any]) -> None:
            if b"data:" in message.get("body", b""):
                raise ConnectionResetError

        await get(app, "/events", on_send=broken)
        assert not app._viewers
        viewer = Viewer(app)
        await let_pass(0.5)
        viewer.task.cancel()
        await asyncio.wait([viewer.task])
        assert not app._viewers

    run_virtual(main())


def test_a_quiet_stream_has_a_heartbeat():
    """Without news for a while, a comment tells that the stream is alive."""

    async def main() -> None:
        viewer = Viewer(Shown(every=100.0))
        await let_pass(35.0)
        assert viewer.answer.body.count(b": still here\n\n") == 2
        await viewer.leave()

    run_virtual(main())


def test_a_revoked_viewer_loses_the_stream():
    """Who may look no more is cut off within half a minute, and an operator's name goes, too."""

    async def main() -> None:
        allowed = {"look": True, "act": "ann"}
        app = Shown(allow=lambda _: allowed["look"], operate=lambda _: allowed["act"])
        viewer = Viewer(app)
        await let_pass(20.5)
        allowed["act"] = None
        await let_pass(11.0)
        assert [viewer.events[0]["operator"], viewer.events[-1]["operator"]] == ["ann", None]
        allowed["look"] = False
        await let_pass(31.0)
        assert viewer.task.done()
        assert viewer.messages[-1]["more_body"] is False
        await viewer.task

    run_virtual(main())


def test_without_asking_again_a_revoked_viewer_would_stay(monkeypatch: pytest.MonkeyPatch):
    """It is the asking again that cuts off who was revoked."""
    monkeypatch.setattr(_sse, "ASKED_AGAIN", float("inf"))

    async def main() -> None:
        allowed = [True]
        viewer = Viewer(Shown(allow=lambda _: allowed[0]))
        await let_pass(1.5)
        allowed[0] = False
        await let_pass(120.0)
        assert not viewer.task.done()
        await viewer.leave()

    run_virtual(main())


# --- Life ---


async def _lifespan(app: Any, *said: str) -> list[Any]:
    answers: list[Any] = []
    pending = [{"type": f"lifespan.{word}"} for word in said]

    async def receive() -> Any:
        return pending.pop(0)

    async def send(message: Any) -> None:
        answers.append(message)

    await app({"type": "lifespan"}, receive, send)
    return answers


def test_it_lives_as_a_whole_app():
    """It answers the lifespan protocol, samples from start-up on, and closes what it opened."""

    async def main() -> None:
        app = Shown()
        answers = await _lifespan(app, "startup", "shutdown")
        assert [one["type"] for one in answers] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]
        assert [watcher.closed for watcher in app.watchers] == [1]

    run_virtual(main())


def test_it_lives_in_the_lifespan_of_another_app():
    """`async with dashboard` samples before anybody looks, and ends the streams at the end."""

    async def main() -> None:
        app = Shown()
        async with app:
            await let_pass(2.5)
            assert app.watchers[0].samples == 3
            viewer = Viewer(app)
            await let_pass(1.0)
            assert viewer.events
        await viewer.task
        assert viewer.messages[-1]["more_body"] is False
        assert app.watchers[0].closed == 1
        await app.aclose()

    run_virtual(main())


def test_streams_can_be_ended_from_another_thread():
    """Before a server is told to stop, its streams end; sampling goes on for who comes back."""

    async def main() -> None:
        app = Shown(every=0.02)
        viewer = Viewer(app)
        await let_pass(0.05)
        await asyncio.to_thread(app.end_streams)
        await let_pass(0.1)
        assert viewer.task.done()
        again = Viewer(app)
        await let_pass(0.05)
        assert again.events
        assert len(app.watchers) == 1
        await again.leave()
        await viewer.task

    asyncio.run(main())


def test_streams_end_when_the_service_drains():
    """A service that goes away is not held up by who looks at it."""

    async def main() -> None:
        lifecycle = Lifecycle(name="orders", drain_timeout=20.0)
        lifecycle.notice()
        app = Shown()
        viewer = Viewer(app)
        await let_pass(1.5)
        lifecycle.begin()  # a request that is still served
        draining = asyncio.create_task(lifecycle.drain())
        await let_pass(2.0)
        assert viewer.task.done()
        lifecycle.end()
        await draining
        await viewer.task

    run_virtual(main())


def test_streams_end_when_uvicorn_is_told_to_stop(monkeypatch: pytest.MonkeyPatch):
    """Uvicorn waits for its streams before it says anything: its server is asked."""

    class Server:
        should_exit = False

        def handle_exit(self) -> None: ...

    server = Server()
    monkeypatch.setattr(signal, "getsignal", lambda _: server.handle_exit)

    async def main() -> None:
        viewer = Viewer(Shown())
        await let_pass(1.5)
        server.should_exit = True
        await let_pass(1.5)
        assert viewer.task.done()
        await viewer.task

    run_virtual(main())


def test_a_new_event_loop_begins_anew():
    """What ended with its loop is started again by the next look, in another one."""
    app = Shown()
    for count in (1, 2):
        assert asyncio.run(get(app, "/state")).status == 200
        gc.collect()
        assert [watcher.closed for watcher in app.watchers] == [1] * count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_knows_nothing_of_its_parents_loop():
    """After a fork there is no sampler and nobody who looks."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(0.5)
        await viewer.leave()
        assert app._lives
        app._viewers.add(object())
        app._after_fork()
        assert (app._lives, app._viewers) == ({}, set())

    run_virtual(main())


# --- Trouble ---


def test_a_watcher_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture):
    """A sample that cannot be taken is logged once a minute, and the next one is shown."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(1.5)
        app.watchers[0].fails = ValueError("boom")
        await let_pass(5.0)
        app.watchers[0].fails = None
        await let_pass(2.0)
        assert viewer.events[-1]["at"] == 1009.0
        await viewer.leave()

    run_virtual(main())
    assert [record.getMessage() for record in caplog.records] == [
        "dashboard: no sample: ValueError('boom')"
    ]


def test_nothing_to_show_is_told():
    """While no sample can be taken, one look is told to come back."""

    async def main() -> None:
        app = Shown()
        watcher = FakeWatcher()
        watcher.fails = OSError()
        app._new_watcher = lambda: watcher  # type: ignore[method-assign]
        assert (await get(app, "/state")).status == 503

    run_virtual(main())


class Others:
    """A source of pods that does as it is told."""

    def __init__(self, *views: Any) -> None:
        self.views_told: Any = list(views)
        self.hangs = False

    async def views(self) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.views_told, Exception):
            raise self.views_told
        return self.views_told


def test_pods_are_shown_side_by_side():
    """Other pods come after this one, by name; each once; what is no view is left out."""

    async def main() -> None:
        others = Others(view_of("b"), view_of("a"), view_of("here"), view_of("a"), 7, {}, None)
        others.views_told += [{"format": 1, "pod": 3}, view_of("c") | {"format": 99}]
        message = (await get(Shown(pods=others), "/state")).json()
        assert [view["pod"]["name"] for view in message["views"]] == ["here", "a", "b"]

    run_virtual(main())


def test_the_past_of_other_pods_is_kept_too(monkeypatch: pytest.MonkeyPatch):
    """A stream begins with the past of all pods: a point for each view, as far as there is room."""

    async def main() -> None:
        others = Others()
        app = Shown(pods=others)
        async with app:
            for n in range(5):
                # One whose view is old adds nothing.
                others.views_told = [view_of("a", at=1000.0 + n, age=3, gone=True), view_of("b")]
                await let_pass(1.0)
            message = (await get(app, "/state")).json()
            past = message["history"]
            assert list(past) == ["here", "a", "b"]
            assert [len(past[pod]["at"]) for pod in ("a", "b")] == [5, 1]
            assert (message["views"][1]["age"], "gone" in message["views"][1]) == (3, False)
            monkeypatch.setattr(_live, "LARGEST_PAST", 100)
            assert list((await get(app, "/state")).json()["history"]) == ["here", "a"]
            others.views_told = []
            await let_pass(2.0)
            assert list((await get(app, "/state")).json()["history"]) == ["here"]

    run_virtual(main())


def test_a_view_that_json_cannot_tell_hides_no_other():
    """A pod with a NaN in its view is left out, and the others are shown."""

    async def main() -> None:
        others = Others(view_of("bad", load=float("nan")), view_of("good"), view_of("x", at={1}))
        message = (await get(Shown(pods=others), "/state")).json()
        assert [view["pod"]["name"] for view in message["views"]] == ["here", "good"]

    run_virtual(main())


@pytest.mark.parametrize("trouble", [ConnectionError("secret"), "no list", "hangs"])
def test_a_source_of_pods_that_fails_is_a_trouble_of_this_pod(trouble: Any):
    """It is shown with the instant since when, without the error's text, until it is over."""

    async def main() -> None:
        others = Others(view_of("a"))
        app = Shown(pods=others)
        viewer = Viewer(app)
        await let_pass(1.5)
        healthy = others.views_told
        if trouble == "hangs":
            others.hangs = True
        else:
            others.views_told = trouble
        await let_pass(30.0)
        times = [one["at"] for one in viewer.events]
        assert times == [1001.0 + n for n in range(len(times))]
        assert len(times) > 22
        (view,) = viewer.events[-1]["views"]
        (told,) = view["troubles"]
        assert told["tone"] == "warn"
        assert told["since"] < times[-1] - 10
        assert "secret" not in json.dumps(told)
        others.hangs, others.views_told = False, healthy
        await let_pass(10.0)
        views = viewer.events[-1]["views"]
        assert [view["pod"]["name"] for view in views] == ["here", "a"]
        assert views[0]["troubles"] == []
        await viewer.leave()

    run_virtual(main())


def test_extra_is_sent_and_its_failure_is_not():
    """What a subclass sends beside comes with each message; if it fails, the rest comes."""

    class More(Shown):
        told: Any = {"vendor": "up"}  # noqa: RUF012

        async def _extra(self) -> Any:
            return self.told

    async def main() -> None:
        app = More()
        assert (await get(app, "/state")).json()["extra"] == {"vendor": "up"}
        app = More()
        app.told = {"bad": object()}
        assert (await get(app, "/state")).json()["extra"] is None

    run_virtual(main())


def test_sampling_outlives_the_request_that_began_it():
    """What is sampled later has not the deadline of the first who looked."""

    class More(Shown):
        async def _extra(self) -> Any:
            left = current_deadline()
            return None if left is None else {"left": left.remaining()}

    async def main() -> None:
        app = More()
        async with deadline(5.0):
            assert (await get(app, "/state")).json()["extra"] is None

    run_virtual(main())


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
