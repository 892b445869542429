from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seawall import Breaker, Bulkhead, Guard
from seawall.clock import current_clock
from seawall.dashboard import responses, sampler
from seawall.dashboard import stream as stream_module
from seawall.dashboard.view_writer import ViewWriter
from seawall.testing import run_virtual
from tests.dashboard.app_support import FakeWatcher, Shown, Viewer, get
from tests.support import let_pass

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
        await let_pass(stream_module.TAKEN_WITHIN + 2.0)
        assert viewer.task.done()
        assert (await get(app, "/state")).status == 200
        await viewer.task

    run_virtual(main())


def test_a_viewer_that_takes_nothing_holds_up_no_end():
    """When streams end, one that waits for a stalled client ends, too, without its closing part."""

    async def main() -> None:
        app = Shown()
        stalled, well = Viewer(app), Viewer(app)
        await let_pass(1.5)
        stalled.takes.clear()
        await let_pass(5.0)
        app.end_streams()
        await let_pass(1.0)
        assert stalled.task.done()
        assert well.task.done()
        assert well.messages[-1]["more_body"] is False
        assert stalled.messages[-1]["more_body"] is True
        await asyncio.gather(stalled.task, well.task)

    run_virtual(main())


def test_a_viewer_that_is_only_slow_is_told_of_the_end():
    """Who takes the last message soon after the end still gets the closing part."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(1.5)
        viewer.takes.clear()
        await let_pass(5.0)
        app.end_streams()
        await let_pass(stream_module.ENDED_WITHIN / 2)
        viewer.takes.set()
        await viewer.task
        assert viewer.messages[-1]["more_body"] is False

    run_virtual(main())


def test_a_viewer_whose_answer_cannot_begin_holds_up_no_end():
    """Not even the headers are waited for any longer."""

    async def main() -> None:
        app = Shown()
        async with app:
            viewer = Viewer(app)
            viewer.takes.clear()
            await let_pass(1.5)
            app.end_streams()
            await let_pass(1.0)
            assert viewer.task.done()
            assert viewer.messages == []
            await viewer.task

    run_virtual(main())


def test_the_cap_on_viewers_holds_and_places_come_back():
    """Viewers beyond `max_viewers` are asked to come back; leaving frees a place."""

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
    """A stream without news sends comments to stay alive."""

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
    monkeypatch.setattr(stream_module, "ASKED_AGAIN", float("inf"))

    async def main() -> None:
        allowed = [True]
        viewer = Viewer(Shown(allow=lambda _: allowed[0]))
        await let_pass(1.5)
        allowed[0] = False
        await let_pass(120.0)
        assert not viewer.task.done()
        await viewer.leave()

    run_virtual(main())


def test_what_nobody_looks_at_is_not_written(monkeypatch: pytest.MonkeyPatch):
    """Without viewers samples are not serialized; with viewers once for all of them."""
    written: list[Any] = []

    def to_json(value: Any) -> bytes:
        written.append(value)
        return responses.to_json(value)

    class Writer(ViewWriter):
        def write(self, view: Any, *, whole: bool = False) -> bytes:
            written.append(view)
            return super().write(view, whole=whole)

    monkeypatch.setattr(sampler, "to_json", to_json)
    monkeypatch.setattr(sampler, "ViewWriter", Writer)

    def views() -> int:
        return sum(isinstance(value, dict) and "guards" in value for value in written)

    async def main() -> None:
        app = Shown()
        async with app:
            await let_pass(5.5)
            assert (app.watchers[0].samples, views()) == (6, 0)
            for _ in range(3):
                assert (await get(app, "/state")).status == 200
            assert views() == 2  # the view, and the past: each once
            viewers = [Viewer(app) for _ in range(5)]
            await let_pass(2.0)
            assert views() <= 2 + 2 + 1
            for viewer in viewers:
                assert len(viewer.events) == 3
                await viewer.leave()

    run_virtual(main())


def test_a_crowd_finds_the_door_shut():
    """Of ten thousand who want to look at once, as many as may do; the rest leave nothing."""

    async def main() -> None:
        app = Shown(max_viewers=8)
        before = len(asyncio.all_tasks())
        viewers = [Viewer(app) for _ in range(10_000)]
        await let_pass(0.5)
        assert len(app._viewers) == 8
        refused = [viewer for viewer in viewers if viewer.task.done()]
        assert len(refused) == 10_000 - 8
        assert {viewer.answer.status for viewer in refused[:100]} == {503}
        for viewer in viewers:
            viewer.gone.set()
            await viewer.task
        assert not app._viewers
        assert len(asyncio.all_tasks()) <= before + 1  # the sampling goes on

    run_virtual(main())
