"""Requests of all kinds and outcomes at the edge: nothing is left behind, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import AdaptiveLimit, Bulkhead, CircuitOpen, Shed, deadline
from seawall.clock import VirtualClock
from seawall.context import (
    Criticality,
    attempt_var,
    criticality_var,
    current_deadline,
    deadline_scope,
    deadline_var,
    tenant_var,
    tier_var,
)
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.timeout import async_flow as _async_timeout
from seawall.runtime.slots import Slots, live_slots
from seawall.shedding import by_criticality, by_deadline
from seawall.testing import run_virtual
from seawall.web.edge import Edge, timers
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.principals import user
from seawall.web.request import INCOMING, Incoming
from tests.support import examples, falsified, let_pass
from tests.web.support import App, ask, http_scope, text_app

_serial = count()
TIME = 4.0
"""Seconds that a request has."""
ALONE = RequestLimit("1000/min", by="address")


def plain_edge(app: App | None = None, **parts: Any) -> Edge:
    """Return an edge with all parts, in which turns are not watched."""
    given_parts = {
        "inbound": Inbound(timeout=TIME),
        "health": Health(),
        "lifecycle": Lifecycle(signals=False, delay=1.0),
        "shed": Shed(by_criticality(), load=lambda: 0.0),
        "limits": RequestLimits(ALONE),
        "routes": {"/route": Bulkhead(5)},
        "loop_admission": LoopAdmission(),
        "concurrency": Bulkhead(5),
        **parts,
    }
    edge = Edge(app or text_app(), name=f"plain-{next(_serial)}", **given_parts)
    if edge._loop_admission is not None:
        edge._loop_admission.unwatched = float("inf")
    return edge


async def apart(edge: App, path: str = "/", **more: Any) -> Any:
    """Ask in a task of its own, as a server does."""
    return await asyncio.create_task(ask(edge, path, **more))


# Whatever happens


class Story(NamedTuple):
    """One request, and what becomes of it."""

    after: int
    """Quarter seconds since the one before."""
    caller: int
    path: str
    header: tuple[str, str] | None
    polluted: int
    """Which variable an earlier request left in the context; beyond the last, none."""
    load: float
    raced: bool
    """Whether another thread takes all places just after it was seen that one is free."""
    acts: str


CALLERS = [(f"10.0.0.{number}", 1) for number in range(3)]
HEADERS = [("x-server-timeout", "0.5"), ("baggage", "seawall.tenant=a"), ("seawall-attempt", "2")]
ACTS = [
    *("answers", "fails", "raises", "refuses", "streams", "nothing", "hangs", "hangs-late"),
    *("cancelled", "background", "background-raises", "half", "gone", "gone-refused", "outlives"),
    *("removes", "cancelled-refused"),
]
STORIES = st.lists(
    st.builds(
        Story,
        st.integers(0, 6),
        st.integers(0, 2),
        st.sampled_from(["/", "/", "/a", "/b", "/route", "/health/live"]),
        st.one_of(st.none(), st.none(), st.sampled_from(HEADERS)),
        st.integers(0, 12),
        st.sampled_from([0.0, 0.0, 0.0, 0.0, 1.0]),
        st.integers(0, 4).map(lambda n: n == 0),
        st.sampled_from(ACTS),
    ),
    min_size=1,
    max_size=8,
)
CASES = st.tuples(
    STORIES, st.sampled_from([0.0, 1.0]), st.sampled_from(["enforce", "enforce", "shadow", "off"])
)
"""What happens, for how long a place may be waited for, and the mode of it and of shedding."""
START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
PART = {"type": "http.response.body", "body": b"part", "more_body": True}
LAST = {"type": "http.response.body", "body": b"last"}


def context_now() -> tuple[Any, ...]:
    """Return what a handler sees."""
    held = current_deadline()
    left = None if held is None else held.remaining()
    return left, criticality_var.get(), tenant_var.get(), tier_var.get()


def variables_now() -> tuple[Any, ...]:
    """Return what must be in the context of the server after a request as before it."""
    values = tuple(var.get() for var in (criticality_var, tenant_var, tier_var, attempt_var))
    return deadline_scope(), *values


POLLUTION: dict[ContextVar[Any], Any] = {
    criticality_var: Criticality.SHEDDABLE,
    tenant_var: "somebody",
    tier_var: "free",
    deadline_var: None,
}
RAISED: dict[str, type[BaseException]] = {
    "raises": ValueError,
    "background-raises": ValueError,
    "gone": OSError,
    "gone-refused": OSError,
    "cancelled": asyncio.CancelledError,
    "cancelled-refused": asyncio.CancelledError,
}
"""What reaches the server, by what the app does."""


async def act(scope: Any, _receive: Any, send: Any) -> None:  # noqa: C901 - a list of acts
    """Be the app: do what the request says."""
    acts, seen = scope["story"].acts, scope["seen"]
    scope["reached"].append(scope[INCOMING].client)
    seen.append(context_now())
    if acts in ("raises", "gone-refused", "cancelled-refused", "refuses"):
        if acts == "raises":
            raise ValueError("as the story goes")
        raise CircuitOpen("as the story goes", retry_after=7.0)
    if acts == "nothing":
        return
    if acts in ("hangs", "cancelled", "outlives"):
        try:
            await let_pass(60.0)
        except asyncio.CancelledError:
            seen.append("cut")
            if acts != "outlives":
                raise
    if acts == "removes":
        scope.pop(INCOMING)
    await send({**START, "status": 500 if acts == "fails" else 200})
    seen.append(context_now())
    if acts in ("streams", "half", "hangs-late"):
        await send(PART)
        await let_pass(6.0 if acts == "hangs-late" else 0.3)
        if acts == "half":
            return
    await send(LAST)
    if acts.startswith("background"):
        await let_pass(6.0)
        seen.append(context_now())
        if acts == "background-raises":
            raise ValueError("after the answer")


class World:
    """One edge, and what is seen of it."""

    def __init__(self, wait: float, mode: Any) -> None:
        self.load = 0.0
        self.reads = 0
        self.races = False
        self.places = Bulkhead(4, max_wait=wait, mode=mode)
        self.lifecycle = Lifecycle(signals=False)
        self.limits = RequestLimits(
            RequestLimit("6/min", by=user(self.caller), burst=5), RequestLimit("100/day", by=None)
        )
        self.reached: list[str] = []
        self.edge = plain_edge(
            act,
            lifecycle=self.lifecycle,
            shed=Shed(by_criticality(), load=self.read, mode=mode),
            limits=self.limits,
            concurrency=self.places,
        )

    def read(self) -> float:
        self.reads += 1
        return self.load

    def caller(self, incoming: Incoming) -> str:
        if self.races:
            self.races = False
            while (slot := self.places.slots.take()) is not None:
                asyncio.get_running_loop().call_later(0.125, self.places.slots.give_back, slot)
        return incoming.client

    async def happen(self, story: Story) -> None:
        """Make the request, and look at what it leaves in the context."""
        seen: list[Any] = []
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)
            if story.acts.startswith("gone"):
                raise OSError("the client is gone")
            if story.acts == "cancelled-refused":
                await let_pass(9.0)

        headers = [] if story.header is None else [story.header]
        client = CALLERS[story.caller]
        told = {"story": story, "seen": seen, "reached": self.reached}
        scope = http_scope(story.path, headers=headers, client=client, **told)
        if story.polluted < len(POLLUTION):
            var = list(POLLUTION)[story.polluted]
            var.set(POLLUTION[var])
        before = variables_now()
        self.load, self.races = story.load, story.raced
        try:
            await self.edge(scope, None, send)  # type: ignore[arg-type]
        except (OSError, ValueError, asyncio.CancelledError) as error:
            assert type(error) is RAISED.get(story.acts)  # noqa: PT017 - others are not raised
        self.races = False
        assert variables_now() == before
        assert INCOMING not in scope
        for _, *values in [told for told in seen if isinstance(told, tuple)]:
            assert values == [Criticality.CRITICAL, None, None]

    async def live(self, stories: list[Story]) -> None:
        """Let all of it happen, and look at what is left."""
        known = [Story(0, n, "/", None, 99, 0.0, False, "answers") for n in range(3)]  # noqa: FBT003
        tasks = []
        for story in [*known, *stories]:
            await let_pass(story.after / 4)
            tasks.append(task := asyncio.create_task(self.happen(story)))
            if story.acts.startswith("cancelled"):
                asyncio.get_running_loop().call_later(0.2, task.cancel)
            await let_pass(0.01)
        await asyncio.gather(*tasks)
        await let_pass(1.0)  # until other threads have given back what they took
        self.edge.close()
        live_slots.discard(self.places.slots)
        assert self.lifecycle.in_flight == self.places.in_flight == 0
        assert len(self.places.slots.free) == 4
        assert not self.edge._timers.last_used[1].pending
        assert self.taken == len(self.reached)

    @property
    def taken(self) -> int:
        """How many requests the limit by day has counted: it hardly refills meanwhile."""
        meter = self.limits._local.policy._meters.all[1]  # type: ignore[union-attr]
        left, _ = meter.refill(None, whole_microseconds(self.edge.guard.clock.now()))
        return 100 - left


Case = tuple[list[Story], float, str]


def check(case: Case) -> None:
    """Let the stories happen on virtual time; nothing is left behind."""

    async def main() -> None:
        stories, wait, mode = case
        await World(wait, mode).live(stories)

    run_virtual(main())


@examples(150)
@given(CASES)
def test_nothing_is_left_behind(case: Case) -> None:
    """No slot, timer, deadline, variable or count, whatever the app does and whoever asks."""
    check(case)


@pytest.mark.parametrize("acts", ACTS)
def test_each_story_leaves_nothing_behind(acts: str) -> None:
    """Also alone, where chance does not have to find it."""
    story = Story(1, 0, "/", None, 99, 0.0, False, acts)  # noqa: FBT003
    for wait in (0.0, 1.0):
        shed = story._replace(load=1.0)
        check(([story, story._replace(raced=True), shed, story], wait, "enforce"))


def _nothing(*_args: Any) -> list[Any]:
    """Stand for a safeguard that is not there."""
    return []


ABLATIONS: dict[str, str] = {
    "context is cleared": "seawall.web.edge.inbound._clear_context",
    "limits are given back": "seawall.web.limits.LimitGrant.cancel",
    "context is restored": "seawall.web.edge.inbound.reset",
    "lifecycle is told": "seawall.web.lifecycle.lifecycle.Lifecycle.end",
    "deadline is ended": "seawall.web.edge.inbound.Inbound.undo",
    "time is stopped": "seawall.web.edge.asgi_request.AsgiRequest._stop_timer",
    "gates are left": "seawall.web.edge.asgi_request.AsgiRequest.end",
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_a_safeguard_something_is_left(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is what the property needs."""
    monkeypatch.setattr(ABLATIONS[missing], _nothing)
    monkeypatch.setattr(Slots, "recover", _nothing)  # or a place that is not left is found
    assert falsified(check, CASES)


# Others are quicker


def _takes_all(places: Any, taken: list[Any]) -> Callable[[Incoming], str]:
    """Return a key function in the middle of which another thread takes all places, once."""
    todo = [True, False]

    def read(incoming: Incoming) -> str:
        if incoming.path == "/raced" and todo.pop(0):
            while (slot := places.slots.take()) is not None:
                taken.append(slot)
            todo.append(False)
        return incoming.client

    return read


@pytest.mark.parametrize("wait", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Bulkhead, AdaptiveLimit])
def test_another_thread_was_quicker(kind: Any, wait: float) -> None:
    """What was taken from limits is given back; who may wait is served."""

    async def main() -> None:
        places = Bulkhead(2, max_wait=wait) if kind is Bulkhead else AdaptiveLimit(max_wait=wait)
        taken: list[Any] = []
        limits = RequestLimits(RequestLimit("5/h", by=user(_takes_all(places, taken))))
        edge = plain_edge(concurrency=places, limits=limits)
        await apart(edge)
        raced = asyncio.create_task(ask(edge, "/raced"))
        await let_pass(0.1)
        assert edge.snapshot()["lifecycle"]["in_flight"] == (1 if wait else 0)
        while taken:
            places.slots.give_back(taken.pop())
        answer = await raced
        assert answer.status == (200 if wait else 503)
        assert ("ratelimit" in answer.headers) == bool(wait)
        left = (await apart(edge)).headers["ratelimit"]
        assert left.startswith('"user";r=2' if wait else '"user";r=3')
        assert places.in_flight == edge.snapshot()["lifecycle"]["in_flight"] == 0

    run_virtual(main())


# Modes, changes at run time


@pytest.mark.parametrize("mode", ["enforce", "shadow", "off"])
def test_a_shed_is_asked_as_its_mode_says(mode: Any) -> None:
    """It refuses, only counts, or does not even look at the load; also when that is changed."""
    reads: list[int] = []

    async def main() -> None:
        shed = Shed(by_criticality(), load=lambda: reads.append(1) or 0.0)  # type: ignore[func-returns-value]
        edge = plain_edge(shed=shed)
        await apart(edge)
        assert len(reads) == 1
        shed.update(mode=mode, load=lambda: reads.append(1) or 2.0)  # type: ignore[func-returns-value]
        assert (await apart(edge)).status == (503 if mode == "enforce" else 200)
        assert len(reads) == (1 if mode == "off" else 2)
        told = edge.snapshot()["policies"][0]
        assert told["rejected"] == (mode == "enforce")
        assert told["would_reject"] == (mode == "shadow")
        assert told["shed_by"] == {"criticality": int(mode != "off")}
        shed.update(mode="enforce", rules=(by_criticality(start=0.1),), load=lambda: 0.6)
        assert (await apart(edge)).json()["reason"] == "shed_by_criticality"
        shed.update(rules=(by_criticality(),))
        assert (await apart(edge)).status == 200

    run_virtual(main())


def test_who_has_too_little_time_is_shed() -> None:
    """By its deadline, which a rule sees; nothing of it is left in the context."""

    async def main() -> None:
        shed = Shed(by_deadline(reserve=TIME / 2))
        edge = plain_edge(shed=shed)
        assert (await apart(edge)).status == 200
        shed.update(rules=(by_deadline(reserve=TIME * 2),))

        async def refused() -> None:
            assert (await ask(edge)).status == 504
            assert current_deadline() is None

        await asyncio.create_task(refused())
        assert edge.snapshot()["lifecycle"]["in_flight"] == 0

    run_virtual(main())


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_turns_and_limits_that_are_not_enforced_refuse_nobody(mode: Any) -> None:
    """Who finds no place free, and who finds one."""

    async def main() -> None:
        places = AdaptiveLimit(mode=mode)
        edge = plain_edge(loop_admission=LoopAdmission(mode=mode), concurrency=places)
        assert (await apart(edge)).status == 200
        taken = []
        while (slot := places.slots.take()) is not None:
            taken.append(slot)
        assert [(await apart(edge)).status for _ in range(2)] == [200, 200]
        told = edge.snapshot()["policies"][-1]
        assert told["would_reject"] == (2 if mode == "shadow" else 0)
        while taken:
            places.slots.give_back(taken.pop())
        assert (await apart(edge)).status == 200
        assert places.in_flight == 0

    run_virtual(main())


# What is left behind


@pytest.mark.parametrize("kind", ["pathsend", "zerocopysend"])
@pytest.mark.parametrize(("status", "counted"), [(200, "succeeded"), (500, "failed")])
def test_a_body_that_the_server_reads_itself_is_one(kind: str, status: int, counted: str) -> None:
    """Whoever was sent a file was served: it did not go away."""
    kept: list[int] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({**START, "status": status})
        if kind == "zerocopysend":
            await send({"type": "http.response.zerocopysend", "file": 7, "more_body": True})
        kept.append(edge._gates[-1].policy.in_flight)
        await send({"type": f"http.response.{kind}"})
        kept.append(edge._gates[-1].policy.in_flight)

    edge = plain_edge(app)

    async def main() -> None:
        for _ in range(2):
            await apart(edge)

    run_virtual(main())
    assert kept == [1, 0] * 2
    told = edge.snapshot()
    assert (told[counted], told["cancelled"]) == (2, 0)


def test_limits_with_a_time_of_their_own_count_by_it() -> None:
    """An edge whose clock is another does not fill their buckets."""

    async def main() -> None:
        limits = RequestLimits(RequestLimit("2/h", by="address"), clock=VirtualClock())
        edge = plain_edge(limits=limits)
        statuses = []
        for _ in range(4):
            await let_pass(7200.0)
            statuses.append((await apart(edge)).status)
        assert statuses == [200, 200, 429, 429]

    run_virtual(main())


def test_without_a_task_nothing_is_held() -> None:
    """A request that cannot be cut off is an error, and leaves all as it was."""

    async def main() -> None:
        edge = plain_edge()
        await apart(edge)
        failed: list[BaseException] = []

        def step() -> None:
            try:
                edge(http_scope(), None, None).send(None)  # type: ignore[arg-type]
            except RuntimeError as error:
                failed.append(error)

        asyncio.get_running_loop().call_soon(step)
        await let_pass(0.1)
        assert "a task to cancel" in str(failed[0])
        told = edge.snapshot()
        assert told["lifecycle"]["in_flight"] == told["policies"][-1]["in_flight"] == 0
        assert (told["succeeded"], told["failed"]) == (1, 1)

    run_virtual(main())


def test_a_request_that_is_closed_elsewhere_leaves_that_context_alone() -> None:
    """The collector closes forgotten coroutines in the middle of anything, such as a request."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        edge = plain_edge(app)

        async def send(_message: Any) -> None: ...

        for _ in range(2):
            request: Any = edge(http_scope(), None, send)  # type: ignore[arg-type]
            Context().run(request.send, None)
            with deadline(9.0):
                request.close()
                held = current_deadline()
                assert held is not None
                assert held.remaining() == 9.0
        told = edge.snapshot()
        assert told["lifecycle"]["in_flight"] == told["policies"][-1]["in_flight"] == 0
        assert told["cancelled"] == 2

    run_virtual(main())


@pytest.mark.parametrize("gone", [False, True])
def test_an_error_is_freed_and_explains_no_other(gone: bool) -> None:  # noqa: FBT001 - a case
    """What the app raised is in no circle; what goes wrong in answering it has no part in it."""

    class Bug(CircuitOpen if gone else ValueError):  # type: ignore[misc]
        """What the app raises."""

    bugs: list[ref[Bug]] = []
    seen: list[Any] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        bug = Bug("a bug")
        bugs.append(ref(bug))
        try:
            raise bug
        finally:
            del bug

    async def send(_message: Any) -> None:
        raise OSError("the client is gone")

    async def main() -> None:
        edge = plain_edge(app)

        async def request() -> None:
            try:
                await edge(http_scope(), None, send)  # type: ignore[arg-type]
            except (OSError, ValueError) as error:
                seen.append((type(error), error.__context__))

        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                await asyncio.create_task(request())
            assert [bug() for bug in bugs] == [None, None]
            assert seen == [(OSError if gone else Bug, None)] * 2
        finally:
            gc.enable()

    run_virtual(main())


class _Mark:
    """Something whose end can be seen."""


@pytest.mark.parametrize("acts", ["answers", "raises"])
def test_a_request_that_is_over_is_freed_with_its_context(acts: str) -> None:
    """Also where a variable of its context leads to a copy of its scope, which leads to it."""
    var: ContextVar[Any] = ContextVar("request")
    marks: list[ref[_Mark]] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        mark = _Mark()
        marks.append(ref(mark))
        var.set({**scope, "mark": mark})
        if acts == "raises":
            raise CircuitOpen("as the story goes")
        await text_app()(scope, None, send)

    async def main() -> None:
        edge = plain_edge(app)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await apart(edge)
            await let_pass(0.1)
            assert [mark() for mark in marks] == [None] * 3
        finally:
            gc.enable()

    run_virtual(main())


# Several loops


async def _hang(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def real_edge() -> Iterator[Edge]:
    """Give an edge on real time, that soon cuts off."""
    edge = plain_edge(_hang, inbound=Inbound(timeout=0.05), lifecycle=None)
    yield edge
    edge.close()


async def _statuses(edge: Edge, callers: int = 3) -> list[int]:
    tasks = [asyncio.create_task(ask(edge)) for _ in range(callers)]
    return [(await task).status for task in tasks]


def test_one_loop_after_the_other(real_edge: Edge) -> None:
    """In each of them the right tasks are cut off."""
    for _ in range(3):
        assert asyncio.run(_statuses(real_edge)) == [504, 504, 504]
    (queue,) = real_edge._timers._queues.values()  # those of loops that are closed are forgotten
    assert not queue.pending


def test_two_loops_in_two_threads(real_edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is cut off in its own loop, however they take turns."""
    lane, made = _async_timeout.ExpiryQueue, []

    def make(*args: Any) -> Any:
        made.append(1)
        return lane(*args)

    monkeypatch.setattr(_async_timeout, "ExpiryQueue", make)
    seen: list[list[int]] = []
    ready = threading.Barrier(2)

    async def main() -> None:
        ready.wait(5)
        seen.extend([await _statuses(real_edge, 2) for _ in range(4)])

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [[504, 504]] * 8
    assert len(made) == 2  # one timer for each loop, though they take turns
    assert real_edge._gates[-1].policy.in_flight == 0


@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_threads_lose_nothing(wait: float) -> None:
    """Places are all there in the end, and limits counted just those that were served."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await let_pass(0.0)
        await text_app()(scope, None, send)

    places = Bulkhead(2, max_wait=wait)
    limits = RequestLimits(RequestLimit("1000/day", by="address"))
    edge = plain_edge(app, concurrency=places, limits=limits, lifecycle=None)
    statuses: list[int] = []

    async def main() -> None:
        for _ in range(40):
            statuses.extend(await _statuses(edge, 3))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(interval)
    left = asyncio.run(ask(edge)).headers["ratelimit"]
    edge.close()
    assert set(statuses) <= {200, 503}
    assert left.startswith(f'"address";r={999 - statuses.count(200)};')
    assert places.in_flight == 0
    assert len(places.slots.free) == 2


def test_threads_that_interrupt_each_other_cut_their_own_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where one is between finding its loop and saying in which thread that is."""
    tasks: dict[str, Any] = {}

    async def note(scope: Any, _receive: Any, send: Any) -> None:
        tasks[scope["path"]] = scope[INCOMING].task, asyncio.current_task()
        await text_app()(scope, None, send)

    edge = plain_edge(note, inbound=Inbound(timeout=5.0), lifecycle=None)
    between, gone_on = threading.Event(), threading.Event()
    real = timers.get_ident

    def slow() -> int:
        if threading.current_thread().name == "other":
            between.set()
            gone_on.wait(5)
        return real()

    monkeypatch.setattr(timers, "get_ident", slow)
    other = threading.Thread(target=lambda: asyncio.run(ask(edge, "/other")), name="other")

    async def main() -> None:
        await apart(edge)
        other.start()
        await asyncio.to_thread(between.wait, 0.2)  # from 3.12 on nobody asks
        await apart(edge, "/own")
        gone_on.set()
        await asyncio.to_thread(other.join, 5)
        await apart(edge, "/after")

    asyncio.run(main())
    edge.close()
    assert set(tasks) == {"/", "/own", "/other", "/after"}
    for cut, own in tasks.values():
        assert cut is own


def test_a_loop_that_is_found_meanwhile_is_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds a loop for the first time gets its own lane, though another thread does so, too."""
    edge = plain_edge(inbound=Inbound(timeout=5.0), lifecycle=None)
    loops: list[Any] = []
    interrupted: set[str] = set()

    async def find() -> None:
        lane, task = edge._timers.find_queue()
        loops.append((lane.loop, task.get_loop()))

    def interrupting(real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, but another thread comes between its end and what follows."""

        def slow(*args: Any) -> Any:
            done = real(*args)
            main = threading.current_thread() is threading.main_thread()
            if main and real.__name__ not in interrupted:
                interrupted.add(real.__name__)
                thread = threading.Thread(target=lambda: asyncio.run(find()))
                thread.start()
                thread.join(5)
            return done

        return slow

    for module, name in ((_async_timeout, "ExpiryQueue"), (timers, "get_ident")):
        monkeypatch.setattr(module, name, interrupting(getattr(module, name)))
    asyncio.run(find())
    edge.close()
    assert len(loops) == 1 + len(interrupted)
    for lane_loop, own_loop in loops:
        assert lane_loop is own_loop
