"""A request that waits for its client holds no place, and takes it again before it goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from seawall import AdaptiveLimit, Bulkhead, BulkheadFull, Overloaded
from seawall.limits import aimd
from seawall.runtime.layers import UNUSED
from seawall.runtime.slots import live_slots
from seawall.shedding import codel
from seawall.testing import run_virtual
from seawall.web.edge import Edge
from seawall.web.edge import client_waits as _client_waits
from seawall.web.edge.client_waits import ClientWaits
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from tests.support import falsified, let_pass
from tests.web.edge.test_release import Counting
from tests.web.support import Answer, answer_of, held_slots, http_scope

STALL = 30.0


class Client:
    """A client of `edge` that sends its body, and reads the response, when the test says so."""

    def __init__(self, edge: Any, path: str = "/", *, reads: bool = True) -> None:
        self.messages: list[dict[str, Any]] = []
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        scope = http_scope(path, method="POST")
        self.task = asyncio.ensure_future(edge(scope, self._receive, self._send))

    def says(self, body: bytes = b"x", *, more: bool = True) -> None:
        """Send a part of the body."""
        self._said.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def hangs_up(self) -> None:
        """Close the connection."""
        self._said.put_nowait({"type": "http.disconnect"})

    def reads(self) -> None:
        """Read what comes from now on."""
        self._reads.set()

    def rests(self) -> None:
        """Read nothing more."""
        self._reads.clear()

    async def _receive(self) -> dict[str, Any]:
        return await self._said.get()

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reads.wait()
        self.messages.append(message)

    async def answer(self) -> Answer:
        """Return the response, when the request has ended."""
        await self.task
        return answer_of(self.messages)


async def echo(_scope: Any, receive: Any, send: Any) -> None:
    """Read the body as FastAPI does, which answers 400 if that fails; then send it back."""
    body, more, status = b"", True, 200
    while more:
        try:
            message = await receive()
        except Exception:  # noqa: BLE001 - as FastAPI does
            status, more = 400, False
        else:
            body += message.get("body", b"")
            more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def working(seconds: float) -> Any:
    """Return an app that reads the body, works for so long, and answers."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await let_pass(seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    return app


def streaming(parts: int, *, work: float = 0.0) -> Any:
    """Return an app that sends so many parts, and works for so long before each."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(parts):
            if work:
                await let_pass(work)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def edge_of(app: Any, places: Any, **parts: Any) -> Edge:
    """Return an edge with these places."""
    given = {"inbound": Inbound(timeout=20.0), "concurrency": places, "stall": STALL, **parts}
    return Edge(app, name="slow clients", **given)


async def blocked() -> None:
    """Let enough turns of the loop pass for a request to be taken as blocked."""
    await let_pass(0.01)


# The body


def test_a_body_that_does_not_come_holds_no_place() -> None:
    """Others are served meanwhile, and the request is served when its body is there."""

    async def main() -> None:
        places, route = Bulkhead(1), Bulkhead(1)
        edge = edge_of(echo, places, routes={"/": route})
        slow = Client(edge)
        for _ in range(3):
            slow.says()
            await blocked()
            assert (places.in_flight, route.in_flight) == (0, 0)
            other = Client(edge)
            other.says(b"quick", more=False)
            assert (await other.answer()).body == b"quick"
        slow.says(more=False)
        assert (await slow.answer()).body == b"xxxx"
        assert edge.snapshot()["succeeded"] == 4
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_body_that_is_there_leaves_no_place() -> None:
    """Nothing is left and entered again where nothing blocks."""

    async def main() -> None:
        places = Counting(1)
        edge = edge_of(echo, places)
        client = Client(edge)
        client.says()
        client.says(more=False)
        assert (await client.answer()).body == b"xx"
        assert len(places.left) == 1
        edge.close()

    run_virtual(main())


def test_without_a_place_at_the_end_of_its_body_a_request_is_refused() -> None:
    """With the edge's own refusal, though the app would answer 400 to an error of `receive`."""

    async def main() -> None:
        places = AdaptiveLimit(aimd(slow_after=1.0, initial=1, minimum=1), max_wait=0.25)
        edge = edge_of(echo, places)
        slow = Client(edge)
        slow.says()
        await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        slow.says(more=False)
        refused = await slow.answer()
        assert refused.status == 503
        assert refused.headers["content-type"] == "application/problem+json"
        assert "retry-after" in refused.headers
        assert (await other.answer()).status == 200
        told = edge.snapshot()
        counts = told["succeeded"], told["rejected"], told["failed"], told["cancelled"]
        assert counts == (1, 1, 0, 0)
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_refusal_reaches_an_app_that_reads_in_a_task_of_its_own() -> None:
    """As behind Starlette's BaseHTTPMiddleware."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(echo(scope, receive, send))

    async def main() -> None:
        places = Bulkhead(1)
        edge = edge_of(app, places)
        slow = Client(edge)
        await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        slow.says(more=False)
        assert (await slow.answer()).status == 503
        assert (await other.answer()).status == 200
        edge.close()

    run_virtual(main())


def test_a_task_that_outlives_a_refused_app_gets_the_refusal() -> None:
    """It must not wait for ever for a body that nobody will hand to it."""
    readers: list[asyncio.Task[Any]] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        readers.append(asyncio.create_task(receive()))
        await asyncio.Event().wait()

    async def main() -> None:
        edge = edge_of(app, Bulkhead(1))
        slow = Client(edge)
        await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        slow.says(more=False)
        assert (await slow.answer()).status == 503
        await asyncio.wait(readers, timeout=1.0)
        assert isinstance(readers[0].exception(), BulkheadFull)
        assert (await other.answer()).status == 200
        edge.close()

    run_virtual(main())


def test_in_mid_body_a_request_waits_for_its_place() -> None:
    """An upload of many parts is not refused at one of them, however busy the service is."""

    async def main() -> None:
        places = Bulkhead(1)
        edge = edge_of(echo, places)
        slow = Client(edge)
        await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        slow.says()
        await let_pass(1.0)
        assert places.waiting == 1
        assert (await other.answer()).status == 200
        await blocked()
        slow.says(b"y", more=False)
        assert (await slow.answer()).body == b"xy"
        edge.close()

    run_virtual(main())


def test_bodies_that_end_at_once_are_not_let_in_at_once() -> None:
    """The places hold at every moment."""
    most = now = 0

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal most, now
        while (await receive()).get("more_body"):
            pass
        now += 1
        most = max(most, now)
        await let_pass(1.0)
        now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        edge = edge_of(app, Bulkhead(5, max_wait=1.5))
        clients = []
        for _ in range(100):
            clients.append(Client(edge))
            await blocked()
        for client in clients:
            client.says(more=False)
        answers = [(await client.answer()).status for client in clients]
        assert most == 5
        assert {status: answers.count(status) for status in answers} == {200: 10, 503: 90}
        edge.close()

    run_virtual(main())


def test_the_end_of_a_body_takes_a_turn_of_the_loop() -> None:
    """There the work begins; until then nothing is computed."""

    async def main() -> None:
        edge = edge_of(echo, Bulkhead(1), loop_admission=LoopAdmission())
        gate: Any = edge._loop_admission
        client = Client(edge)
        client.says()
        await blocked()

        def refuse(_now: float) -> None:
            raise Overloaded("as the story goes")

        gate.enter = refuse
        client.says()  # in mid-body it takes none
        await blocked()
        assert not client.task.done()
        client.says(more=False)
        assert (await client.answer()).status == 503
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_body_that_is_not_there_by_the_deadline_is_408_and_no_verdict() -> None:
    """It is the client's fault: the app did not fail, and the limit learns nothing from it."""

    async def main() -> None:
        places = AdaptiveLimit()
        edge = edge_of(echo, places, inbound=Inbound(timeout=2.0))
        clients = [Client(edge) for _ in range(20)]
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.json()["title"]) == (408, "Request timeout")
            assert answer.headers["connection"] == "close"
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.1)
        told = edge.snapshot()
        assert (told["cancelled"], told["failed"]) == (20, 0)
        assert not places.windows.samples
        assert not places.windows.drops
        edge.close()

    run_virtual(main())


def test_the_time_of_the_client_is_no_time_of_the_request() -> None:
    """Neither for what the limit learns, nor for the latency that is shown."""

    async def main() -> None:
        places = AdaptiveLimit()
        edge = edge_of(working(1.0), places)
        client = Client(edge)
        await let_pass(10.0)
        client.says(more=False)
        assert (await client.answer()).status == 200
        assert places.windows.samples == [1.0]
        assert edge.snapshot()["p50"] == pytest.approx(1.0, rel=0.1)
        edge.close()

    run_virtual(main())


def test_a_client_that_hangs_up_in_mid_body_waits_for_nothing() -> None:
    """The app learns of it at once, whether there is a place or not."""

    async def main() -> None:
        async def reading(_scope: Any, receive: Any, _send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        edge = edge_of(reading, Bulkhead(1))
        gone = Client(edge)
        await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        gone.hangs_up()
        await blocked()
        assert gone.task.done()
        await other.answer()
        assert not held_slots()
        edge.close()

    run_virtual(main())


# The response


def test_a_response_that_is_not_read_holds_no_place() -> None:
    """Others are served meanwhile, and the stream goes on when it is read."""

    async def main() -> None:
        places, route = Bulkhead(1), Bulkhead(1)
        edge = edge_of(streaming(3), places, routes={"/": route})
        for reads in (True, False):  # from the second part on, and from the start
            unread = Client(edge, reads=reads)
            unread.rests()
            await blocked()
            assert (places.in_flight, route.in_flight) == (0, 0)
            assert (await Client(edge).answer()).body == b"xxx"
            unread.reads()
            assert (await unread.answer()).body == b"xxx"
        assert edge.snapshot()["succeeded"] == 4
        assert not held_slots()
        edge.close()

    run_virtual(main())


LIMITS: dict[str, Any] = {
    "partitions": lambda: AdaptiveLimit(
        aimd(slow_after=9.0, initial=2, minimum=2, maximum=2), partitions={"live": 0.5}
    ),
    "shadow": lambda: Bulkhead(1, mode="shadow"),
    "lifo": lambda: Bulkhead(1, max_wait=9.0, max_waiting=1, order="lifo"),
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_place_of_any_kind_is_left_and_taken_again(limit: Any) -> None:
    """With classes of calls, where nothing is enforced, and where the newest is first."""

    async def main() -> None:
        places = limit()
        edge = edge_of(streaming(1, work=0.5), places)
        streams = [Client(edge, reads=False)]
        for _ in range(2):
            await blocked()
            assert places.in_flight == 0
            streams.append(Client(edge, reads=False))
        await blocked()
        for stream in streams:
            stream.reads()
        assert [(await stream.answer()).body for stream in streams] == [b"x"] * 3
        assert edge.snapshot()["succeeded"] == 3
        assert not held_slots()
        edge.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("max_wait", "shed"),
    [(0.0, None), (0.25, None), (0.25, codel(target=0.01, interval=0.1))],
    ids=["no wait", "wait", "shed"],
)
def test_a_stream_that_is_read_again_waits_for_its_place(max_wait: float, shed: Any) -> None:
    """It has begun, so it is not refused: by a full queue, after a time, or by shedding."""

    async def main() -> None:
        places = Bulkhead(1, max_wait=max_wait, max_waiting=1, shed=shed)
        edge = edge_of(streaming(3, work=0.5), places)
        streams = []
        for _ in range(4):
            streams.append(Client(edge, reads=False))
            await blocked()
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        for stream in streams:
            stream.reads()
        await let_pass(4.0)
        assert places.in_flight == 1
        assert places.waiting == 4
        assert (await other.answer()).status == 200
        assert [(await stream.answer()).body for stream in streams] == [b"xxx"] * 4
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_limit_learns_from_a_stream_the_time_to_its_first_part() -> None:
    """Also from one that left its place: once, and nothing from what follows."""

    async def main() -> None:
        places = AdaptiveLimit()
        edge = edge_of(streaming(3, work=0.25), places)
        stream = Client(edge)
        await let_pass(0.3)
        for _ in range(2):
            stream.rests()
            await let_pass(5.0)
            stream.reads()
            await blocked()
        assert (await stream.answer()).body == b"xxx"
        assert places.windows.samples == [0.25]
        assert edge.snapshot()["p50"] == pytest.approx(0.25, rel=0.1)
        edge.close()

    run_virtual(main())


def test_a_stream_of_which_nothing_is_read_is_ended() -> None:
    """After `stall` seconds without progress, and not before; its app is cancelled."""

    async def main() -> None:
        ended = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await streaming(1000, work=0.01)(scope, receive, send)
            finally:
                ended.append(asyncio.get_running_loop().time())

        edge = edge_of(app, Bulkhead(1))
        unread = Client(edge)
        unread.rests()
        await let_pass(STALL - 1.0)
        unread.reads()
        await let_pass(1.0)
        unread.rests()
        await let_pass(STALL - 1.0)
        assert not ended
        answer = await unread.answer()
        assert answer.status == 200
        assert answer.messages[-1].get("more_body", True)
        assert ended == [pytest.approx(2 * STALL, abs=0.1)]
        told = edge.snapshot()
        assert (told["stalled"], told["cancelled"]) == (1, 1)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_slow_reader_has_time_for_a_large_part() -> None:
    """A server takes the next part when the last one is read: the larger it is the later."""

    async def main() -> None:
        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            large = bytes(1_000_000)
            await send({"type": "http.response.body", "body": large, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        edge = edge_of(app, Bulkhead(1))
        for seconds, stalled in ((STALL + 99.0, 0), (STALL + 101.0, 1)):
            sent: list[Any] = []

            async def send(message: Any, seconds: float = seconds, sent: list[Any] = sent) -> None:
                if len(sent) == 2:
                    await let_pass(seconds)
                sent.append(message)

            await edge(http_scope(), None, send)  # type: ignore[arg-type]
            assert edge.snapshot()["stalled"] == stalled
            assert len(sent) == 3 - stalled
        edge.close()

    run_virtual(main())


def test_a_stall_may_be_without_bound() -> None:
    """For who wants that."""

    async def main() -> None:
        edge = edge_of(streaming(1), Bulkhead(1), stall=None)
        unread = Client(edge, reads=False)
        await let_pass(1000.0)
        unread.reads()
        assert (await unread.answer()).body == b"x"
        edge.close()

    run_virtual(main())


# Several tasks


async def next_to(listening: Any, work: Any) -> None:
    """Do both at once; when the work is done, nobody listens any more."""
    task = asyncio.ensure_future(listening)
    try:
        await work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("said", [False, True], ids=["unsaid", "said"])
def test_a_stream_that_listens_for_its_client_keeps_its_place(said: bool) -> None:  # noqa: FBT001
    """As Starlette's does; also if the client never sends the body that it promised."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = StreamingResponse(parts())
        await response(scope, receive, send)

    async def parts() -> Any:
        for _ in range(3):
            await let_pass(1.0)
            yield "x"

    async def main() -> None:
        places = Bulkhead(1)
        edge = edge_of(app, places)
        client = Client(edge)
        client.says(more=not said)
        for _ in range(5):
            await let_pass(0.55)
            assert places.in_flight == 1
        client.rests()  # but not while that one does not read
        client.says()
        await let_pass(2.0)
        assert places.in_flight == 0
        client.says()
        await blocked()
        assert places.in_flight == 0
        client.reads()
        assert (await client.answer()).body == b"xxx"
        edge.close()

    run_virtual(main())


def test_asking_whether_the_client_is_there_keeps_the_place() -> None:
    """Though it cancels a `receive` that waits for a body which does not come."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        for _ in range(5):
            assert not await request.is_disconnected()
            await let_pass(1.0)
            assert places.in_flight == 1
        await PlainTextResponse("done")(scope, receive, send)

    async def main() -> None:
        edge = edge_of(app, places)
        client = Client(edge)
        client.says()
        assert (await client.answer()).body == b"done"
        edge.close()

    places = Counting(1)
    run_virtual(main())
    assert len(places.left) == 1


def test_messages_may_be_sent_by_tasks() -> None:
    """What `send` and `receive` return are coroutines, as those of servers are."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        assert (await asyncio.create_task(receive()))["type"] == "http.request"
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await asyncio.create_task(send(start))
        body = {"type": "http.response.body", "body": b"x", "more_body": True}
        await asyncio.gather(*(asyncio.create_task(send(body)) for _ in range(5)))
        await asyncio.create_task(send({"type": "http.response.body", "body": b""}))

    async def main() -> None:
        places = Counting(1)
        edge = edge_of(app, places)
        for reads in (True, False):
            client = Client(edge, reads=reads)
            client.says(more=False)
            await blocked()
            client.reads()
            assert (await client.answer()).body == b"xxxxx"
            assert places.in_flight == 0
            assert places.left.count(UNUSED) <= 1
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_server_may_return_any_awaitable() -> None:
    """Such as a future."""

    async def main() -> None:
        edge = edge_of(streaming(2), Bulkhead(1))
        sent: list[Any] = []
        loop = asyncio.get_running_loop()

        def send(message: Any) -> Any:
            future = loop.create_future()
            sent.append(message)
            loop.call_later(1.0, future.set_result, None)
            return future

        await edge(http_scope(), None, send)  # type: ignore[arg-type]
        assert answer_of(sent).body == b"xx"
        edge.close()

    run_virtual(main())


# Whatever happens


class Story(NamedTuple):
    """What becomes of one request; times in quarter seconds."""

    said: list[int]
    """Before each part of the body."""
    read: list[int]
    """Before each message of the response is taken."""
    work: int
    """Between the two."""
    beside: bool
    """Whether the app listens for its client in a task of its own."""
    cancelled_at: int
    """When the server cancels the task; 0: never."""
    gives_up: int
    """After this the app does not wait for the body any more, and answers."""


WAITS = st.integers(0, 3)
STORIES = st.builds(
    Story,
    st.lists(WAITS, min_size=1, max_size=3),
    st.lists(WAITS, min_size=3, max_size=3),
    WAITS,
    st.booleans(),
    st.integers(0, 8),
    st.integers(1, 8),
)


async def act(story: Story, receive: Any, send: Any) -> None:
    """Be the app."""
    try:
        async with asyncio.timeout(story.gives_up / 4):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass
    await let_pass(story.work / 4)

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def respond() -> None:
        await streaming(len(story.read) - 2)(None, receive, send)

    await (next_to(listen(), respond()) if story.beside else respond())


async def act_out(stories: Iterable[Story]) -> None:
    """Let all of them happen at once, and look at what is left."""
    places, route = Counting(2, max_wait=0.5), Counting(2)
    edge = Edge(
        lambda scope, receive, send: act(scope["story"], receive, send),
        name="waits",
        inbound=Inbound(timeout=1.6),
        routes={"/": route},
        loop_admission=LoopAdmission(),
        concurrency=places,
        stall=0.6,
    )
    most = 0

    async def happen(story: Story) -> None:
        nonlocal most
        said, read = list(story.said), list(story.read)

        async def receive() -> Any:
            if not said:
                await asyncio.get_running_loop().create_future()
            await let_pass(said[0] / 4)
            said.pop(0)
            return {"type": "http.request", "body": b"x", "more_body": bool(said)}

        async def send(_message: Any) -> None:
            nonlocal most
            if read:
                await let_pass(read[0] / 4)
                read.pop(0)
            most = max(most, places.in_flight, route.in_flight)

        scope = {**http_scope("/"), "story": story}
        task = asyncio.ensure_future(edge(scope, receive, send))
        if story.cancelled_at:
            asyncio.get_running_loop().call_later(story.cancelled_at / 4, task.cancel)
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelling() <= 1

    await asyncio.gather(*(happen(story) for story in stories))
    edge.close()
    for limit in (places, route):
        live_slots.discard(limit.slots)  # without a safeguard some are left behind
    assert most <= 2
    for limit in (places, route):
        assert limit.in_flight == 0
        assert limit.waiting == 0
        assert len(limit.slots.free) == 2
    assert edge.snapshot()["policies"][0]["waiting"] == 0


def check_stories(stories: list[Story]) -> None:
    """All places are free at the end, and never more of them were taken than there are."""
    run_virtual(act_out(stories))


@given(st.lists(STORIES, min_size=1, max_size=5))
def test_all_places_come_back_whatever_happens(stories: list[Story]) -> None:
    """Slow bodies and readers, deadlines, stalls, refusals, cancellation, listening tasks."""
    check_stories(stories)


def test_without_the_note_of_what_was_left_a_place_comes_back_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a request does not hold any more what was left is what the property needs."""
    leave = ClientWaits._release

    def forgetful(waits: Any) -> None:
        held = waits._request.gates
        leave(waits)
        waits._request.gates = held

    monkeypatch.setattr(ClientWaits, "_release", forgetful)
    assert falsified(check_stories, st.lists(STORIES, min_size=1, max_size=3))


class NoLock:
    """What the lock of a request would be if it locked nothing."""

    async def __aenter__(self) -> None:
        """Go on."""

    async def __aexit__(self, *_: object) -> None:
        """Go on."""


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "unlocked"])
def test_of_several_tasks_one_takes_the_place_for_all(
    locked: bool,  # noqa: FBT001 - a parameter of pytest's
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one of them would hold what the others of the same request wait for."""
    if not locked:
        monkeypatch.setattr(_client_waits.asyncio, "Lock", NoLock)  # type: ignore[attr-defined]

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = {"type": "http.response.body", "body": b"x", "more_body": True}
        await let_pass(0.1)
        await asyncio.gather(*(send(part) for _ in range(3)))
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        edge = edge_of(app, Bulkhead(1), stall=None)
        stream = Client(edge)
        await blocked()
        stream.rests()
        await let_pass(0.2)
        edge.app = working(5.0)
        other = Client(edge)
        other.says(more=False)
        await blocked()
        stream.reads()
        await other.answer()
        await let_pass(10.0)
        assert stream.task.done() == locked
        stream.task.cancel()
        await asyncio.gather(stream.task, return_exceptions=True)
        assert not held_slots()
        edge.close()

    run_virtual(main())


@pytest.mark.parametrize("turns", range(12))
def test_cancelled_at_any_turn_a_request_leaves_all_places_free(turns: int) -> None:
    """While it waits for its body, for its place, and for its client to read."""

    async def main() -> None:
        places = Bulkhead(1, max_wait=1.0)
        edge = edge_of(streaming(2), places)
        for app in (echo, streaming(2)):
            edge.app = app
            for said in (False, True):
                client = Client(edge, reads=False)
                await blocked()
                if said:
                    client.says(more=False)
                    client.reads()
                for _ in range(turns):
                    await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no time
                client.task.cancel()
                await asyncio.gather(client.task, return_exceptions=True)
                assert (places.in_flight, len(places.slots.free)) == (0, 1)
                assert places.waiting == 0
        edge.close()

    run_virtual(main())


def test_a_refused_request_is_freed_at_once() -> None:
    """Nothing leads from its refusal back to itself."""
    marks: list[ref[Any]] = []

    class Mark:
        """Something whose end can be seen."""

    async def marked(_scope: Any, receive: Any, send: Any) -> None:
        mark = Mark()
        marks.append(ref(mark))
        await echo(_scope, receive, send)
        del mark

    async def main() -> None:
        edge = edge_of(marked, Bulkhead(1))
        gc.collect()
        gc.disable()
        try:
            slow = Client(edge)
            await blocked()
            edge.app = working(5.0)
            other = Client(edge)
            other.says(more=False)
            await blocked()
            slow.says(more=False)
            assert (await slow.answer()).status == 503
            await other.answer()
            del slow, other
            await blocked()
            assert [mark() for mark in marks] == [None]
        finally:
            gc.enable()
        edge.close()

    run_virtual(main())
