"""Who a caller is: no way of writing a request gives it another quota."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.http.middleware import IdempotentRequests
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.jobs.http_api import JobsApi
from seawall.durable.jobs.jobs import Jobs
from seawall.errors import AmbiguousHeader
from seawall.testing import run_virtual
from seawall.web import Edge, Inbound, RequestLimit, RequestLimits, api_key, user
from seawall.web.fastapi import protect
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.web.support import ask, http_scope, text_app

ONE = ("x-api-key", "one")
TWO = ("x-api-key", "two")


def incoming(*headers: tuple[str, str]) -> Incoming:
    return Incoming(http_scope(headers=headers), Trust())


def test_a_header_given_twice_is_one_or_none() -> None:
    """The same value twice is that value; different ones are nobody's."""
    assert incoming(ONE, ONE, ("a", "b")).header("x-api-key") == "one"
    assert incoming(ONE, ("a", "1"), ("a", "2")).header("X-Api-Key") == "one"
    for other in (TWO, ("x-api-key", ""), ("x-api-key", "One")):
        for given in ((ONE, other), (other, ONE), (ONE, other, ONE)):
            with pytest.raises(AmbiguousHeader):
                incoming(*given).header("x-api-key")
    assert incoming(("a", "1"), ("a", "2")).header("x-api-key") is None


def test_the_lines_of_a_cookie_are_one_list() -> None:
    """HTTP/2 lets a client split it, and a browser does."""
    split = incoming(("cookie", "a=1"), ("cookie", "b=2"), ("x", "y"))
    assert split.header("cookie") == "a=1; b=2"
    assert incoming(("cookie", "a=1"), ("cookie", "a=1")).header("cookie") == "a=1"


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize(
    "by",
    [api_key(), api_key(known={"one", "two"}.__contains__), user(lambda i: i.header("x-api-key"))],
    ids=["api_key", "known", "user"],
)
def test_a_quota_by_key_is_not_evaded_by_giving_the_key_twice(by: Any, way: str) -> None:
    """The same key twice counts as that key, different ones are refused and take nothing."""

    async def main() -> None:
        limits = RequestLimits(RequestLimit("2/min", by=by))
        edge = Edge(
            text_app(), name="keys", limits=limits, inbound=Inbound() if way == "short" else None
        )
        for _ in range(2):
            assert (await ask(edge, headers=[ONE])).status == 200
        assert (await ask(edge, headers=[ONE])).status == 429
        assert (await ask(edge, headers=[ONE, ONE])).status == 429
        for given in ([ONE, TWO], [TWO, ONE], [ONE, ("x-api-key", "")]):
            answer = await ask(edge, headers=given)
            assert (answer.status, answer.json()["reason"]) == (400, "ambiguous_header")
            assert answer.headers["content-type"] == "application/problem+json"
            assert "one" not in answer.body.decode()
        assert (await ask(edge, headers=[TWO])).headers["ratelimit"].startswith('"')
        assert sum(seen["keys"] for seen in limits.snapshot()["limits"].values()) == 2
        edge.close()

    run_virtual(main())


def test_records_and_jobs_are_those_of_one_caller(tmp_path: Path) -> None:
    """`scope=` functions read headers by the same rule."""

    async def main() -> None:
        source = Sqlite(tmp_path / "records.db")
        database = Database(source)
        migrate(database)

        def scope(incoming: Incoming) -> str | None:
            return incoming.header("x-api-key")

        app = IdempotentRequests(text_app(), Idempotency(database), routes=["/orders"], scope=scope)
        key = ("idempotency-key", '"k"')
        for given, status in (([ONE, TWO], 400), ([ONE, ONE], 200), ([ONE], 200)):
            answer = await ask(app, "/orders", method="POST", headers=[key, *given])
            assert answer.status == status
        assert app.snapshot()["executed"] == 1
        api = JobsApi(Jobs(database, name="jobs"), scope=scope)
        assert (await ask(api, "/some-job", headers=[ONE, TWO])).status == 400
        assert (await ask(api, "/some-job", headers=[ONE, ONE])).status == 404
        asked = http_scope("/orders", method="POST", headers=[ONE, TWO])
        assert (await api.submitted(asked, "work")).status == 400
        database.close()
        source.close()

    asyncio.run(main())


# Requests of nobody's


def signed_in(incoming: Incoming) -> Any:
    return incoming.header("x-user")


ANN = ("x-user", "ann")


async def statuses(app: Any, *headers: Any, times: int = 4, client: str = "10.0.0.1") -> list[int]:
    asked = [ask(app, headers=headers, client=(client, 5)) for _ in range(times)]
    return [(await each).status for each in asked]


@pytest.mark.parametrize("inbound", [Inbound(), None])
@pytest.mark.parametrize("nobody", [None, ""])
def test_a_limit_by_user_does_not_apply_to_nobody(nobody: Any, inbound: Inbound | None) -> None:
    """Who is not signed in is limited by the limits for others, and is told only of these."""

    async def main() -> None:
        limits = RequestLimits(
            RequestLimit("2/min", by=user(lambda i: signed_in(i) or nobody)),
            RequestLimit("3/min", by="address"),
        )
        edge = Edge(text_app(), name="nobody", limits=limits, inbound=inbound)
        answer = await ask(edge, client=("10.0.0.1", 5))
        assert answer.headers["ratelimit"].startswith('"address";r=2')
        assert await statuses(edge, client="10.0.0.1") == [200, 200, 429, 429]
        assert await statuses(edge, ANN, client="10.0.0.2") == [200, 200, 429, 429]
        assert limits.snapshot()["limits"]["user"]["keys"] == 1
        refused = await ask(edge, client=("10.0.0.1", 5))
        assert refused.json()["violated-policies"] == ["address"]
        edge.close()

    run_virtual(main())


def test_a_limit_that_applies_to_nobody_lets_all_pass() -> None:
    """Alone, soft, or with a cost: nothing is taken and nobody is refused."""

    async def main() -> None:
        alone = RequestLimit("1/min", by=user(signed_in), cost=lambda _: 1 / 0, name="hard")
        soft = RequestLimit("1/min", by=user(signed_in), soft=True, name="soft")
        limits = RequestLimits(alone, soft)
        edge = Edge(text_app(), name="alone", limits=limits)
        assert await statuses(edge) == [200] * 4
        shown = limits.snapshot()
        assert (shown["limits"]["hard"]["keys"], shown["soft"]["soft"]["over"]) == (0, 0)
        edge.close()

    run_virtual(main())


def test_otherwise_chooses_another_key() -> None:
    """The address, an API key, or a function; keys of the one are never those of the other."""

    async def main() -> None:
        by_address = RequestLimits(RequestLimit("2/min", by=user(signed_in), otherwise="address"))
        edge = Edge(text_app(), name="address", limits=by_address)
        assert await statuses(edge, client="10.0.0.1") == [200, 200, 429, 429]
        assert await statuses(edge, client="10.0.0.2") == [200, 200, 429, 429]
        assert await statuses(edge, ANN) == [200, 200, 429, 429]
        assert await statuses(edge, ("x-user", "10.0.0.3")) == [200, 200, 429, 429]
        assert await statuses(edge, client="10.0.0.3") == [200, 200, 429, 429]
        edge.close()
        by_key = RequestLimits(RequestLimit("2/min", by=user(signed_in), otherwise=api_key()))
        edge = Edge(text_app(), name="key", limits=by_key)
        assert await statuses(edge, ONE) == [200, 200, 429, 429]
        assert await statuses(edge, client="10.0.0.1") == [200, 200, 429, 429]
        edge.close()
        same = RequestLimits(RequestLimit("1/min", by=user(signed_in), otherwise=lambda _: "ann"))
        edge = Edge(text_app(), name="same", limits=same)
        assert await statuses(edge, ANN, times=2) == [200, 429]
        assert await statuses(edge, times=2) == [200, 429]
        edge.close()

    run_virtual(main())


def test_otherwise_is_checked_where_it_is_given() -> None:
    """All together are everybody: there is nobody else."""
    with pytest.raises(TypeError, match="otherwise=: by=None counts all requests together"):
        RequestLimit("1/s", by=None, otherwise="address")
    with pytest.raises(ValueError, match="otherwise="):
        RequestLimit("1/s", by="tenant", otherwise="adress")
    by = RequestLimit("1/s", by="tenant", otherwise="address")
    assert repr(by) == "RequestLimit('1/s', by='tenant', otherwise='address', name='tenant')"


async def empty(_request: Any) -> Response:
    return Response()


def test_protect_takes_a_list_of_limits() -> None:
    """One, several, or the object of them."""

    async def main() -> None:
        both = [RequestLimit("3/min", by="address"), RequestLimit("2/min", by=user(signed_in))]
        for given, served in ((both, 2), (tuple(both), 2), (both[0], 3), ([], 4)):
            app = Starlette(routes=[Route("/", empty)])
            edge = protect(app, name="list", limits=given)
            assert (await statuses(app, ANN)).count(200) == served
            edge.close()
        for wrong in ("600/min", 5, ["600/min"]):
            with pytest.raises(TypeError, match="RequestLimit"):
                protect(Starlette(), name="wrong", limits=wrong)  # type: ignore[arg-type]

    run_virtual(main())
