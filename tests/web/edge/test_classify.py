"""Requests that the first service ranks itself: `classify=` gives criticality and tier."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from seawall import Bulkhead, Criticality, Shed
from seawall.clients.http.headers import PROPAGATED, headers_for
from seawall.context import current_criticality, current_tenant, current_tier
from seawall.shedding import by_criticality, by_tier
from seawall.testing import run_virtual
from seawall.web import (
    Edge,
    Inbound,
    Incoming,
    LoopAdmission,
    Rank,
    RequestLimit,
    RequestLimits,
    Trust,
)
from seawall.web.fastapi import protect
from tests.support import let_pass
from tests.web.support import App, ask

LOW, PLUS, HIGH = Criticality.SHEDDABLE, Criticality.SHEDDABLE_PLUS, Criticality.CRITICAL_PLUS
CALLERS = Trust(callers=["127.0.0.1"])


def by_header(incoming: Incoming) -> Any:
    """Rank by a header that tests set: a level, a tier, or both."""
    said = incoming.header("x-rank") or ""
    level, _, tier = said.partition("/")
    return Rank(Criticality[level] if level else None, tier or None)


def rank(level: str = "", tier: str = "") -> tuple[str, str]:
    return "x-rank", f"{level}/{tier}"


def telling(into: list[Any]) -> App:
    """Return an app that notes how it was ranked, and what its own calls would tell others."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        outgoing = headers_for(PROPAGATED, {}, None, None)
        into.append((current_criticality(), current_tier(), outgoing.get("baggage")))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize(
    ("found", "level", "tier"),
    [
        (None, Criticality.CRITICAL, None),
        (LOW, LOW, None),
        (HIGH, HIGH, None),
        ("free", Criticality.CRITICAL, "free"),
        (Rank(LOW, "free"), LOW, "free"),
        (Rank(tier="paid"), Criticality.CRITICAL, "paid"),
    ],
)
def test_a_strangers_request_is_ranked_by_the_service(
    found: Any, level: Criticality, tier: str | None
) -> None:
    """A level, a tier, both or nothing; and what goes out says the same."""

    async def main() -> None:
        seen: list[Any] = []
        edge = Edge(telling(seen), name="ranks", inbound=Inbound(classify=lambda _: found))
        said = [("baggage", "seawall.criticality=critical-plus")]  # counts for nothing
        assert (await ask(edge, headers=said)).status == 200
        word = level.name.lower().replace("_", "-")
        baggage = None if level is Criticality.CRITICAL else f"seawall.criticality={word}"
        assert seen == [(level, tier, baggage)]
        assert (current_criticality(), current_tier()) == (Criticality.CRITICAL, None)
        edge.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("said", "found", "level"),
    [
        ("sheddable", HIGH, LOW),
        ("critical", LOW, LOW),
        ("sheddable-plus", None, PLUS),
        ("", HIGH, HIGH),
        ("critical-plus", HIGH, Criticality.CRITICAL),  # the most that callers can say
    ],
)
def test_a_believed_caller_can_only_lower_it(said: str, found: Any, level: Criticality) -> None:
    """The lower of both counts."""

    async def main() -> None:
        seen: list[Any] = []
        inbound = Inbound(trust=CALLERS, classify=lambda _: found)
        edge = Edge(telling(seen), name="lowers", inbound=inbound)
        headers = [("baggage", f"seawall.criticality={said}")] if said else []
        await ask(edge, headers=headers)
        assert seen[0][0] is level
        edge.close()

    run_virtual(main())


def test_an_edge_inside_another_does_not_rank_higher() -> None:
    """Neither by its own function, nor by what a believed caller says."""

    async def main() -> None:
        seen: list[Any] = []
        inbound = Inbound(trust=CALLERS, classify=lambda _: HIGH)
        inner = Edge(telling(seen), name="inner", inbound=inbound)
        outer = Edge(inner, name="outer", inbound=Inbound(trust=CALLERS, classify=lambda _: LOW))
        await ask(outer)
        await ask(outer, headers=[("baggage", "seawall.criticality=critical")])
        assert [level for level, *_ in seen] == [LOW, LOW]
        inner.close()
        outer.close()

    run_virtual(main())


def test_shedding_goes_by_it() -> None:
    """By criticality and by tier, before the app is asked."""

    async def main() -> None:
        rules = by_criticality(), by_tier({"free": 0.5})
        shed = Shed(*rules, load=lambda: 0.87)
        edge = Edge(telling([]), name="sheds", inbound=Inbound(classify=by_header), shed=shed)
        for headers, status in (
            ([rank("SHEDDABLE")], 503),
            ([rank("CRITICAL")], 200),
            ([rank("CRITICAL", "free")], 503),
            ([rank("CRITICAL", "paid")], 200),
            ([], 200),
        ):
            assert (await ask(edge, headers=headers)).status == status
        edge.close()

    run_virtual(main())


def test_limits_go_by_the_tier() -> None:
    """Each tier has its own rate; who is of none has the limit's."""

    async def main() -> None:
        limits = RequestLimits(RequestLimit("1/min", by="address", tiers={"paid": "3/min"}))
        edge = Edge(telling([]), name="tiers", inbound=Inbound(classify=by_header), limits=limits)
        for tier, served in (("", 1), ("paid", 3)):
            answers = [(await ask(edge, headers=[rank("", tier)])).status for _ in range(5)]
            assert answers.count(200) == served
        edge.close()

    run_virtual(main())


@pytest.mark.parametrize("part", ["concurrency", "route"])
def test_who_matters_more_leaves_the_queue_first(part: str) -> None:
    """Of those who wait for a place, whoever came first."""

    async def main() -> None:
        order: list[Criticality] = []

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            order.append(current_criticality())
            await let_pass(1.0)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        place = Bulkhead(1, max_wait=60.0, max_waiting=10, order="criticality")
        parts: dict[str, Any] = {"concurrency": place} if part == "concurrency" else {}
        parts = parts or {"routes": {"/": place}}
        edge = Edge(app, name="queues", inbound=Inbound(classify=by_header), **parts)
        levels = (Criticality.CRITICAL, LOW, HIGH, PLUS)
        tasks = []
        for level in levels:
            tasks.append(asyncio.create_task(ask(edge, headers=[rank(level.name)])))
            await let_pass(0.01)
        assert {(await task).status for task in tasks} == {200}
        assert order == [Criticality.CRITICAL, HIGH, PLUS, LOW]
        edge.close()

    run_virtual(main())


def test_turns_go_by_it() -> None:
    """While the loop is busy, the waiting request that matters most is in the front lane."""

    async def main() -> None:
        edge = Edge(
            telling([]),
            name="loop_admission",
            inbound=Inbound(classify=by_header),
            loop_admission=LoopAdmission(),
        )
        gate: Any = edge._loop_admission
        gate.start_in_turn = lambda _now: False  # no turn has time left
        tasks = [
            asyncio.create_task(ask(edge, headers=[rank(level.name)])) for level in (LOW, HIGH)
        ]
        await let_pass(0.01)
        assert [rank for rank, _ in gate._queued] == [LOW, HIGH]
        del gate.start_in_turn
        gate.slots.give_back()
        await let_pass(0.01)
        assert [task.done() for task in tasks] == [False, True]
        for task in tasks:
            await task
        edge.close()

    run_virtual(main())


def test_requests_are_ranked_by_route_user_and_tenant() -> None:
    """`protect(app, classify=)` sees the template, the scope, and what the edge has believed."""
    seen: list[Any] = []

    async def note(_request: Request) -> PlainTextResponse:
        seen.append((current_criticality(), current_tier()))
        return PlainTextResponse("")

    def classify(incoming: Incoming) -> Rank:
        level = LOW if incoming.route == "/reports/{id}" else None
        return Rank(level, incoming.scope.get("plan") or current_tenant())

    async def main() -> None:
        app = Starlette(routes=[Route("/reports/{id}", note), Route("/orders", note)])
        edge = protect(app, name="by-route", trust=CALLERS, classify=classify)
        await ask(app, "/reports/7")
        await ask(app, "/orders", plan="paid")
        await ask(app, "/orders", headers=[("baggage", "seawall.tenant=acme")])
        edge.close()

    run_virtual(main())
    assert seen == [
        (LOW, None),
        (Criticality.CRITICAL, "paid"),
        (Criticality.CRITICAL, "acme"),
    ]


def test_a_function_that_fails_ranks_nobody_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The request is served as without it; the log has one record a second, and a count is kept."""
    wrong: list[Any] = [ZeroDivisionError("no plan"), 3, 0.5, "", Rank("high"), Rank(None, 7)]  # type: ignore[arg-type]

    def classify(_incoming: Incoming) -> Any:
        found = wrong[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def main() -> None:
        seen: list[Any] = []
        inbound = Inbound(trust=CALLERS, classify=classify)
        edge = Edge(telling(seen), name="fails", inbound=inbound)
        while wrong:
            assert (await ask(edge)).status == 200
            wrong.pop(0)
        wrong.append(ZeroDivisionError())
        await ask(edge, headers=[("baggage", "seawall.criticality=sheddable")])
        assert [level for level, *_ in seen] == [Criticality.CRITICAL] * 6 + [LOW]
        assert edge.snapshot()["inbound"]["unclassified"] == 7
        assert len(caplog.records) == 1
        await let_pass(1.5)
        await ask(edge)
        assert len(caplog.records) == 2
        assert "classify failed" in caplog.text
        edge.close()

    with caplog.at_level(logging.ERROR, logger="seawall"):
        run_virtual(main())


def test_nobody_is_ranked_higher_by_giving_a_header_twice() -> None:
    """It is answered with 400, and the context is as before."""

    async def main() -> None:
        seen: list[Any] = []
        edge = Edge(telling(seen), name="twice", inbound=Inbound(classify=by_header))
        answer = await ask(edge, headers=[rank("SHEDDABLE"), rank("CRITICAL_PLUS")])
        assert (answer.status, answer.json()["reason"]) == (400, "ambiguous_header")
        assert seen == []
        assert current_criticality() is Criticality.CRITICAL
        edge.close()

    run_virtual(main())


def test_a_function_that_would_have_to_be_awaited_is_refused() -> None:
    """Where it is given, and not at the first request."""

    async def classify(_incoming: Incoming) -> None: ...

    wrong: Any
    for wrong in (classify, 5, "free"):
        with pytest.raises(TypeError, match="classify"):
            Inbound(classify=wrong)
        with pytest.raises(TypeError, match="classify"):
            protect(Starlette(), name="refused", classify=wrong)
