"""The reserve: a layer keeps back a little time, so that it can answer when its inside cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    Fallback,
    Guard,
    RateLimit,
    Retry,
    Timeout,
    current_deadline,
    deadline,
    static,
    transient,
)
from seawall.backoff import constant
from seawall.clients.httpx import AsyncGuardedTransport
from seawall.clock import VirtualClock
from seawall.context import keeping_back, reserve_of
from seawall.testing import run_virtual, virtual_time
from seawall.web import Inbound, Trust
from seawall.web.edge import Edge
from seawall.web.fastapi import protect
from seawall.wire.deadlines import least_timeout
from tests.support import let_pass, new_guard

SECONDS = st.floats(0.0, 1e6)


# The rule


@given(SECONDS, st.none() | SECONDS)
def test_a_reserve_leaves_at_least_half_of_the_time(left: float, seconds: float | None) -> None:
    """Whatever is left: never negative, and never so much that nothing could run inside."""
    kept = reserve_of(left, seconds)
    assert 0.0 <= kept <= left / 2
    if seconds is None:
        assert kept <= 0.5
        assert kept >= min(left / 10, 0.5, left / 2)
        assert left < 0.02 or kept >= 0.01
    else:
        assert kept == min(seconds, left / 2)


@given(st.floats(-1e6, 0.0))
def test_of_no_time_nothing_is_kept_back(left: float) -> None:
    """A deadline that has passed stays where it is."""
    assert reserve_of(left) == 0.0
    assert reserve_of(left, 1.0) == 0.0


@pytest.mark.parametrize(
    ("left", "kept"),
    [(100.0, 0.5), (5.0, 0.5), (1.0, 0.1), (0.1, 0.01), (0.05, 0.01), (0.02, 0.01), (0.01, 0.005)],
)
def test_the_reserve_is_a_tenth_from_10_ms_to_half_a_second(left: float, kept: float) -> None:
    """And half of what is left where that is less."""
    assert reserve_of(left) == pytest.approx(kept)


def test_keeping_back_shortens_the_deadline_inside_and_only_there() -> None:
    """Without a deadline there is nothing to keep back."""
    with virtual_time():
        with keeping_back(None):
            assert current_deadline() is None
        with deadline(1.0) as outer:
            with keeping_back(None):
                inside = current_deadline()
                assert inside is not None
                assert inside.remaining() == pytest.approx(0.9)
            after = current_deadline()
            assert after is not None
            assert after.at == outer.at


# At the edge


async def _ask(app: Any, clock: VirtualClock) -> tuple[int, str, float]:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://a.test") as client:
        began = clock.now()
        answer = await client.get("/")
        return answer.status_code, answer.text, clock.now() - began


def _answer_behind_protect(vendor: Guard, **settings: Any) -> tuple[int, str, float]:
    """Return status, text and seconds of a request whose dependency hangs."""
    clock = VirtualClock()

    async def main() -> tuple[int, str, float]:
        app = FastAPI()
        edge = protect(app, timeout=1.0, health=None, lifecycle=None, **settings)

        @app.get("/")
        async def handler() -> str:
            return str(await vendor.acall(let_pass, 60.0))

        try:
            return await _ask(app, clock)
        finally:
            edge.guard.close()

    return run_virtual(main(), clock=clock)


def test_a_fallback_behind_an_edge_answers_before_the_edge_cuts_it_off() -> None:
    """A dependency that hangs is answered from the fallback, not with 504."""
    vendor = new_guard(Fallback(static("cached")), Timeout(5.0))
    status, text, seconds = _answer_behind_protect(vendor)
    assert (status, text) == (200, '"cached"')
    assert 0.8 <= seconds <= 0.9


def test_without_any_reserve_the_edge_cuts_it_off() -> None:
    """Ablation: the timeout inside and the edge's own would end in the same instant."""
    vendor = new_guard(Fallback(static("cached"), reserve=0.0), Timeout(5.0))
    status, _, seconds = _answer_behind_protect(vendor, reserve=0.0)
    assert (status, seconds) == (504, 1.0)


@pytest.mark.parametrize(
    "headers", [{}, {"x-server-timeout": "0.5"}], ids=["short way", "long way"]
)
@pytest.mark.parametrize("reserve", [None, 0.2, 0.0])
def test_a_handler_is_cut_off_at_the_end_of_the_whole(
    headers: dict[str, str], reserve: float | None
) -> None:
    """What is kept back is kept from its calls: the handler itself has all of the time."""
    clock = VirtualClock()
    left: list[float] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        held = current_deadline()
        assert held is not None
        left.append(held.remaining())
        await let_pass(60.0)

    async def main() -> tuple[int, str, float]:
        inbound = Inbound(trust=Trust(callers=["127.0.0.1"]), timeout=1.0, reserve=reserve)
        edge = Edge(app, name="cut", inbound=inbound)
        transport = httpx.ASGITransport(edge, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://a.test") as client:
            began = clock.now()
            answer = await client.get("/", headers=headers)
            return answer.status_code, answer.text, clock.now() - began

    status, _, seconds = run_virtual(main(), clock=clock)
    whole = 0.5 if headers else 1.0
    assert (status, seconds) == (504, pytest.approx(whole))
    assert left == [pytest.approx(whole - reserve_of(whole, reserve))]


# Fallbacks


@pytest.mark.parametrize("kind", ["task", "cooperative", "thread"])
def test_a_timeout_inside_a_fallback_leaves_time_for_it(kind: str) -> None:
    """The deadline of the caller ends the call a little early, so that a level can still work."""
    left: list[float] = []

    def level() -> str:
        held = current_deadline()
        assert held is not None
        left.append(held.remaining())
        return "cached"

    async def hang() -> None:
        await let_pass(60.0)

    def obey() -> None:
        held = current_deadline()
        assert held is not None
        clock.advance(held.remaining())
        raise TimeoutError

    clock = VirtualClock()

    async def in_task() -> str:
        guard = new_guard(Fallback(level), Timeout(5.0), clock=clock)
        async with deadline(1.0, clock=clock):
            return await guard.acall(hang)

    if kind == "task":
        assert run_virtual(in_task(), clock=clock) == "cached"
    else:
        guard = new_guard(Fallback(level), Timeout(5.0, sync=kind), clock=clock)  # type: ignore[arg-type]
        with deadline(1.0, clock=clock):
            assert guard.call(obey) == "cached"
    assert left == [pytest.approx(0.1)]


def _hanging(inside: str) -> Guard:
    """Return a guard with a fallback, that has to wait for 5 s inside it."""
    if inside == "slot":
        return new_guard(Fallback(static("cached")), Bulkhead(1, max_wait=5.0))
    if inside == "rate":
        return new_guard(Fallback(static("cached")), RateLimit("1/min", burst=1, max_wait=90.0))
    if inside == "pause":
        return new_guard(
            Fallback(static("cached")), Retry(on=KeyError, attempts=2, backoff=constant(5.0))
        )
    return new_guard(Fallback(static("cached")))


async def _call_hanging(guard: Guard, inside: str) -> object:
    inner = new_guard(Timeout(5.0))

    async def work() -> object:
        if inside == "pause":
            raise KeyError
        return await inner.acall(let_pass, 60.0)

    if inside in ("slot", "rate"):
        holder = asyncio.create_task(guard.acall(let_pass, 9.0), context=Context())
        await let_pass(0.0)
        try:
            return await guard.acall(work)
        finally:
            holder.cancel()
    return await guard.acall(work)


HANGING = ["slot", "rate", "guard", "pause"]


@pytest.mark.parametrize("inside", HANGING)
def test_a_fallback_answers_within_the_callers_time_whatever_is_waited_for(inside: str) -> None:
    """A slot, a token, a guard that the function calls, a pause between two attempts.

    Without any reserve of the edge's own.
    """
    clock = VirtualClock()

    async def main() -> tuple[int, str, float]:
        guard = _hanging(inside)
        app = FastAPI()
        edge = protect(app, timeout=1.0, reserve=0.0, health=None, lifecycle=None)

        @app.get("/")
        async def handler() -> str:
            return str(await _call_hanging(guard, inside))

        try:
            return await _ask(app, clock)
        finally:
            edge.guard.close()

    status, text, seconds = run_virtual(main(), clock=clock)
    assert (status, text) == (200, '"cached"')
    assert seconds <= 0.9


@pytest.mark.parametrize("inside", ["slot", "guard"])
def test_without_a_reserve_a_fallback_is_cut_off_with_its_caller(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablation: what is waited for inside ends in the same instant as the caller's time."""
    monkeypatch.setattr("seawall.policies.fallback.reserve_scope", lambda _reserve: None)

    async def main() -> object:
        async with deadline(1.0):
            return await _call_hanging(_hanging(inside), inside)

    with pytest.raises(TimeoutError):
        run_virtual(main())


def test_a_sync_wait_for_a_slot_leaves_time_for_a_fallback() -> None:
    """A thread that waits gives up before its caller's deadline, and the level has all of it."""
    clock = VirtualClock()
    left: list[float] = []

    def level() -> str:
        held = current_deadline()
        assert held is not None
        left.append(held.remaining())
        return "cached"

    guard = new_guard(Fallback(level), Bulkhead(1, max_wait=5.0), clock=clock)
    with guard.hold(), deadline(1.0, clock=clock):
        assert guard.call(str, 1) == "cached"
    assert left == [pytest.approx(0.1)]


def test_a_call_that_comes_too_late_is_answered_by_a_fallback() -> None:
    """Nothing is kept back then, as nothing is left: the level is asked all the same."""
    clock = VirtualClock()
    guard = new_guard(Fallback(static("cached")), Bulkhead(1), clock=clock)
    with deadline(1.0, clock=clock):
        clock.advance(2.0)
        assert guard.call(str, 1) == "cached"
        assert guard.attempt(str, 1).value == "cached"


def test_only_the_outermost_timeout_inside_a_fallback_leaves_time() -> None:
    """The timeout of an attempt takes nothing from the total: that one ends before the caller."""
    seen: list[float] = []

    async def look() -> None:
        held = current_deadline()
        assert held is not None
        seen.append(held.remaining())

    async def main() -> None:
        stack = (Timeout(10.0), Retry(on=KeyError), Timeout(5.0))
        guard = new_guard(Fallback(static("cached")), *stack)
        await guard.acall(look)
        async with deadline(2.0):
            await guard.acall(look)

    run_virtual(main())
    assert seen == [pytest.approx(5.0), pytest.approx(1.8)]


def test_a_timeout_that_ends_well_before_the_deadline_is_not_shortened() -> None:
    """Only the caller's time is kept back from, and only where it is what ends the call."""
    seen: list[float] = []

    async def look() -> None:
        held = current_deadline()
        assert held is not None
        seen.append(held.remaining())

    async def main() -> None:
        guard = new_guard(Fallback(static("cached")), Timeout(1.0))
        for seconds in (30.0, 1.2, 1.05):
            async with deadline(seconds):
                await guard.acall(look)
                await guard.acall(look)  # by the success path, now that its timer runs

    run_virtual(main())
    assert seen == [pytest.approx(one) for one in (1.0, 1.0, 1.0, 1.0, 0.945, 0.945)]


def test_a_task_that_a_fallback_guard_left_running_has_its_callers_deadline_only() -> None:
    """What was kept back is kept for the time of the call."""

    async def main() -> float:
        found: list[float] = []
        over = asyncio.Event()

        async def background() -> None:
            await over.wait()
            held = current_deadline()
            assert held is not None
            found.append(held.remaining())

        async def work() -> None:
            tasks.append(asyncio.create_task(background()))

        tasks: list[asyncio.Task[None]] = []
        with deadline(1.0):
            await new_guard(Fallback(static("cached")), Timeout(5.0)).acall(work)
            over.set()
            await tasks[0]
        return found[0]

    assert run_virtual(main()) == pytest.approx(1.0)


# Clients


class _OtherProcess(httpx.AsyncBaseTransport):
    """Calls an app as another process would be called: nothing of the context goes along."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app, client=("127.0.0.1", 1))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        call = self._inner.handle_async_request(request)
        left = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(left):
                return await asyncio.create_task(call, context=Context())
        except TimeoutError:
            raise httpx.ReadTimeout("no answer", request=request) from None


def _times_left(reserve: float | None) -> tuple[dict[str, float], int]:
    """Return how long before their ends A, B and C of A -> B -> C knew that what they need hangs.

    And what the user of A was answered.
    """
    clock = VirtualClock()
    left: dict[str, float] = {}

    async def main() -> int:
        async with AsyncExitStack() as stack:

            def service(name: str, work: Callable[[], Any]) -> Edge:
                async def app(scope: Any, _receive: Any, send: Any) -> None:
                    end = clock.now() + (least_timeout(scope["headers"]) or 1.0)
                    try:
                        status = await work()
                    except (TimeoutError, httpx.HTTPError):
                        status = 502
                    finally:
                        left[name] = end - clock.now()
                    start = {"type": "http.response.start", "status": status, "headers": []}
                    await send(start)
                    await send({"type": "http.response.body", "body": b""})

                trust = Trust(callers=["127.0.0.1"])
                inbound = Inbound(trust=trust, timeout=1.0, reserve=reserve)
                return Edge(app, name=f"{name}-{id(left)}", inbound=inbound)

            async def asking(other: Edge) -> Callable[[], Any]:
                guard = new_guard(Retry(on=transient, attempts=1), Timeout(30.0))
                transport = AsyncGuardedTransport(guard, _OtherProcess(other), reserve=reserve)
                client = httpx.AsyncClient(transport=transport, timeout=30.0)
                await stack.enter_async_context(client)

                async def ask() -> int:
                    return (await client.get("http://next.test/")).status_code

                return ask

            hanging = new_guard(Timeout(30.0))
            c = service("c", lambda: hanging.acall(let_pass, 60.0))
            b = service("b", await asking(c))
            a = service("a", await asking(b))
            status, _, _ = await _ask(a, clock)
            return status

    return left, run_virtual(main(), clock=clock)


def test_services_of_a_chain_end_one_after_the_other() -> None:
    """Each service has time to answer when it learns that what it needs does not answer."""
    left, status = _times_left(None)
    assert status == 502
    assert left["c"] == pytest.approx(0.1 * 0.9**4, abs=0.002)
    assert left["c"] < left["b"] < left["a"]


def test_without_a_reserve_a_chain_ends_all_at_once() -> None:
    """Ablation: then nobody has time left to say anything."""
    left, status = _times_left(0.0)
    assert status == 504
    assert max(left.values()) <= 0.004


def test_a_client_keeps_back_a_part_of_its_callers_time_and_none_of_its_guards() -> None:
    """The guard's own Timeout is no caller's deadline."""
    told: list[str] = []
    clock = VirtualClock()

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(request.headers["x-server-timeout"])
        return httpx.Response(200)

    async def main() -> None:
        guard = new_guard(Timeout(2.0))
        inner = httpx.MockTransport(answer)
        async with AsyncExitStack() as stack:
            for reserve in (None, 0.25):
                transport = AsyncGuardedTransport(guard, inner, reserve=reserve)
                client = httpx.AsyncClient(transport=transport)
                await stack.enter_async_context(client)
                await client.get("http://x.test/")
                with deadline(1.0):
                    await client.get("http://x.test/")

    run_virtual(main(), clock=clock)
    assert told == ["2.000", "0.900", "2.000", "0.750"]
