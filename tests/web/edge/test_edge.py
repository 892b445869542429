"""The edge as a whole: the order of its parts, and what a client is told."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from starlette.applications import Starlette

from seawall import (
    AdaptiveLimit,
    Bulkhead,
    CircuitOpen,
    Guard,
    Overloaded,
    RateLimited,
    Shed,
    TimedOut,
    Timeout,
)
from seawall.clock import current_clock
from seawall.context import Criticality, criticality, current_criticality, current_deadline
from seawall.errors import KeyMissing, UnknownJob
from seawall.limits import aimd
from seawall.shedding import by_criticality
from seawall.testing import run_virtual
from seawall.web.edge import Edge, default_concurrency
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.fastapi import MountedErrors
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.support import let_pass, new_guard
from tests.web.support import App, ask, held_slots, http_scope, serve, text_app

TRUSTED = Trust(callers=["127.0.0.0/8"])


def raising(error: BaseException, *, after: int = 0) -> App:
    """Return an app that raises after it has sent so many messages."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        messages: list[dict[str, Any]] = [
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"half", "more_body": True},
        ]
        for message in messages[:after]:
            await send(message)
        raise error

    return app


def hanging(seconds: float = 60.0, *, after: int = 0) -> App:
    """Return an app that takes its time after it has sent so many messages, then answers."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        messages: list[dict[str, Any]] = [
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"done"},
        ]
        for message in messages[:after]:
            await send(message)
        await let_pass(seconds)
        for message in messages[after:]:
            await send(message)

    return app


def test_a_request_passes_and_is_counted() -> None:
    """With all parts in place an answer is the app's own, and nothing is held after it."""

    async def main() -> None:
        edge = Edge(
            text_app(),
            name="whole",
            inbound=Inbound(),
            shed=Shed(by_criticality(), load=lambda: 0.0),
            loop_admission=LoopAdmission(),
            concurrency=default_concurrency(),
            lifecycle=Lifecycle(signals=False),
        )
        answer = await ask(edge)
        assert (answer.status, answer.body) == (200, b"hello")
        told = edge.snapshot()
        assert told["succeeded"] == 1
        assert told["lifecycle"]["in_flight"] == 0
        assert told["inbound"]["expired"] == 0
        assert repr(edge) == "<Edge 'whole'>"
        assert not held_slots()

    run_virtual(main())


def test_an_edge_without_parts_lets_all_through() -> None:
    """Each part may be left out, and so may all of them."""

    async def main() -> None:
        edge = Edge(text_app(), name="empty")
        assert (await ask(edge)).body == b"hello"
        edge.close()

    run_virtual(main())


def test_health_is_answered_when_all_else_refuses() -> None:
    """A probe is never shed, limited or queued."""

    async def main() -> None:
        shed = Shed(by_criticality(), load=lambda: 2.0)
        edge = Edge(text_app(), name="probed", health=Health(), shed=shed)
        assert (await ask(edge, "/health/live")).status == 200
        refused = await ask(edge)
        assert refused.status == 503
        assert refused.json()["reason"] == "shed_by_criticality"
        assert int(refused.headers["retry-after"]) >= 1

    run_virtual(main())


def test_a_service_that_goes_away_says_so_and_closes_the_connection() -> None:
    """While it drains, what comes is refused, and the client connects elsewhere."""

    async def main() -> None:
        life = Lifecycle(signals=False, drain_timeout=1.0)
        edge = Edge(text_app(), name="leaving", lifecycle=life)
        assert (await ask(edge)).status == 200
        await life.drain()
        answer = await ask(edge)
        assert answer.status == 503
        assert answer.headers["connection"] == "close"
        assert answer.headers["retry-after"] == "1"
        assert life.in_flight == 0

    run_virtual(main())


@pytest.mark.parametrize("refused", ["late", "by the app", "by a limit", "draining", "mounted"])
def test_a_refused_head_has_no_body(refused: str) -> None:
    """The headers are those of a GET, the length of its body included; the body is left out."""

    async def raises(_scope: Any, _receive: Any, _send: Any) -> None:
        raise UnknownJob("none")

    async def main() -> None:
        life = Lifecycle(signals=False, drain_timeout=1.0)
        app: Any = raises
        if refused == "by a limit":
            limits = RequestLimits(RequestLimit("1/min", by="address"))
            app = Edge(text_app(), name="head", limits=limits)
            await ask(app)
        elif refused == "mounted":
            app = MountedErrors(raises, upstreams=UpstreamLog("head", lambda: 0.0))
        else:
            app = Edge(raises, name="head", lifecycle=life, inbound=Inbound(trust=TRUSTED))
        if refused == "draining":
            await life.drain()
        late = [("x-envoy-expected-rq-timeout-ms", "0")] if refused == "late" else []
        got, head = [await ask(app, method=each, headers=late) for each in ("GET", "HEAD")]
        assert got.status == head.status >= 400
        assert (head.body, head.headers["content-length"]) == (b"", str(len(got.body)))
        assert len(got.body) > 0

    run_virtual(main())


def test_what_came_too_late_is_504_and_never_runs() -> None:
    """A trusted caller's deadline of nothing is answered without running the app."""
    ran = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        ran.append(1)

    async def main() -> None:
        edge = Edge(app, name="late", inbound=Inbound(trust=TRUSTED))
        answer = await ask(edge, headers=[("x-envoy-expected-rq-timeout-ms", "0")])
        assert answer.status == 504
        assert answer.json()["reason"] == "deadline_exceeded"

    run_virtual(main())
    assert not ran


def test_the_deadline_cuts_the_app_off_until_the_response_starts() -> None:
    """No answer in time is 504; one that has started goes on for as long as it takes."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        edge = Edge(hanging(), name="cut", inbound=Inbound(timeout=2.0), concurrency=Bulkhead(5))
        began = loop.time()
        answer = await ask(edge)
        assert loop.time() - began == pytest.approx(2.0)
        assert answer.status == 504
        assert answer.json()["reason"] == "timed_out"
        assert edge.snapshot()["failed"] == 1
        edge.app = hanging(after=1)
        assert (await ask(edge)).body == b"done"
        assert not held_slots()
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run_virtual(main())


def test_a_nearer_deadline_than_the_one_before_has_a_timer_of_its_own() -> None:
    """Deadlines that do not come in order are all kept."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        edge = Edge(hanging(), name="order", inbound=Inbound(trust=TRUSTED, timeout=5.0))
        ends: dict[str, float] = {}

        async def client(seconds: str) -> None:
            headers = [("x-server-timeout", seconds)]
            assert (await ask(edge, headers=headers)).status == 504
            ends[seconds] = loop.time()

        began = loop.time()
        await asyncio.gather(*(client(timeout) for timeout in ("4", "1", "3", "9", "0.5")))
        seconds = {timeout: round(end - began, 3) for timeout, end in ends.items()}
        assert seconds == {"4": 4.0, "1": 1.0, "3": 3.0, "9": 5.0, "0.5": 0.5}

    run_virtual(main())


def test_somebody_elses_cancellation_is_not_taken_for_a_timeout() -> None:
    """A server that cancels the task means it."""

    async def main() -> None:
        edge = Edge(hanging(), name="stop", inbound=Inbound(), concurrency=Bulkhead(1))
        task = asyncio.ensure_future(ask(edge))
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert edge.snapshot()["cancelled"] == 1
        assert not held_slots()

    run_virtual(main())


def test_an_app_that_outlives_its_cut_leaves_nothing_behind() -> None:
    """Whoever swallows the cancellation and answers all the same is heard."""

    async def stubborn(_scope: Any, _receive: Any, send: Any) -> None:
        try:
            await let_pass(60)
        except asyncio.CancelledError:
            await text_app("late")(_scope, _receive, send)

    async def main() -> None:
        edge = Edge(stubborn, name="stubborn", inbound=Inbound(timeout=1.0))
        assert (await ask(edge)).body == b"late"
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run_virtual(main())


def test_handlers_raise_and_the_edge_maps() -> None:
    """An error of ours becomes a problem; another's is raised, and so is one in mid-body."""

    async def main() -> None:
        edge = Edge(raising(CircuitOpen("open", retry_after=7.0)), name="map")
        answer = await ask(edge)
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        edge.app = raising(ValueError("bug"))
        with pytest.raises(ValueError, match="bug"):
            await ask(edge)
        edge.app = raising(Overloaded("too late to say"), after=1)
        with pytest.raises(Overloaded):
            await ask(edge)
        assert edge.snapshot()["failed"] == 3

    run_virtual(main())


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "succeeded"), (429, "succeeded"), (503, "failed")]
)
def test_an_answer_of_500_or_more_is_a_failure(status: int, outcome: str) -> None:
    """The app's own refusal of a caller is a success, its own overload is not."""

    async def main() -> None:
        limit = AdaptiveLimit()
        edge = Edge(text_app("x", status), name="status", concurrency=limit)
        assert (await ask(edge)).status == status
        assert edge.snapshot()[outcome] == 1
        assert len(limit.windows.samples) == (outcome == "succeeded")
        assert not limit.windows.drops

    run_virtual(main())


class OwnLimited(RateLimited):
    """As a route's own limit refuses."""

    own_limit = True


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (UnknownJob("no such job"), 404, "succeeded"),
        (KeyMissing("no key"), 400, "succeeded"),
        (OwnLimited("too often"), 429, "succeeded"),
        (RateLimited("a vendor's"), 503, "failed"),
        (TimedOut("late"), 504, "failed"),
    ],
    ids=["UnknownJob", "KeyMissing", "own limit", "vendor's limit", "TimedOut"],
)
def test_an_answer_that_the_edge_makes_of_an_error_counts_by_its_status(
    error: Exception, status: int, outcome: str
) -> None:
    """Whether the app answers 404 or raises what becomes one, it has served the caller."""

    async def main() -> None:
        limit = AdaptiveLimit()
        edge = Edge(raising(error), name="raised", inbound=Inbound(), concurrency=limit)
        assert (await ask(edge)).status == status
        told = edge.snapshot()
        assert [told[name] for name in ("succeeded", "failed")] == [
            outcome == "succeeded",
            outcome == "failed",
        ]
        assert len(limit.windows.samples) == (outcome == "succeeded")
        assert limit.in_flight == 0

    run_virtual(main())


def test_limits_tell_what_is_left_and_refuse_with_429() -> None:
    """The headers are on answers and on refusals, and who is refused further in loses nothing."""

    async def main() -> None:
        limits = RequestLimits(RequestLimit("2/min", by="address"))
        edge = Edge(text_app(), name="limited", limits=limits)
        assert "ratelimit" in (await ask(edge)).headers
        await ask(edge)
        refused = await ask(edge)
        assert refused.status == 429
        assert "ratelimit-policy" in refused.headers
        assert int(refused.headers["retry-after"]) >= 1

        limits = RequestLimits(RequestLimit("1/min", by="address"))
        full = Edge(text_app(), name="full-inside", limits=limits, concurrency=Bulkhead(1))
        with full.guard.hold():
            assert (await ask(full)).status == 503
        assert (await ask(full)).status == 200

    run_virtual(main())


def test_a_place_is_waited_for_in_the_order_of_criticality() -> None:
    """Who matters more is served first, and who waited too long is refused."""
    served = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        served.append(current_criticality().name)
        await let_pass(1.0)
        await text_app()(_scope, _receive, send)

    async def main() -> None:
        places = Bulkhead(1, max_wait=1.5, max_waiting=5, order="criticality")
        edge = Edge(app, name="queue", inbound=Inbound(trust=TRUSTED), concurrency=places)

        async def client(level: str) -> int:
            headers = [("baggage", f"seawall.criticality={level}")]
            return (await ask(edge, headers=headers)).status

        first = asyncio.ensure_future(client("critical"))
        await let_pass(0.1)
        rest = [client(level) for level in ("sheddable", "critical", "sheddable-plus")]
        assert await asyncio.gather(first, *rest) == [200, 503, 200, 503]
        assert served == ["CRITICAL", "CRITICAL"]

    run_virtual(main())


def test_the_wait_for_a_place_is_counted_if_it_ended_well() -> None:
    """Of three requests one is served at once, one after a second, and one waits in vain."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await let_pass(1.0)
        await text_app()(scope, receive, send)

    async def main() -> dict[str, Any]:
        edge = Edge(app, name="waits", concurrency=Bulkhead(1, max_wait=1.5, max_waiting=5))
        asked = await asyncio.gather(*(ask(edge) for _ in range(3)))
        assert [answer.status for answer in asked] == [200, 200, 503]
        return edge.guard.snapshot()

    waits = run_virtual(main())["waits"]
    assert (sum(waits["counts"]), waits["sum"]) == (1, pytest.approx(1.0))


def test_what_the_app_sees_is_gone_after_the_request() -> None:
    """Deadline and criticality are those of the request, and end with it."""
    seen = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        held = current_deadline()
        seen.append((held is not None and round(held.remaining(), 3), current_criticality().name))
        await text_app()(_scope, _receive, send)

    async def main() -> None:
        edge = Edge(app, name="context", inbound=Inbound(trust=TRUSTED, timeout=3.0))
        await ask(edge, headers=[("baggage", "seawall.criticality=sheddable")])
        assert current_deadline() is None
        assert current_criticality().name == "CRITICAL"

    run_virtual(main())
    assert seen == [(2.7, "SHEDDABLE")], "a tenth is kept back"


def test_a_route_has_a_limit_of_its_own() -> None:
    """It is found by its template, refuses alone, and the rest of the app goes on."""

    async def main() -> None:
        routes = {"/v1/reports/{id}": Bulkhead(1)}
        edge = Edge(hanging(1.0), name="routed", routes=routes)
        paths = ["/v1/reports/1", "/v1/reports/2", "/v1/hello", "/v1/reports/2/more"]
        answers = await asyncio.gather(*(ask(edge, path) for path in paths))
        assert [answer.status for answer in answers] == [200, 503, 200, 200]
        assert answers[1].json()["reason"] == "bulkhead_full"
        assert (await ask(edge, paths[0])).status == 200
        assert edge.snapshot()["routes"]["/v1/reports/{id}"]["limit"] == 1
        assert not held_slots()
        edge.close()
        Edge(text_app(), name="routed", routes=routes).close()  # their names are free again

    run_virtual(main())


@pytest.mark.parametrize("wait", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Bulkhead, AdaptiveLimit])
@pytest.mark.parametrize("part", ["routes", "concurrency"])
def test_a_full_gate_refuses_before_limits_are_asked(part: str, kind: Any, wait: float) -> None:
    """Taking from limits and giving back costs more than the refusal itself."""
    asked: list[str] = []

    def by(incoming: Incoming) -> str:
        asked.append(incoming.path)
        return "all"

    async def main() -> None:
        few = {"max_wait": wait, "max_waiting": 1}
        gate = (
            Bulkhead(1, **few)
            if kind is Bulkhead
            else AdaptiveLimit(aimd(slow_after=9.0, initial=1, maximum=1), **few)
        )
        limits = RequestLimits(RequestLimit("100/h", by=by, name="all"), name=f"early-{part}")
        gates: Any = {part: {"/a": gate} if part == "routes" else gate}
        edge = Edge(hanging(1.0), name="early", limits=limits, **gates)
        tasks = [asyncio.create_task(ask(edge, "/a")) for _ in range(1 + bool(wait))]
        await let_pass(0.1)
        asked.clear()
        refused = await ask(edge, "/a")
        assert refused.status == 503
        assert "ratelimit" not in refused.headers
        assert asked == []
        statuses = [(await task).status for task in tasks]
        assert statuses == [200, 503][: len(tasks)]
        assert edge.snapshot()["limits"]["limits"]["all"]["over"] == 0
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_a_full_gate_lets_the_more_critical_displace_others() -> None:
    """Whoever outranks a waiter is not refused before its turn to wait."""

    async def main() -> None:
        gate = Bulkhead(1, max_wait=5.0, max_waiting=1, order="criticality")
        edge = Edge(hanging(1.0), name="ranked", concurrency=gate)
        first = asyncio.create_task(ask(edge))
        await let_pass(0.1)
        with criticality(Criticality.SHEDDABLE):
            displaced = asyncio.create_task(ask(edge))
            await let_pass(0.1)
            assert (await ask(edge)).status == 503
        assert (await ask(edge)).status == 200
        assert [(await first).status, (await displaced).status] == [200, 503]
        edge.close()

    run_virtual(main())


def test_routes_are_found_inside_of_starlette() -> None:
    """The edge stands around the router, and so does it with mounts below it."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    async def slow(_request: Any) -> PlainTextResponse:
        await let_pass(1.0)
        return PlainTextResponse("report")

    async def main() -> None:
        app = Starlette(routes=[Mount("/v1", routes=[Route("/reports/{id}", slow)])])
        routes = {"/v1/reports/{id}": Bulkhead(1)}
        app.add_middleware(lambda app: Edge(app, name="star", routes=routes))  # type: ignore[arg-type]
        paths = ["/v1/reports/1", "/v1/reports/2", "/v1/none"]
        answers = await asyncio.gather(*(ask(app, path) for path in paths))
        assert [answer.status for answer in answers] == [200, 503, 404]

    run_virtual(main())


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        ("/api", "/api/reports/2", 503),
        ("/api/", "/api/reports/2", 503),
        ("/api", "/reports/2", 503),  # a proxy took the prefix away
        ("/api", "/apireports/2", 200),
        ("", "/api/reports/2", 200),
    ],
)
def test_a_route_is_found_below_where_the_app_is_mounted(root: str, path: str, status: int) -> None:
    """Templates are those that the app knows, whatever a server puts in front of them."""

    async def main() -> None:
        edge = Edge(hanging(1.0), name="below", routes={"/reports/{id}": Bulkhead(1)})
        first = asyncio.ensure_future(ask(edge, "/reports/1"))
        await let_pass(0.1)
        assert (await ask(edge, path, root_path=root)).status == status
        await first

    run_virtual(main())


def test_who_waits_for_a_place_of_a_route_is_served_or_told() -> None:
    """The wait is the limit's own, by criticality; what was waited for is given back too."""
    served = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        served.append(current_criticality().name)
        await hanging(1.0)(scope, _receive, send)

    async def main() -> None:
        places = Bulkhead(1, max_wait=1.5, max_waiting=5, order="criticality")
        edge = Edge(
            app,
            name="waits",
            inbound=Inbound(trust=TRUSTED),
            limits=RequestLimits(RequestLimit("9/min", by="address")),
            routes={"/reports/{id}": places},
        )

        async def client(level: str) -> int:
            headers = [("baggage", f"seawall.criticality={level}")]
            return (await ask(edge, "/reports/1", headers=headers)).status

        first = asyncio.ensure_future(client("critical"))
        await let_pass(0.1)
        rest = [client(level) for level in ("sheddable", "critical", "sheddable-plus")]
        assert await asyncio.gather(first, *rest) == [200, 503, 200, 503]
        assert served == ["CRITICAL", "CRITICAL"]
        told = (await ask(edge)).headers["ratelimit"]
        assert "r=6" in told  # two were served before this one, and those refused took nothing
        assert not held_slots()

    run_virtual(main())


def test_a_routes_limit_may_be_shared_and_may_choose() -> None:
    """One limit for two routes is one, and its partitions see the request."""

    async def main() -> None:
        one = Bulkhead(1)
        edge = Edge(hanging(1.0), name="shares", routes={"/a": one, "/b": one})
        answers = await asyncio.gather(ask(edge, "/a"), ask(edge, "/b"))
        assert sorted(answer.status for answer in answers) == [200, 503]

        seen = []

        def classify(incoming: Any) -> str:
            seen.append(incoming.header("x-kind"))
            return "live"

        shares = {"live": 0.5, "batch": 0.5}
        limit = AdaptiveLimit(partitions=shares, partition=classify)
        parted = Edge(text_app(), name="parted", routes={"/a": limit})
        assert (await ask(parted, "/a", headers=[("x-kind", "batch")])).status == 200
        assert seen == ["batch"]

    run_virtual(main())


@pytest.mark.parametrize("refuses", ["routes", "concurrency", "loop_admission"])
def test_a_refusal_further_in_gives_back_what_was_taken_before(refuses: str) -> None:
    """Whichever part refuses: limits, the route's place and all else are as if nobody had come."""

    async def main() -> None:
        full, place = Bulkhead(1), Bulkhead(1)
        parts: dict[str, Any] = {"routes": {"/a": place}}
        if refuses == "routes":
            parts = {"routes": {"/a": full}}
        elif refuses == "concurrency":
            parts["concurrency"] = full
        else:
            parts["loop_admission"] = LoopAdmission()
        limits = RequestLimits(RequestLimit("1/min", by="address"))
        edge = Edge(text_app(), name=f"back-{refuses}", limits=limits, **parts)
        holder = Guard(f"holder-{refuses}", full)
        gate: Any = edge.guard.bounds[0]
        enter = gate.enter
        for _ in range(3):
            with holder.hold():
                if refuses == "loop_admission":
                    gate.enter = _refuse
                refused = await ask(edge, "/a")
                assert (refused.status, "ratelimit" in refused.headers) == (503, False)
                gate.enter = enter
            assert (place.in_flight, full.in_flight) == (0, 0)
        assert (await ask(edge, "/a")).status == 200
        assert (await ask(edge, "/a")).status == 429
        assert not held_slots()

    run_virtual(main())


def _refuse(_now: float) -> None:
    raise Overloaded("no turn for it")


@pytest.mark.parametrize(
    ("routes", "advice"),
    [
        ({"reports": Bulkhead(1)}, "write a path, such as '/orders/{id}'"),
        ({"/*/reports": Bulkhead(1)}, "a \\* stands at the end"),
        ({"/a/{x}": Bulkhead(1), "/a/{y}": Bulkhead(1)}, "matches the same paths"),
        ({"/{id": Bulkhead(1)}, "'{id' has a brace that belongs to no parameter"),
        ({"/{order-id}": Bulkhead(1)}, "a brace that belongs to no parameter; write {name}"),
        ({"/f/*": Bulkhead(1), "/f/{name:path}": Bulkhead(1)}, "matches the same paths"),
    ],
)
def test_a_template_that_is_none_is_a_mistake(routes: dict[str, Bulkhead], advice: str) -> None:
    """The message says what to write."""
    with pytest.raises(ValueError, match=advice):
        Edge(text_app(), name="no-template", routes=routes)


def test_what_is_no_request_is_passed_on() -> None:
    """The life of the app is none of its business, without a `Lifecycle`."""

    async def main() -> None:
        seen = []

        async def app(scope: Any, _receive: Any, _send: Any) -> None:
            seen.append(scope["type"])

        edge = Edge(app, name="passing", routes={"/": Bulkhead(1)})
        await edge({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert seen == ["lifespan"]

    run_virtual(main())


@pytest.mark.parametrize(
    "part",
    [
        {"shed": Bulkhead(1)},
        {"concurrency": LoopAdmission()},
        {"routes": {"/": LoopAdmission()}},
        {"websockets": AdaptiveLimit()},
    ],
)
def test_a_wrong_part_is_refused_with_what_to_write(part: dict[str, Any]) -> None:
    """Mistakes are told where they are made."""
    with pytest.raises(TypeError, match="write "):
        Edge(text_app(), name="wrong", **part)


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_large_body_that_is_refused_does_not_break_the_connection(http: str) -> None:
    """The unread rest is read over, and the next request on the connection is served."""
    load = [2.0]
    edge = Edge(
        text_app(), name=f"unread-{http}", shed=Shed(by_criticality(), load=lambda: load[0])
    )
    with serve(edge, http=http) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            length = 3_000_000
            head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
            client.sendall(head.encode() + b"x" * length)
            stream = client.makefile("rb")
            assert _read_answer(stream) == 503
            load[0] = 0.0
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert _read_answer(stream) == 200
            stream.close()


def _read_answer(stream: Any) -> int:
    status = int(stream.readline().split()[1])
    length, chunked = 0, False
    while (line := stream.readline().strip().lower()) != b"":
        name, _, value = line.partition(b": ")
        length = int(value) if name == b"content-length" else length
        chunked = chunked or (name == b"transfer-encoding" and value == b"chunked")
    if chunked:
        while (size := int(stream.readline(), 16)) > 0:
            stream.read(size + 2)
        stream.readline()
    else:
        stream.read(length)
    return status


def test_a_real_server_tells_a_real_client() -> None:
    """Status, problem and Retry-After arrive."""
    edge = Edge(raising(Overloaded("no")), name="real", inbound=Inbound())
    with serve(edge) as url:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url)  # noqa: S310 - loopback
        with caught.value as answer:
            assert answer.code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert 1 <= int(answer.headers["retry-after"]) <= 3


def test_an_app_may_hand_over_send_to_who_looks_whether_it_is_async() -> None:
    """What the app is given as `send` counts as a coroutine function, as a server's does."""
    seen = []
    # Before 3.12 only asyncio knows functions that are marked; later it is deprecated there.
    ask = inspect if sys.version_info >= (3, 12) else asyncio

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        seen.append(ask.iscoroutinefunction(send))
        await text_app()(_scope, _receive, send)

    async def main() -> None:
        await Edge(app, name="marked")(http_scope(), None, _swallow)  # type: ignore[arg-type]

    asyncio.run(main())
    assert seen == [True]


async def _swallow(_message: Any) -> None:
    pass


def test_a_short_deadline_holds_after_a_long_one() -> None:
    """The timer of a request that has ended long before its time cuts nobody later than theirs."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await let_pass(5.0 if scope["path"] == "/slow" else 0.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        edge = Edge(app, name="short", inbound=Inbound(trust=TRUSTED, timeout=3.0))
        assert (await ask(edge)).status == 200
        began = current_clock().now()
        told = [("x-server-timeout", "0.3")]
        assert (await ask(edge, "/slow", headers=told)).status == 504
        assert current_clock().now() - began == pytest.approx(0.3, abs=0.01)
        edge.close()

    run_virtual(main())


def test_what_comes_after_the_answer_has_no_deadline() -> None:
    """A guarded call in a background task is not refused for the time that the answer had."""
    mail = new_guard(Timeout(1.0))
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        await let_pass(2.0)
        sent.append(current_deadline())
        await mail.acall(note)

    async def note() -> None:
        sent.append("sent")

    async def main() -> None:
        edge = Edge(app, name="after", inbound=Inbound(timeout=1.0))
        await ask(edge)
        assert sent == [None, "sent"]
        edge.close()

    run_virtual(main())


def test_a_message_that_is_sent_each_time_stays_as_it_is() -> None:
    """Headers are added to what is sent, not to what the app may send again."""
    start = {"type": "http.response.start", "status": 200, "headers": []}

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        limits = RequestLimits(RequestLimit("10/s", by="address"), name="constant")
        edge = Edge(app, name="constant", limits=limits)
        sizes = [len((await ask(edge)).messages[0]["headers"]) for _ in range(3)]
        assert sizes == [2, 2, 2]
        assert start["headers"] == []
        edge.close()

    run_virtual(main())


def test_an_app_that_answers_its_errors_itself_is_not_wrapped() -> None:
    """Starlette would answer 500 before the edge saw the error: `protect` stands inside."""
    with pytest.raises(TypeError, match="protect"):
        Edge(Starlette(), name="around")
