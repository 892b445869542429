"""How many calls reach what is down, if each of three levels makes three attempts.

    python -m bench.amplification

prints a table: for three nested guards in one process, and for a user's client in front of services
A -> B -> C of which C always fails. All of it runs in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import Context
from itertools import count
from random import Random
from typing import Any, NamedTuple

import httpx

from seawall import Guard, Retry, RetryBudget, Timeout, deadline, transient
from seawall.clients.httpx import AsyncGuardedTransport
from seawall.clock import Clock, VirtualClock
from seawall.testing import ScriptedService, fail, run_virtual, virtual_time
from seawall.web.edge import Edge
from seawall.web.edge.inbound import Inbound
from seawall.web.trust import Trust
from seawall.wire.deadlines import least_timeout

USERS = 200
ATTEMPTS = 3

_numbers = count()


# Guards


def nested(*, rule: bool = True, budgets: bool = False, users: int = USERS) -> list[int]:
    """Return for each user how many calls three nested guards made of what always fails.

    Without the `rule` no guard knows of the others: each is called in a context of its own.
    """
    calls = []
    with virtual_time():
        guards = [_nested_guard(budgets=budgets) for _ in range(3)]
        for _ in range(users):
            service = ScriptedService(fail(ConnectionError))
            call: Callable[[], Any] = service.call
            for guard in guards:
                call = _called_by(guard, call, rule=rule)
            try:
                call()
            except ConnectionError:
                calls.append(service.calls)
        for guard in guards:
            guard.close()
    return calls


def _nested_guard(*, budgets: bool) -> Guard:
    budget = RetryBudget() if budgets else None
    retry = Retry(on=ConnectionError, attempts=ATTEMPTS, backoff=0.01, budget=budget)
    return Guard(f"nested-{next(_numbers)}", retry, rng=Random(7))


def _called_by(guard: Guard, inside: Callable[[], Any], *, rule: bool) -> Callable[[], Any]:
    return lambda: guard.call(inside) if rule else Context().run(guard.call, inside)


# Services

Ask = Callable[[str, str], Awaitable[int]]


class Settings(NamedTuple):
    """How the services of a chain treat retries."""

    header: bool = True
    """Whether the attempt header is sent and obeyed."""
    budgets: bool = True
    retry_at: Any = "everywhere"
    trust: bool = True
    """Whether services believe each other about time and criticality."""


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
        retry = Retry(on=transient, attempts=3, backoff=self._backoff, budget=budget)
        name = f"chain-{next(_numbers)}"
        return Guard(name, retry, Timeout(1.0), clock=self._clock, rng=Random(7))

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

        trust = Trust(callers=["127.0.0.1"] if self._settings.trust else [])
        inbound = Inbound(trust=trust, timeout=10.0)
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


class InProcess(httpx.AsyncBaseTransport):
    """Calls an app as another process would be called: nothing of the context goes along."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app, client=("127.0.0.1", 1))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Let the app answer, after a moment, in a context of its own."""
        await asyncio.sleep(0.005)
        call = self._inner.handle_async_request(request)
        return await asyncio.create_task(call, context=Context())


def in_process(settings: Settings, users: int) -> Chain:
    """Run a chain in virtual time; return it when so many users have been answered."""
    clock = VirtualClock()
    chain = Chain(settings, clock, 0.01)

    async def main() -> None:
        c = chain.service("c", None)
        b = chain.service("b", chain.asking(await chain.client(InProcess(c)), "http://c.test/"))
        a = chain.service("a", chain.asking(await chain.client(InProcess(b)), "http://b.test/"))
        user = await chain.client(InProcess(a))
        for number in range(users):
            await chain.ask_user(user, "http://a.test/", number)
        await chain.close()

    run_virtual(main(), clock=clock)
    return chain


def requests_by_user(chain: Chain, users: int) -> list[int]:
    """Return for each user how many requests reached the last service."""
    reached = [told.user for told in chain.reached if told.service == "c"]
    return [reached.count(str(user)) for user in range(users)]


# The table

GUARDS: dict[str, dict[str, bool]] = {
    "no rule": {"rule": False},
    "defaults": {},
    "a `RetryBudget` in each": {"budgets": True},
}
SERVICES: dict[str, Settings] = {
    "no attempt header": Settings(header=False, budgets=False, trust=False),
    "defaults": Settings(budgets=False, trust=False),
    "`trust=`": Settings(budgets=False),
    '`retry_at="edge"`': Settings(budgets=False, trust=False, retry_at="edge"),
    "a `RetryBudget` in each": Settings(trust=False),
    "`trust=` and a `RetryBudget` in each": Settings(),
}


def table(users: int = USERS) -> dict[tuple[str, str], tuple[float, int]]:
    """Return the mean and the most calls for one of a user's, by levels and settings."""
    counted = {("guards", name): nested(users=users, **how) for name, how in GUARDS.items()}
    for name, settings in SERVICES.items():
        counted["services", name] = requests_by_user(in_process(settings, users), users)
    return {what: (sum(calls) / len(calls), max(calls)) for what, calls in counted.items()}


def main() -> None:
    """Print the table."""
    print(f"{USERS} calls of a user's, {ATTEMPTS} attempts at each of three levels, the last down")
    print("| three nested | | calls for each | at most |")
    print("| --- | --- | ---: | ---: |")
    for (levels, name), (mean, most) in table().items():
        print(f"| {levels} | {name} | {mean:.3f} | {most} |")


if __name__ == "__main__":
    main()
