"""Handlers in child tasks and in threads: a cut request ends, and holds its place until then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.to_thread
import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar, get
from quart import Quart, request, websocket
from quart.typing import ResponseReturnValue
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from seawall import Bulkhead, TimedOut
from seawall.testing import run_virtual
from seawall.web import Edge, Inbound, fastapi, litestar, quart
from seawall.web.edge import asgi_request, running_handlers
from seawall.web.request import INCOMING
from tests.support import let_pass
from tests.web.edge.test_client_waits import STALL, Client
from tests.web.support import answer_of, ask, held_slots, http_scope, text_app

TIMEOUT = 10.0


class Handlers:
    """How many handlers run, and did so at once."""

    def __init__(self) -> None:
        self.running = self.most = self.ended = 0

    async def work(self, seconds: float = 3600.0, cleanup: float = 0.0) -> None:
        """Run for `seconds`; once cancelled, for `cleanup` more."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await let_pass(seconds)
        finally:
            await let_pass(cleanup)
            self.running -= 1
            self.ended += 1


def quart_app(handlers: Handlers, cleanup: float = 0.0) -> Quart:
    """Return a Quart app: it runs each handler in a child task."""
    app = Quart(__name__)

    @app.route("/", methods=["GET", "POST"])
    async def slow() -> ResponseReturnValue:
        await handlers.work(cleanup=cleanup)
        return "done"

    @app.post("/body")
    async def body() -> ResponseReturnValue:
        await request.get_data()
        await handlers.work(1.0)
        return "done"

    @app.post("/stream")
    async def stream() -> ResponseReturnValue:
        async def parts() -> Any:
            while True:
                await handlers.work(1.0)
                yield b"tick"

        return parts()

    @app.websocket("/socket")
    async def socket() -> None:
        await handlers.work()
        await websocket.accept()

    return app


def waiting_app(handlers: Handlers, cleanup: float = 0.0) -> Any:
    """Return an app that waits for its handler and for a disconnect, as Django does."""

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(listen()), asyncio.create_task(handlers.work(cleanup=cleanup))]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.wait(tasks)

    return app


def edge_of(app: Any, places: int = 2, **parts: Any) -> Edge:
    """Return an edge around `app` that has some places."""
    return Edge(app, inbound=Inbound(timeout=TIMEOUT), concurrency=Bulkhead(places), **parts)


@pytest.mark.parametrize("make", [waiting_app, quart_app])
def test_handlers_of_cut_requests_end(make: Callable[[Handlers], Any]) -> None:
    """After each 504 no handler runs: never more than there are places."""
    handlers = Handlers()
    edge = edge_of(make(handlers))

    async def main() -> None:
        for _ in range(8):
            answers = await asyncio.gather(ask(edge), ask(edge))
            assert [answer.status for answer in answers] == [504, 504]
            assert answers[0].json()["reason"] == "timed_out"
            assert handlers.running == 0

    run_virtual(main())
    assert (handlers.most, handlers.ended) == (2, 16)
    assert edge.snapshot()["failed"] == 16
    assert not held_slots()


def test_without_the_disconnect_handlers_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if such apps are cancelled like any other."""
    monkeypatch.setattr(running_handlers, "_tasks_in_wait", lambda _task: None)
    with pytest.raises(AssertionError):
        test_handlers_of_cut_requests_end(waiting_app)


def test_a_cut_request_is_answered_at_once_and_holds_its_place_until_its_handler_ends() -> None:
    """The client does not wait for a slow cleanup, and nobody gets its place meanwhile."""
    handlers = Handlers()

    async def main() -> None:
        edge = edge_of(waiting_app(handlers, cleanup=60.0), places=1)  # here its clock is virtual
        loop = asyncio.get_running_loop()
        began = loop.time()
        client = Client(edge)
        client.says(more=False)
        await let_pass(TIMEOUT + 1.0)
        assert answer_of(client.messages).status == 504
        assert handlers.running == 1
        assert (await ask(edge)).status == 503
        await client.task
        assert loop.time() == pytest.approx(began + TIMEOUT + 60.0)
        assert not held_slots()

    run_virtual(main())


def test_a_response_that_comes_after_the_cut_is_discarded() -> None:
    """The client gets one response."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def handle() -> None:
            try:
                await let_pass(3600)
            finally:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"too late"})

        await _first_of(receive(), handle())

    answer = run_virtual(ask(edge_of(app)))
    assert (answer.status, len(answer.messages)) == (504, 2)


def test_an_app_that_passes_a_cancellation_on_is_cancelled_though_a_task_of_it_listens() -> None:
    """A listener alone does not protect a handler from its deadline."""
    handlers = Handlers()

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        watcher = asyncio.ensure_future(receive())
        try:
            await handlers.work()
        finally:
            watcher.cancel()

    assert run_virtual(ask(edge_of(app))).status == 504
    assert (handlers.running, handlers.ended) == (0, 1)


def test_after_the_cut_every_receive_is_a_disconnect() -> None:
    """An app that listens again does not wait for a client that has its response."""
    heard: list[str] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()

        async def listen() -> None:
            heard.extend([(await receive())["type"] for _ in range(3)])

        await _first_of(listen(), let_pass(3600))

    assert run_virtual(ask(edge_of(app))).status == 504
    assert heard == ["http.disconnect"] * 3


def test_a_listener_that_others_cancel_at_the_same_moment_stays_cancelled() -> None:
    """Only our own cancellation becomes a disconnect."""
    ends: list[bool] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        listener = asyncio.ensure_future(receive())
        await asyncio.wait({listener})
        ends.append(listener.cancelled())

    async def receive() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            listener = asyncio.current_task()
            assert listener is not None
            listener.cancel()

    async def send(_message: Any) -> None:
        pass

    run_virtual(edge_of(app)(http_scope(), receive, send))
    assert ends == [True]


def test_a_body_that_does_not_arrive_in_time_ends_the_handler_that_waits_for_it() -> None:
    """Late bodies leave no task behind."""
    handlers = Handlers()
    edge = edge_of(quart_app(handlers))

    async def main() -> None:
        client = Client(edge, "/body")
        client.says()
        await client.task
        assert answer_of(client.messages).status == 408
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert not held_slots()


def test_a_request_refused_at_the_end_of_its_body_ends_the_handler_that_waits_for_it() -> None:
    """Refused bodies leave no task behind."""
    handlers = Handlers()
    edge = edge_of(quart_app(handlers), places=1)

    async def main() -> None:
        client = Client(edge, "/body")
        client.says()
        await let_pass(1.0)
        other = asyncio.ensure_future(ask(edge))
        await let_pass(1.0)
        client.says(more=False)
        await client.task
        assert answer_of(client.messages).status == 503
        assert (await other).status == 504
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert handlers.ended == 1
    assert not held_slots()


def test_a_stream_that_nobody_reads_ends() -> None:
    """A stalled client leaves no endless stream behind."""
    handlers = Handlers()
    edge = edge_of(quart_app(handlers), stall=STALL)

    async def main() -> None:
        client = Client(edge, "/stream", reads=False)
        client.says(more=False)
        await client.task
        assert edge.snapshot()["stalled"] == 1
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert not held_slots()


def test_a_websocket_that_is_not_accepted_in_time_ends() -> None:
    """A handshake is cut like a request."""
    handlers = Handlers()
    edge = edge_of(quart_app(handlers))
    sent: list[Any] = []

    async def main() -> None:
        pending = [{"type": "websocket.connect"}]

        async def receive() -> Any:
            return pending.pop() if pending else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = http_scope("/socket", type="websocket", scheme="ws", subprotocols=[])
        await edge({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 504)
    assert handlers.ended == 1
    assert not held_slots()


def test_the_disconnect_of_a_websocket_has_a_code() -> None:
    """ASGI promises one, and Channels reads it."""
    heard: list[Any] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        async def listen() -> None:
            heard.append(await receive())

        await _first_of(listen(), asyncio.Event().wait())

    async def nothing(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def ignore(_message: Any) -> None: ...

    run_virtual(edge_of(app)(http_scope("/", type="websocket", scheme="ws"), nothing, ignore))
    assert heard == [{"type": "websocket.disconnect", "code": 1006}]


async def _first_of(*steps: Coroutine[Any, Any, Any]) -> None:
    """Wait as Django and Quart do: for the handler and for a disconnect, whichever is first."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    _done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


# Handlers in threads


class ThreadWork:
    """A function that runs in a thread until it is released."""

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()
        self.ended = 0

    def __call__(self) -> str:
        """Work."""
        self.began.set()
        assert self.released.wait(20)
        self.ended += 1
        return "done"


def fastapi_app(work: ThreadWork) -> Any:
    """Return a FastAPI app with a plain function."""
    app = FastAPI()

    @app.get("/")
    def handler() -> str:
        return work()

    fastapi.protect(app, **PARTS)
    return app


def starlette_app(work: ThreadWork) -> Any:
    """Return a Starlette app with a plain function."""

    def handler(_request: Any) -> PlainTextResponse:
        return PlainTextResponse(work())

    app = Starlette(routes=[Route("/", handler)])
    fastapi.protect(app, **PARTS)
    return app


def litestar_app(work: ThreadWork) -> Any:
    """Return a Litestar app with a plain function."""

    @get("/", sync_to_thread=True)
    def handler() -> str:
        return work()

    return litestar.protect(Litestar([handler]), **PARTS)


def plain_quart_app(work: ThreadWork) -> Any:
    """Return a Quart app with a plain function."""
    app = Quart(__name__)

    @app.get("/")
    def handler() -> str:
        return work()

    quart.protect(app, **PARTS)
    return app


def to_thread_app(work: ThreadWork) -> Any:
    """Return an app that starts a thread itself."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        text = await asyncio.to_thread(work)
        await text_app(text)(_scope, _receive, send)

    return Edge(app, concurrency=Bulkhead(1))


def task_group_app(work: ThreadWork) -> Any:
    """Return an app that starts a thread in a task of a group, as Quart does since 0.23."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.TaskGroup() as group:
            answered = group.create_task(to_thread(scope, receive, send))
            group.create_task(disconnected(receive, answered))

    async def to_thread(scope: Any, receive: Any, send: Any) -> None:
        text = await asyncio.to_thread(work)
        await text_app(text)(scope, receive, send)

    async def disconnected(receive: Any, answered: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answered.cancel()

    return Edge(app, concurrency=Bulkhead(1))


PARTS: Any = {"concurrency": Bulkhead(1), "loop_admission": None, "lifecycle": None, "health": None}
THREADED = [
    fastapi_app,
    starlette_app,
    litestar_app,
    plain_quart_app,
    to_thread_app,
    task_group_app,
]


class Asked:
    """A request of an app, which is called in a task."""

    def __init__(self, app: Any) -> None:
        self.sent: list[Any] = []
        self._scope = http_scope()
        self._body = [{"type": "http.request", "body": b"", "more_body": False}]
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> Any:
        return self._body.pop() if self._body else await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def cut(self, work: ThreadWork | None = None) -> None:
        """Cut the request, once its `work` has begun, and let the edge answer."""
        if work is not None:
            with ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, work.began.wait, 20)
        assert self._scope[INCOMING].expire_now()
        await some_turns()


async def some_turns() -> None:
    """Let others run."""
    for _ in range(10):
        await let_pass(0)


@pytest.mark.parametrize("make", THREADED)
def test_a_handler_in_a_thread_holds_its_place_until_the_thread_ends(make: Any) -> None:
    """The client gets its response at once, and a second one never."""
    work = ThreadWork()
    app = make(work)

    async def main() -> None:
        asked = Asked(app)
        await asked.cut(work)
        assert answer_of(asked.sent).status == 504
        assert not asked.task.done()
        assert len(held_slots()) == 1
        work.released.set()
        await asked.task
        assert len(asked.sent) == 2

    asyncio.run(main())
    assert work.ended == 1
    assert not held_slots()


def test_without_a_look_at_threads_a_place_is_free_while_its_thread_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above fails if such apps are cancelled like any other."""
    monkeypatch.setattr(asgi_request, "threads_of", lambda _task: [])
    with pytest.raises(AssertionError):
        test_a_handler_in_a_thread_holds_its_place_until_the_thread_ends(starlette_app)


def test_what_follows_the_thread_is_cancelled() -> None:
    """No background task runs for a request whose client has been told that it failed."""
    work, followed = ThreadWork(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await text_app(await asyncio.to_thread(work))(scope, receive, send)
        followed.append("background task")

    async def main() -> None:
        asked = Asked(Edge(app, concurrency=Bulkhead(1)))
        await asked.cut(work)
        work.released.set()
        await asked.task
        assert not asked.task.cancelled()

    asyncio.run(main())
    assert not followed


def test_work_that_waits_for_a_thread_is_cancelled() -> None:
    """Nobody runs it any more, and its place is free."""
    work, busy = ThreadWork(), threading.Event()

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.to_thread(work)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        first = loop.run_in_executor(None, busy.wait, 20)
        asked = Asked(Edge(app, concurrency=Bulkhead(1)))
        await some_turns()
        await asked.cut()
        assert answer_of(asked.sent).status == 504
        assert not held_slots()
        busy.set()
        await first

    asyncio.run(main())
    assert not work.began.is_set()


@pytest.mark.parametrize("error", [TimedOut("too late"), httpx.ReadTimeout("too late")])
def test_an_expected_error_after_the_cut_is_not_raised(error: Exception) -> None:
    """A guard in the thread hears of the deadline, too: that is no bug of the app."""
    work = ThreadWork()

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.to_thread(work)
        raise error

    async def main() -> None:
        asked = Asked(Edge(app, concurrency=Bulkhead(1)))
        await asked.cut(work)
        work.released.set()
        await asked.task
        assert len(asked.sent) == 2

    asyncio.run(main())
    assert not held_slots()


def test_a_bug_after_the_cut_is_raised() -> None:
    """Otherwise nobody would hear of it."""
    work = ThreadWork()

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.to_thread(work)
        raise LookupError

    async def main() -> None:
        asked = Asked(Edge(app, concurrency=Bulkhead(1)))
        await asked.cut(work)
        work.released.set()
        with pytest.raises(LookupError):
            await asked.task

    asyncio.run(main())
    assert not held_slots()


def test_a_thread_that_its_owner_abandons_holds_no_place() -> None:
    """`abandon_on_cancel=True` says that nobody waits for it."""
    work = ThreadWork()

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await anyio.to_thread.run_sync(work, abandon_on_cancel=True)

    async def main() -> None:
        asked = Asked(Edge(app, concurrency=Bulkhead(1)))
        await asked.cut(work)
        assert answer_of(asked.sent).status == 504
        assert not held_slots()
        work.released.set()

    asyncio.run(main())
