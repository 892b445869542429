"""Client, breaker, retry budget and idempotency key together, through an outage of the service.

The service is down for two seconds, then one request takes two seconds, then all is well. There is
exactly one effect, the user gets its answer, and no breaker opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from seawall import Breaker, Guard, Retry, RetryBudget, Timeout, subscribe, transient
from seawall.clients.httpx import AsyncGuardedTransport
from seawall.clock import VirtualClock
from seawall.durable import Reply, idempotent_request
from seawall.events import BreakerChanged
from seawall.policies.retry import SuccessDeposit
from seawall.testing import run_virtual
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.completed_support import Till
from tests.durable.postgres import Postgres
from tests.support import let_pass, new_guard
from tests.web.support import serve

DOWN = 2.0
SLOW = 2.0
PATIENCE = 1.0
"""Seconds that the client waits for one attempt."""


class Outage:
    """A service with one route. Each request is in one phase: "down", "slow" or "well"."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._began: float | None = None
        self.phases: list[str] = []
        self.paid = -1
        """Payments at the end."""
        self.counts: dict[str, int] = {}

    @asynccontextmanager
    async def living(self) -> Any:
        """Have the database while the service lives."""
        async with self._opening() as database:
            self.till = await Till(database).prepare()
            self.till.app.app = self._order
            yield
            self.paid = await self.till.paid()
            self.counts = self.till.app.snapshot()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve the lifespan and requests."""
        if scope["type"] == "http":
            await self.till.app(scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            await receive()
            await stack.enter_async_context(self.living())
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _order(self, scope: Any, receive: Any, send: Any) -> None:
        now = asyncio.get_running_loop().time()
        self._began = now if self._began is None else self._began
        if now - self._began < DOWN:
            self.phases.append("down")
            await Reply(503, [], b"")(scope, receive, send)
            return
        self.phases.append("well" if "slow" in self.phases else "slow")
        if self.phases[-1] == "slow":
            await let_pass(SLOW)
        reply = await self.till.take(idempotent_request(scope, required=True))
        await reply(scope, receive, send)


def guarded(clock: VirtualClock | None = None) -> tuple[Guard, Breaker]:
    """Return the client's guard and its breaker."""
    breaker = Breaker(consecutive=9)
    budget = RetryBudget(SuccessDeposit(maximum=20))
    retry = Retry(on=transient, attempts=10, backoff=[0.7] * 9, budget=budget)
    options = {} if clock is None else {"clock": clock}
    return new_guard(Timeout(60.0), retry, breaker, Timeout(PATIENCE), **options), breaker


async def ordered(guard: Guard, transport: Any, base: str) -> tuple[httpx.Response, list[Any]]:
    """Order as a user does; return the answer, and how the breaker changed meanwhile."""
    changes: list[Any] = []
    stop = subscribe(changes.append, BreakerChanged)
    headers = {"Idempotency-Key": "order-7", "X-User": "ann"}
    guarded = AsyncGuardedTransport(guard, transport)
    async with httpx.AsyncClient(transport=guarded, base_url=base) as client:
        answer = await client.post("/orders", json={"book": 1}, headers=headers)
    stop()
    return answer, [change for change in changes if change.guard == guard.name]


def check_one_effect(answer: httpx.Response, outage: Outage, guard: Guard) -> None:
    """See that all of it has ended well."""
    assert (answer.status_code, answer.content, outage.paid) == (201, b"paid", 1)
    assert outage.phases[-1] == "slow"  # whatever came later was answered without being done
    assert outage.phases.count("down") >= 1
    assert answer.headers["idempotent-replayed"] == "true"
    assert (outage.counts["replays"], outage.counts["failed"]) == (1, 0)
    assert guard.snapshot()["policies"][1]["stopped"] == {}


@pytest.mark.alone
@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_a_user_gets_the_answer_of_a_service_that_was_down(
    driver: str, postgres: Postgres, tmp_path: Path
):
    """Over real sockets, to a server in a thread of its own, in real time."""
    outage = Outage(opening_by(driver, postgres, tmp_path))
    guard, breaker = guarded()

    async def main(url: str) -> tuple[httpx.Response, list[Any]]:
        return await ordered(guard, httpx.AsyncHTTPTransport(), url)

    with serve(outage, lifespan="on") as url:
        answer, changes = asyncio.run(main(url))
    check_one_effect(answer, outage, guard)
    assert (changes, breaker.state) == ([], "closed")


class InProcess(httpx.AsyncBaseTransport):
    """Asks an app in this loop. As with a server, a client that goes away does not cancel it."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app)
        self._at_work: set[asyncio.Task[Any]] = set()

    async def handle_async_request(self, request: Any) -> httpx.Response:
        """Return the answer."""
        task = asyncio.ensure_future(self._inner.handle_async_request(request))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        return await asyncio.shield(task)


def hold_time_for(database: Any) -> None:
    """Let no time pass while the database works, in threads of its own."""
    loop: Any = asyncio.get_running_loop()
    arun = database.arun

    async def held(operation: Any) -> Any:
        with loop.hold_time():
            return await arun(operation)

    database.arun = held


def in_virtual_time(outage: Outage, main: Callable[[VirtualClock], Any]) -> Any:
    """Run `main` while the service lives, in time that jumps."""
    clock = VirtualClock()

    async def living() -> Any:
        async with outage.living():
            hold_time_for(outage.till.database)
            return await main(clock)

    return run_virtual(living(), clock=clock)


def test_the_same_in_virtual_time(tmp_path: Path):
    """Each phase at its instant: 503 three times, a timeout, 409, and the answer."""
    outage = Outage(opening_by("sqlite", None, tmp_path))  # type: ignore[arg-type]

    async def main(clock: VirtualClock) -> Any:
        guard, breaker = guarded(clock)
        answer, changes = await ordered(guard, InProcess(outage), "http://shop")
        return guard, breaker, answer, changes

    guard, breaker, answer, changes = in_virtual_time(outage, main)
    check_one_effect(answer, outage, guard)
    assert (changes, breaker.state) == ([], "closed")
    assert outage.phases == ["down", "down", "down", "slow"]
    assert outage.counts["in_flight"] == 1


def test_replayed_failures_open_no_breaker(tmp_path: Path):
    """A failure that is kept, asked for forty times: the server is well, and others are served."""
    outage = Outage(opening_by("sqlite", None, tmp_path))  # type: ignore[arg-type]

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        status = 500 if idempotent_request(scope, required=True).key == "bad" else 201
        await Reply(status, [], b"")(scope, receive, send)

    async def main(clock: VirtualClock) -> Any:
        outage.till.app.app = fails
        breaker = Breaker(consecutive=3)
        transport = AsyncGuardedTransport(
            new_guard(breaker, clock=clock), InProcess(outage.till.app)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            asked = ["bad"] * 40 + ["good"]
            headers = [{"Idempotency-Key": key, "X-User": "ann"} for key in asked]
            answers = [await client.post("/orders", headers=each) for each in headers]
        return [answer.status_code for answer in answers], breaker.state

    assert in_virtual_time(outage, main) == ([500] * 40 + [201], "closed")
