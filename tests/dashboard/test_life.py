from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import pytest

from seawall.runtime.stop_signals import STOP_SIGNALS
from seawall.testing import run_virtual
from seawall.web.lifecycle import Lifecycle
from tests.dashboard.app_support import Shown, Viewer, get
from tests.support import let_pass

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
    """Streams end before the server stops; sampling continues for those that return."""

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
        lifecycle.start_if_needed()
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


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda s: s.name)
def test_streams_end_when_uvicorn_is_told_to_stop_without_a_signal(number: signal.Signals):
    """Whichever signal it handles in person, its server is asked with each sample."""

    class Server:
        should_exit = False

        def handle_exit(self, *_: object) -> None: ...

    server = Server()
    before = signal.signal(number, server.handle_exit)

    async def main() -> None:
        viewer = Viewer(Shown())
        await let_pass(1.5)
        server.should_exit = True
        await let_pass(1.5)
        assert viewer.task.done()
        await viewer.task

    try:
        run_virtual(main())
    finally:
        signal.signal(number, before)


def test_a_new_event_loop_begins_anew():
    """What ended with its loop is started again by the next look, in another one."""
    app = Shown()
    for count in (1, 2):
        assert asyncio.run(get(app, "/state")).status == 200
        gc.collect()
        assert [watcher.closed for watcher in app.watchers] == [1] * count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_knows_nothing_of_its_parents_loop():
    """After a fork there is neither a sampler nor a viewer."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(0.5)
        await viewer.leave()
        assert app._samplers
        app._viewers.add(object())
        app._after_fork()
        assert (app._samplers, app._viewers) == ({}, set())

    run_virtual(main())
