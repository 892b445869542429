"""Whatever happens to a request, what it held is given back exactly once, and at the right time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Bulkhead,
    Fallback,
    Guard,
    Timeout,
    current_deadline,
    static,
)
from seawall.clock import current_clock
from seawall.runtime.layers import Outcome
from seawall.runtime.slots import live_slots
from seawall.testing import run_virtual
from seawall.web.edge import Edge, asgi_request
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from tests.support import falsified, let_pass, new_guard
from tests.web.support import ask


class Story(NamedTuple):
    """What becomes of one request."""

    parts: int
    """Body parts that the app sends; 0: it never answers."""
    pauses: list[int]
    """Quarter seconds before each step of the app."""
    raises_at: int
    """The step at which the app raises; beyond the last one, not at all."""
    gone_at: int
    """The message at which the server says that the client is gone; beyond the last, never."""
    cancelled_at: int
    """Quarter seconds after which the server cancels the task; 0: never."""
    background: int
    """Quarter seconds of work after the response."""


STORIES = st.builds(
    Story,
    st.integers(0, 3),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 4),
)


def app_of(story: Story) -> Any:
    """Return an app that acts out the story."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        messages: list[dict[str, Any]] = []
        if story.parts:
            messages.append({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1, story.parts + 1):
            more = number < story.parts
            messages.append({"type": "http.response.body", "body": b"x", "more_body": more})
        for step, message in enumerate(messages):
            await let_pass(story.pauses[step] / 4)
            if step == story.raises_at:
                raise ValueError("as the story goes")
            await send(message)
        await let_pass(story.background / 4)

    return app


class Counting(Bulkhead):
    """A bulkhead that knows how often each of its slots was given back."""

    def _bind(self, host: Any) -> Any:
        bound: Any = super()._bind(host)
        self.left: list[Outcome] = []
        inner = bound.leave

        def leave(ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
            self.left.append(outcome)
            inner(ticket, outcome, detail, now)

        bound.leave = leave
        return bound


async def act_out(stories: list[Story]) -> None:
    """Let all of them happen at once, and look at what is left."""
    places, route = Counting(50), Counting(50)
    edge = Edge(
        lambda scope, receive, send: app_of(scope["story"])(scope, receive, send),
        name="stories",
        inbound=Inbound(timeout=1.1),
        routes={"/": route},
        loop_admission=LoopAdmission(),
        concurrency=places,
    )

    async def happen(story: Story) -> None:
        sent = []

        def on_send(_message: Any) -> None:
            sent.append(1)
            if len(sent) > story.gone_at:
                raise OSError("the client is gone")

        task = asyncio.ensure_future(ask(edge, story=story, on_send=on_send))
        if story.cancelled_at:
            asyncio.get_running_loop().call_later(story.cancelled_at / 4, task.cancel)
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(happen(story) for story in stories))
    edge.close()
    for limit in (places, route):
        live_slots.discard(limit.slots)  # without a safeguard some are left behind
    for limit in (places, route):
        assert len(limit.left) == len(stories)
        assert limit.in_flight == 0
        assert len(limit.slots.free) == 50
    told = edge.snapshot()
    assert told["succeeded"] + told["failed"] + told["cancelled"] == len(stories)
    assert told["policies"][0]["waiting"] == 0


def check_released(stories: list[Story]) -> None:
    """Each slot is given back once, whatever the story."""
    run_virtual(act_out(stories))


@given(st.lists(STORIES, min_size=1, max_size=6))
def test_what_was_entered_is_left_exactly_once(stories: list[Story]) -> None:
    """Streams, errors, timeouts, clients that go away, cancellation, background tasks."""
    check_released(stories)


def test_without_the_note_that_it_left_a_slot_comes_back_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a request knows that it has left is what the property needs."""

    class Forgetful(asgi_request.AsgiRequest):
        __slots__ = ()
        has_left = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]

    monkeypatch.setattr("seawall.web.edge.edge.AsgiRequest", Forgetful)
    assert falsified(check_released, st.lists(STORIES, min_size=1, max_size=3))


def test_without_the_end_a_slot_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the end of the app is looked at is what the property needs."""
    monkeypatch.setattr(asgi_request.AsgiRequest, "end", lambda _, __: None)
    assert falsified(check_released, st.lists(STORIES, min_size=1, max_size=3))


def streaming(*pauses: float, background: float = 0.0) -> Any:
    """Return an app that sends a part after each pause, and works on after the last."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, pause in enumerate(pauses, 1):
            await let_pass(pause)
            more = number < len(pauses)
            await send({"type": "http.response.body", "body": b"part", "more_body": more})
        await let_pass(background)

    return app


def test_a_background_task_holds_no_slot_and_is_not_cut() -> None:
    """The slot comes back with the last part; the work after it takes as long as it takes."""

    async def main() -> None:
        places = Bulkhead(1)
        app = streaming(0.5, background=10.0)
        edge = Edge(app, name="background", inbound=Inbound(timeout=1.0), concurrency=places)
        task = asyncio.ensure_future(ask(edge))
        await let_pass(0.25)
        assert places.in_flight == 1
        await let_pass(0.5)
        assert places.in_flight == 0
        assert not task.done()
        assert (await task).body == b"part"
        assert asyncio.get_running_loop().time() >= 10.5

    run_virtual(main())


@pytest.mark.parametrize("ends", ["answers", "streams", "raises", "hangs"])
def test_a_task_that_a_handler_left_running_is_free_of_the_requests_deadline(ends: str) -> None:
    """However the request ended: the deadline was the request's, and the task goes on after it."""
    found: list[object] = []

    async def work() -> str:
        return "done"

    async def call(guard: Guard, seconds: float) -> object:
        await let_pass(seconds)
        return await guard.acall(work)

    async def background(over: asyncio.Event) -> None:
        assert current_deadline() is not None
        plain = new_guard(Timeout(30.0))
        # This one is inside a guarded call when the request ends.
        inside = new_guard(Fallback(static("cached")))
        begun = asyncio.ensure_future(inside.acall(call, plain, 5.0))
        await over.wait()
        found.append(current_deadline())
        await let_pass(5.0)
        found.append(await plain.acall(work))
        found.append(await begun)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(background(over)))
        await let_pass(0.5)
        if ends == "raises":
            raise ValueError
        if ends == "hangs":
            await let_pass(60.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if ends == "streams":
            over.set()
            await let_pass(10.0)
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        nonlocal over
        over = asyncio.Event()
        edge = Edge(app, name="left", inbound=Inbound(timeout=1.0), concurrency=Bulkhead(9))
        with suppress(ValueError):
            await ask(edge)
        over.set()
        await tasks[0]
        edge.close()

    over: asyncio.Event
    tasks: list[asyncio.Task[None]] = []
    run_virtual(main())
    assert found == [None, "done", "done"]


def test_a_stream_holds_its_slot_but_counts_for_its_first_part() -> None:
    """What is learnt of it is the time to its first part, not its length."""

    async def main() -> None:
        places = AdaptiveLimit()
        edge = Edge(streaming(0.25, 5.0, 5.0), name="stream", concurrency=places)
        task = asyncio.ensure_future(ask(edge))
        await let_pass(7.0)
        assert places.in_flight == 1
        await task
        assert places.in_flight == 0
        assert places.windows.samples == [0.25]
        assert edge.snapshot()["p50"] == pytest.approx(0.25, rel=0.1)

    run_virtual(main())


def test_a_stream_that_ends_early_is_no_verdict() -> None:
    """The app returned in mid-body, since nobody was there any more."""

    async def halved(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def main() -> None:
        places = AdaptiveLimit()
        edge = Edge(halved, name="halved", concurrency=places)
        await ask(edge)
        assert edge.snapshot()["cancelled"] == 1
        assert not places.windows.samples
        assert places.in_flight == 0

    run_virtual(main())


@pytest.mark.parametrize("error", [OSError("gone"), None], ids=["send raises", "cancelled"])
def test_a_client_that_goes_away_in_mid_body_is_no_verdict(error: Exception | None) -> None:
    """Neither a failure of the app nor a sample."""

    def on_send(message: Any) -> None:
        if error is not None and message["type"] == "http.response.body":
            raise error

    async def main() -> None:
        places = AdaptiveLimit()
        edge = Edge(streaming(1.0, 1.0), name="gone", concurrency=places)
        task = asyncio.ensure_future(ask(edge, on_send=on_send))
        if error is None:
            await let_pass(1.5)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert edge.snapshot()["cancelled"] == 1
        assert not places.windows.samples
        assert places.in_flight == 0

    run_virtual(main())


def test_a_routes_place_is_given_back_as_the_edges_is() -> None:
    """With the last part, on an error, and when who waits for it is cancelled."""

    async def main() -> None:
        places = Bulkhead(1, max_wait=1.0)
        app = streaming(0.5, background=5.0)
        edge = Edge(app, name="route-release", routes={"/": places})
        first = asyncio.ensure_future(ask(edge))
        await let_pass(0.1)
        second, third = (asyncio.ensure_future(ask(edge)) for _ in range(2))
        await let_pass(0.1)
        third.cancel()
        await let_pass(0.7)
        assert places.in_flight == 1  # of the second, whose response is under way
        second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert places.in_flight == 0

    run_virtual(main())


def test_who_waits_for_a_turn_and_is_cancelled_takes_nothing_along() -> None:
    """At whichever moment of the wait."""

    async def main() -> None:
        edge = Edge(streaming(), name="turn-cancel", loop_admission=LoopAdmission(slice=0.001))
        gate: Any = edge.guard.bounds[0]

        async def burning(_scope: Any, _receive: Any, send: Any) -> None:
            current_clock().advance(0.01)  # type: ignore[attr-defined]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        edge.app = burning
        for turns in range(8):
            tasks = [asyncio.ensure_future(ask(edge)) for _ in range(5)]
            for _ in range(turns):
                await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no time
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not gate.slots.queue
            assert not gate.slots.free  # a turn that nobody took is lost, not kept
            assert (await ask(edge)).status == 200

    run_virtual(main())
