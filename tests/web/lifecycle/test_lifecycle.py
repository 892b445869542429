from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import subscribe
from seawall.events import LifecycleChanged
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual
from seawall.web.lifecycle import Drained, Lifecycle
from tests.support import falsified, let_pass
from tests.web.health.support import Server, plain_app


def now() -> float:
    return asyncio.get_running_loop().time()


# --- From start to end ---


def test_it_goes_through_its_phases_in_order_and_tells_each():
    """A service starts, is ready, drains and stops, with one event for each change."""
    events: list[LifecycleChanged] = []
    lifecycle = Lifecycle(name="orders")

    async def main() -> None:
        assert lifecycle.state == "starting"
        server = Server(lifecycle, plain_app)
        await server.startup()
        assert lifecycle.state == "ready"
        await server.shutdown()
        assert server.told == ["startup.complete", "shutdown.complete"]

    unsubscribe = subscribe(events.append, LifecycleChanged)
    run_virtual(main())
    unsubscribe()
    assert [(event.before, event.after) for event in events] == [
        ("starting", "ready"),
        ("ready", "draining"),
        ("draining", "stopped"),
    ]
    assert {event.guard for event in events} == {"orders"}
    assert repr(lifecycle) == "<Lifecycle 'orders': stopped, 0 in flight>"


@pytest.mark.parametrize(
    ("reads", "raises"),
    [(False, False), (True, False), (False, True)],
    ids=["returns", "returns after reading", "raises at once"],
)
def test_an_app_without_lifespan_starts_and_stops_all_the_same(reads: bool, raises: bool):  # noqa: FBT001
    """An app that raises on, or ignores, the lifespan protocol still has a lifecycle."""
    lifecycle = Lifecycle()

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        if reads:
            await receive()
        if raises:
            raise KeyError("method")

    async def main() -> None:
        server = Server(lifecycle, app)
        await server.startup()
        assert lifecycle.state == "ready"
        await server.shutdown()
        assert server.told == ["startup.complete", "shutdown.complete"]
        assert lifecycle.state == "stopped"

    run_virtual(main())


def test_an_app_that_raises_in_its_own_start_fails_the_start():
    """Once it has heard of the start it knows the protocol; a server may still go on to serve."""

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        raise ConnectionError("no database")

    async def main() -> None:
        lifecycle = Lifecycle()
        server = Server(lifecycle, app)
        server._messages.put_nowait({"type": "lifespan.startup"})
        with pytest.raises(ConnectionError):
            await server.task
        assert server.told == []
        assert lifecycle.begin()  # of a server that does not insist on the protocol
        assert lifecycle.state == "ready"

    run_virtual(main())


def test_an_app_that_fails_to_start_is_passed_on():
    """The app's own failure reaches the server as it is."""
    lifecycle = Lifecycle()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})
        raise ZeroDivisionError

    async def main() -> None:
        server = Server(lifecycle, app)
        await server.startup()
        with pytest.raises(ZeroDivisionError):
            await server.task
        assert server.told == ["startup.failed"]
        assert lifecycle.state == "stopped"

    run_virtual(main())


def test_a_server_without_lifespan_is_noticed_by_its_first_request():
    """Requests without any start-up mean that the server does not know the protocol."""

    async def main() -> None:
        lifecycle = Lifecycle()
        assert lifecycle.begin()
        assert lifecycle.state == "ready"
        lifecycle.end()
        assert lifecycle.in_flight == 0

    run_virtual(main())


def test_it_can_live_again_in_another_loop():
    """What was stopped starts anew with the next lifespan, as tests of apps do."""
    lifecycle = Lifecycle()

    async def main() -> None:
        server = Server(lifecycle, plain_app)
        await server.startup()
        assert lifecycle.begin()
        lifecycle.end()
        await server.shutdown()
        assert not lifecycle.begin()

    run_virtual(main())
    run_virtual(main())
    assert lifecycle.refused == 2


def test_a_second_server_leaves_the_life_of_the_first_alone():
    """Its lifespan is passed on to the app, as that of a test client within another one."""

    async def main() -> None:
        lifecycle = Lifecycle()
        server = Server(lifecycle, plain_app)
        await server.startup()
        inner = Server(lifecycle, plain_app)
        await inner.startup()
        await inner.shutdown()
        assert inner.told == ["startup.complete", "shutdown.complete"]
        assert lifecycle.state == "ready"
        await server.shutdown()
        assert lifecycle.state == "stopped"

    run_virtual(main())


def test_after_its_end_it_lives_again_for_who_sends_no_lifespan():
    """In another event loop only: one test with a lifespan, and one without, of the same app."""
    lifecycle = Lifecycle()

    async def life() -> None:
        server = Server(lifecycle, plain_app)
        await server.startup()
        assert lifecycle.begin()  # and it is lost with the loop
        await server.shutdown()
        assert not lifecycle.begin()

    async def bare() -> None:
        assert lifecycle.begin()
        assert (lifecycle.state, lifecycle.in_flight) == ("ready", 1)
        lifecycle.end()
        lifecycle.end()  # that of the first life, late
        assert lifecycle.in_flight == 0

    lifecycle.drain_timeout = 0.0
    run_virtual(life())
    run_virtual(bare())


def test_a_warm_up_that_was_lost_with_its_loop_is_begun_again():
    """Each request of a bare test client has a loop of its own."""
    lifecycle = Lifecycle()

    @lifecycle.warm_up
    async def load() -> None:
        await let_pass(1.0)

    async def probe(seconds: float) -> str:
        lifecycle.start_if_needed()
        await let_pass(seconds)
        return lifecycle.state

    assert run_virtual(probe(0.5)) == "starting"
    assert run_virtual(probe(1.5)) == "ready"
    assert run_virtual(probe(0.0)) == "ready"


def test_a_step_whose_error_cannot_be_shown_is_tried_again():
    """Whatever its error says, or fails to."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise LookupError

    async def main() -> None:
        lifecycle = Lifecycle()
        lifecycle.warm_up(ScriptedService(fail(Unspeakable), answer()).acall)
        lifecycle.start_if_needed()
        await let_pass(1.0)
        assert lifecycle.state == "ready"

    run_virtual(main())


# --- Warm-up ---


def test_it_is_ready_only_when_every_step_is_done():
    """Steps run in order after the app's start-up, and readiness waits for the last."""
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append("app")
        await plain_app(scope, receive, send)

    async def main() -> None:
        lifecycle = Lifecycle()

        @lifecycle.warm_up
        async def load() -> None:
            await let_pass(2.0)
            order.append("load")

        @lifecycle.warm_up
        def connect() -> None:
            order.append("connect")

        server = Server(lifecycle, app)
        await server.startup()
        assert lifecycle.state == "starting"
        assert lifecycle.snapshot()["warming_up"] == ["load", "connect"]
        assert lifecycle.begin()  # whoever comes before it is ready is served
        lifecycle.end()
        await let_pass(2.5)
        assert lifecycle.state == "ready"
        assert order == ["app", "load", "connect"]
        await server.shutdown()

    run_virtual(main())


def test_a_step_that_fails_is_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture):
    """Until it works the service is starting, and each failure is logged."""

    async def main() -> None:
        lifecycle = Lifecycle()
        service = ScriptedService(fail(ConnectionError("no\nway"), times=3), answer())
        lifecycle.warm_up(service.acall)
        server = Server(lifecycle, plain_app)
        await server.startup()
        await let_pass(1.7)  # the pauses are 0.25 to 0.5, 0.5 to 1, 1 to 2 seconds
        assert (lifecycle.state, service.calls < 4) == ("starting", True)
        await let_pass(3.5 - 1.7)
        assert (lifecycle.state, service.calls) == ("ready", 4)
        await server.shutdown()

    run_virtual(main())
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("step 'ScriptedService.acall' failed (try 1): ConnectionError: no")
    )


def test_a_step_that_hangs_is_stopped_at_its_timeout():
    """A step has its own time; one that may be left out is."""

    async def main() -> None:
        lifecycle = Lifecycle()
        lifecycle.warm_up(ScriptedService(hang()).acall, timeout=3.0, on_failure="ignore")
        server = Server(lifecycle, plain_app)
        await server.startup()
        await let_pass(2.75)
        assert lifecycle.state == "starting"
        await let_pass(0.5)
        assert lifecycle.state == "ready"
        await server.shutdown()

    run_virtual(main())


@pytest.mark.parametrize("knows", [True, False], ids=["app with lifespan", "app without"])
def test_a_step_can_fail_the_start(knows: bool):  # noqa: FBT001
    """With on_failure="fail" the server never accepts, and the app closes what it had opened."""
    closed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not knows:
            raise KeyError
        try:
            await plain_app(scope, receive, send)
        finally:
            closed.append("app")

    async def main() -> None:
        lifecycle = Lifecycle()
        lifecycle.warm_up(ScriptedService(fail(ConnectionError)).acall, on_failure="fail")
        server = Server(lifecycle, app)
        await server.startup()
        with pytest.raises(RuntimeError, match="warm-up step"):
            await server.task
        assert server.told == ["startup.failed"]
        assert closed == (["app"] if knows else [])
        assert lifecycle.state == "stopped"

    run_virtual(main())


def test_draining_ends_the_warm_up():
    """A service that is told to stop while it warms up stops."""

    async def main() -> None:
        lifecycle = Lifecycle()
        service = ScriptedService(hang())
        lifecycle.warm_up(service.acall)
        server = Server(lifecycle, plain_app)
        await server.startup()
        await let_pass(0.1)
        assert service.running == 1
        await server.shutdown()
        assert (service.running, lifecycle.state) == (0, "stopped")

    run_virtual(main())


def test_steps_are_checked_when_they_are_added():
    """What cannot be a step says so at once."""

    async def main() -> None:
        lifecycle = Lifecycle()
        with pytest.raises(TypeError, match="pass a function without arguments"):
            lifecycle.warm_up(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="on_failure"):
            lifecycle.warm_up(main, on_failure="explode")  # type: ignore[arg-type]
        for _ in range(100):
            lifecycle.warm_up(main)
        with pytest.raises(ValueError, match="at most 100"):
            lifecycle.warm_up(main)
        ready = Lifecycle()
        ready.start_if_needed()
        with pytest.raises(RuntimeError, match="before it starts"):
            ready.warm_up(main)

    run_virtual(main())


# --- Draining ---


async def serve(lifecycle: Lifecycle, seconds: float, log: list[str]) -> None:
    """Be a request of so many seconds."""
    if not lifecycle.begin():
        log.append("refused")
        return
    try:
        await let_pass(seconds)
        log.append("served")
    finally:
        lifecycle.end()


def test_draining_accepts_for_its_delay_then_refuses_and_waits():
    """Readiness falls at once, the delay still serves, then the last in flight decides the end."""

    async def main() -> None:
        lifecycle, log = Lifecycle(delay=5.0, drain_timeout=25.0), []
        lifecycle.start_if_needed()
        requests = [asyncio.create_task(serve(lifecycle, 8.0, log))]
        await let_pass(1.0)
        drain = asyncio.create_task(lifecycle.drain())
        await let_pass(0)
        assert (lifecycle.state, lifecycle.draining) == ("draining", True)
        requests.append(asyncio.create_task(serve(lifecycle, 1.0, log)))
        await let_pass(5.5)
        requests.append(asyncio.create_task(serve(lifecycle, 1.0, log)))
        assert await drain == Drained(7.0, 0)
        await asyncio.gather(*requests)
        assert log == ["served", "refused", "served"]
        assert (lifecycle.state, lifecycle.draining, lifecycle.refused) == ("stopped", False, 1)
        assert await lifecycle.drain() == Drained(7.0, 0)  # whoever asks later hears the same

    run_virtual(main())


def test_what_does_not_end_in_time_is_told(caplog: pytest.LogCaptureFixture):
    """The deadline ends the draining, with the number of those that were cut."""
    events: list[LifecycleChanged] = []

    async def main() -> None:
        lifecycle = Lifecycle(drain_timeout=3.0, name="slow")
        lifecycle.start_if_needed()
        stream = asyncio.create_task(serve(lifecycle, 60.0, []))
        await let_pass(0)
        assert await lifecycle.drain() == Drained(3.0, 1)
        assert lifecycle.snapshot()["cut"] == 1
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert lifecycle.in_flight == 0

    unsubscribe = subscribe(events.append, LifecycleChanged)
    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    unsubscribe()
    assert events[-1].in_flight == 1
    assert "1 requests were still in flight after 3.0 s" in caplog.text


def test_the_app_is_told_to_close_only_when_all_is_served():
    """A request in flight keeps what it needs: the shutdown message waits for it."""

    async def main() -> None:
        lifecycle, log = Lifecycle(delay=5.0), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await plain_app(scope, receive, send)
            log.append("closed")

        server = Server(lifecycle, app)
        await server.startup()
        request = asyncio.create_task(serve(lifecycle, 2.0, log))
        await let_pass(0)
        began = now()
        await server.shutdown()
        await request
        assert log == ["served", "closed"]
        assert now() - began < 2.5  # without the delay: the server accepts no more anyway

    run_virtual(main())


def test_streams_hear_that_draining_begins():
    """Whoever serves for long can wait for the draining, and end in time."""

    async def main() -> None:
        lifecycle = Lifecycle()
        lifecycle.start_if_needed()

        async def stream() -> None:
            assert lifecycle.begin()
            await lifecycle.until_draining()
            lifecycle.end()

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        await let_pass(1.0)
        assert (await lifecycle.drain()).cut == 0
        await asyncio.gather(*streams)

    run_virtual(main())


def test_answers_close_their_connections_while_it_drains():
    """Keep-alive connections end with the answer, so that none is closed under a request."""

    async def main() -> None:
        lifecycle = Lifecycle(delay=5.0)
        lifecycle.start_if_needed()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        assert lifecycle.closing_send({}, send) is send
        assert lifecycle.begin()
        drain = asyncio.create_task(lifecycle.drain())
        await let_pass(0)
        assert lifecycle.closing_send({"http_version": "2"}, send) is send
        headers = [(b"Connection", b"keep-alive"), (b"x", b"y")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        for message in (start, {"type": "http.response.body"}):
            await lifecycle.closing_send({"http_version": "1.1"}, send)(message)
        assert sent[0]["headers"] == [(b"x", b"y"), (b"connection", b"close")]
        assert sent[1] == {"type": "http.response.body"}
        lifecycle.end()
        await drain
        assert lifecycle.closing_send({"http_version": "1.1"}, send) is not send
        assert lifecycle.closing_send({"http_version": "2"}, send) is send

    run_virtual(main())


@pytest.mark.parametrize("ends", [6.0, 30.0])
def test_the_server_is_told_to_stop_only_when_no_websocket_is_open(ends: float):
    """It would cut them: so they have until the deadline, while nothing new is let in."""
    stops: list[tuple[float, float]] = []

    async def main() -> None:
        lifecycle = Lifecycle(delay=2.0, drain_timeout=10.0)
        lifecycle.start_if_needed()
        began = now()

        async def socket() -> None:
            assert lifecycle.begin_socket()
            await lifecycle.until_draining()
            await let_pass(ends)
            lifecycle.end_socket()

        open_ = asyncio.create_task(socket())
        await let_pass(0)
        assert lifecycle.snapshot()["sockets"] == 1
        drain = lifecycle._draining(lambda left: stops.append((now() - began, left)))
        await let_pass(3.0)
        assert not lifecycle.begin_socket()
        assert not lifecycle.begin()
        over = min(ends, 10.0)
        assert await drain == Drained(over, int(ends > 10.0))
        assert stops == [(over, 10.0 - over)]
        await open_
        assert (lifecycle.in_flight, lifecycle.sockets) == (0, 0)

    run_virtual(main())


def test_a_signal_within_a_drain_that_was_begun_by_hand_keeps_delay_and_deadline():
    """The server hears of it when the delay is over, with what is left of the time."""
    stops: list[tuple[float, float]] = []

    async def main() -> None:
        lifecycle = Lifecycle(delay=5.0, drain_timeout=20.0)
        lifecycle.start_if_needed()
        began = now()
        drain = asyncio.create_task(lifecycle.drain())
        await let_pass(1.0)
        lifecycle._draining(lambda left: stops.append((now() - began, left)))
        await drain
        assert stops == [(5.0, 15.0)]
        await let_pass(1.0)
        lifecycle._draining(lambda left: stops.append((now() - began, left)))
        assert stops[1:] == [(6.0, 14.0)]

    run_virtual(main())


def test_whoever_gives_up_waiting_does_not_stop_the_draining():
    """Draining goes on when the task that asked for it is cancelled, and is the same for all."""

    async def main() -> None:
        lifecycle = Lifecycle(drain_timeout=10.0)
        lifecycle.start_if_needed()
        request = asyncio.create_task(serve(lifecycle, 4.0, []))
        await let_pass(0)
        first = asyncio.create_task(lifecycle.drain())
        await let_pass(1.0)
        first.cancel()
        assert await lifecycle.drain() == Drained(4.0, 0)
        await request

    run_virtual(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": 5.0, "drain_timeout": 5.0}, "it is part of drain_timeout"),
        ({"delay": -1.0}, "0 or more"),
        ({"drain_timeout": float("nan")}, "finite"),
        ({"name": ""}, "write a name"),
        ({"signals": 1}, "True or False"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    """A setting that cannot be meant says what to write instead."""
    with pytest.raises((TypeError, ValueError), match=message):
        Lifecycle(**arguments)


# --- What always holds ---

HISTORIES = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=12
).flatmap(lambda requests: st.tuples(st.just(requests), st.integers(0, 40), st.integers(0, 20)))


def no_request_is_lost(case: tuple[list[tuple[int, int]], int, int]) -> None:
    """Whoever was counted in is served to its end or cut at the deadline, and nobody twice."""
    requests, drain_at, delay = case

    async def main() -> None:
        lifecycle = Lifecycle(delay=delay / 4, drain_timeout=10.0)
        lifecycle.start_if_needed()
        ends: list[tuple[float, float]] = []
        refused: list[float] = []

        async def one(arrives: float, takes: float) -> None:
            await let_pass(arrives)
            came = now()
            if not lifecycle.begin():
                refused.append(came)
                return
            try:
                await let_pass(takes)
            finally:
                ends.append((came, now()))
                lifecycle.end()

        tasks = [asyncio.create_task(one(at / 4 + 0.1, length / 4)) for at, length in requests]
        await let_pass(drain_at / 4)
        began = now()
        drained = await lifecycle.drain()
        ended = now()
        assert ended - began <= 10.0
        assert all(came >= began + delay / 4 for came in refused)
        assert lifecycle.in_flight == drained.cut
        await asyncio.gather(*tasks)
        assert lifecycle.in_flight == 0
        assert len(ends) + len(refused) == len(requests)
        assert drained.cut == sum(1 for _came, over in ends if over > ended)
        if drained.cut:
            assert ended - began == 10.0

    run_virtual(main())


@given(HISTORIES)
def test_no_accepted_request_is_lost(case: Any):
    """Draining ends when the last accepted request does, or at its deadline, and counts right."""
    no_request_is_lost(case)


def test_without_waiting_requests_would_be_lost(monkeypatch: pytest.MonkeyPatch):
    """The property fails if draining does not wait for what is in flight."""
    monkeypatch.setattr("seawall.web.lifecycle.lifecycle._wait_at_most", _does_not_wait)
    assert falsified(no_request_is_lost, HISTORIES)


async def _does_not_wait(awaited: Any, _seconds: float) -> bool:
    if asyncio.iscoroutine(awaited):
        awaited.close()
    return False
