"""Three services in a chain, each with three attempts, and the last one fails.

A user's client calls A, A calls B, B calls C. Naive retries multiply: 27 requests reach C for each
of the user's. With the attempt header and budgets it is hardly more than one; and what each service
is told of the time that is left never grows on the way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import Context
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn

from seawall import Guard, Retry, RetryBudget, Timeout, VirtualClock, deadline
from seawall.clients.httpx import AsyncGuardedTransport, retryable
from seawall.clock import SYSTEM, Clock
from seawall.testing import run_virtual
from seawall.web.edge import Edge
from seawall.web.inbound import Inbound
from seawall.web.trust import Trust
from seawall.wire.deadlines import least_timeout
from tests.clients.support import in_thread
from tests.support import let_pass, new_guard

Ask = Callable[[str, str], Awaitable[int]]


class Settings(NamedTuple):
    """How the services of a chain treat retries."""

    header: bool = True
    """Whether the attempt header is sent and obeyed."""
    budgets: bool = True
    retry_at: Any = "everywhere"


class Told(NamedTuple):
    """What a service was told with one request: who asks, for whom, and the seconds left."""

    number: int
    parent: str
    user: str
    service: str
    seconds: float | None


class Chain:
    """A -> B -> C, and a client in front; C always answers 503."""

    def __init__(self, settings: Settings, clock: Clock, backoff: float) -> None:
        """Nothing has been asked yet."""
        self._settings = settings
        self._clock = clock
        self._backoff = backoff
        self.reached: list[Told] = []
        self._clients = AsyncExitStack()

    def guard(self) -> Guard:
        """Return a service's guard around the next one: three attempts, within a second."""
        budget = RetryBudget() if self._settings.budgets else None
        retry = Retry(on=retryable, attempts=3, backoff=self._backoff, budget=budget)
        return new_guard(retry, Timeout(1.0), clock=self._clock, rng=Random(7))

    async def client(self, inner: Any) -> httpx.AsyncClient:
        """Return a client that a service calls the next one with."""
        propagate = {"deadline", "criticality"} | ({"attempt"} if self._settings.header else set())
        transport = AsyncGuardedTransport(
            self.guard(), inner, retry_at=self._settings.retry_at, propagate=propagate
        )
        return await self._clients.enter_async_context(httpx.AsyncClient(transport=transport))

    def service(self, name: str, ask: Ask | None) -> Edge:
        """Return a service that asks the next one, or always fails; behind an edge of its own."""

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            headers = dict(scope["headers"])
            parent, user = headers[b"x-parent"].decode(), headers[b"x-user"].decode()
            number = len(self.reached)
            left = least_timeout(scope["headers"])
            self.reached.append(Told(number, parent, user, name, left))
            status = 503 if ask is None else await ask(str(number), user)
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        inbound = Inbound(trust=Trust(callers=["127.0.0.1"]), timeout=10.0)
        return Edge(app, name=f"{name}-{id(self)}", inbound=inbound, clock=self._clock)

    def asking(self, client: httpx.AsyncClient, url: str) -> Ask:
        """Return what asks the next service on behalf of a request."""

        async def ask(parent: str, user: str) -> int:
            headers = {"x-parent": parent, "x-user": user}
            return (await client.get(url, headers=headers)).status_code

        return ask

    async def ask_user(self, client: httpx.AsyncClient, url: str, number: int) -> int:
        """Ask as a user does, with five seconds to spare."""
        with deadline(5.0, clock=self._clock):
            headers = {"x-parent": "", "x-user": str(number)}
            answer = await client.get(url, headers=headers)
        return answer.status_code

    @property
    def requests_of_c(self) -> int:
        """How many requests have reached the last service."""
        return sum(told.service == "c" for told in self.reached)

    async def close(self) -> None:
        """Close the clients."""
        await self._clients.aclose()

    def check_time(self) -> None:
        """Demand that no service was told more time than the one that called it."""
        for told in self.reached:
            if told.parent:
                most = self.reached[int(told.parent)].seconds
                assert told.seconds is not None
                assert most is not None
                assert told.seconds <= most


class _InProcess(httpx.AsyncBaseTransport):
    """Calls an app as another process would be called: nothing of the context goes along."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app, client=("127.0.0.1", 1))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await let_pass(0.005)
        call = self._inner.handle_async_request(request)
        return await asyncio.create_task(call, context=Context())


def in_process(settings: Settings, users: int) -> Chain:
    """Run a chain in virtual time; return it when so many users have been answered."""
    clock = VirtualClock()
    chain = Chain(settings, clock, 0.01)

    async def main() -> None:
        c = chain.service("c", None)
        b = chain.service("b", chain.asking(await chain.client(_InProcess(c)), "http://c.test/"))
        a = chain.service("a", chain.asking(await chain.client(_InProcess(b)), "http://b.test/"))
        user = await chain.client(_InProcess(a))
        for number in range(users):
            assert await chain.ask_user(user, "http://a.test/", number) == 503
        await chain.close()

    run_virtual(main(), clock=clock)
    return chain


NAIVE = Settings(header=False, budgets=False)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (NAIVE, 27.0, 27.0),
        (Settings(budgets=False), 7.0, 7.0),
        (Settings(budgets=False, retry_at="edge"), 3.0, 3.0),
        (Settings(), 1.0, 1.1),
    ],
    ids=["naive", "the attempt header", "retrying at the edge only", "header and budgets"],
)
def test_how_many_requests_reach_the_last_service(settings: Settings, least: float, most: float):
    """Naive retries make 27 of one request; the header, the edge and budgets make it bearable."""
    users = 200 if settings.budgets else 20
    chain = in_process(settings, users)
    assert least <= chain.requests_of_c / users <= most <= (3.3 if settings.budgets else 27)


@pytest.mark.parametrize(
    ("settings", "worst"),
    [(Settings(), 7), (Settings(retry_at="edge"), 3)],
    ids=["everywhere", "at the edge only"],
)
def test_what_the_worst_request_costs(settings: Settings, worst: int):
    """Budgets are full at first: then a single request costs what the header alone allows."""
    chain = in_process(settings, 200)
    reached = [told.user for told in chain.reached if told.service == "c"]
    assert max(reached.count(str(user)) for user in range(200)) == worst
    assert len(reached) <= 3.3 * 200


@pytest.mark.parametrize("settings", [NAIVE, Settings()], ids=["naive", "header and budgets"])
def test_remaining_time_never_grows(settings: Settings):
    """Each service is told at most as much time as the one that called it."""
    chain = in_process(settings, 10)
    chain.check_time()


@pytest.mark.alone
def test_over_real_sockets():
    """The same chain of three real servers."""
    chain = Chain(Settings(), SYSTEM, 0.001)
    users = 15

    async def main() -> None:
        running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

        def serve(app: Any) -> str:
            listening = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(app, ws="none", lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            running.append((server, asyncio.create_task(server.serve([listening]))))
            return f"http://127.0.0.1:{listening.getsockname()[1]}/"

        try:
            c = serve(chain.service("c", None))
            b = serve(chain.service("b", chain.asking(await chain.client(None), c)))
            a = serve(chain.service("a", chain.asking(await chain.client(None), b)))
            user = await chain.client(None)
            for number in range(users):
                assert await chain.ask_user(user, a, number) == 503
        finally:
            await chain.close()
            for server, _ in running:
                server.should_exit = True
            await asyncio.gather(*(task for _, task in running))

    in_thread(main)
    assert users <= chain.requests_of_c <= 3.3 * users
    chain.check_time()
