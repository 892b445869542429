"""The example of a whole call's way: three pods, a real store, a vendor that misbehaves."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import httpx
import pytest

from seawall.clock import SYSTEM

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
PODS = 3
PATIENCE = 20.0


@contextmanager
def process(app: str, **environment: str) -> Iterator[str]:
    """Serve an app of the example in a process of its own; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        command = ["-m", "uvicorn", app, "--fd", str(number), "--app-dir", "examples/call_flow"]
        served = subprocess.Popen(  # noqa: S603 - our own example
            [sys.executable, *command, "--log-level", "warning"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
            pass_fds=[number],
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            served.terminate()
            try:
                served.wait(10)
            finally:
                served.kill()
                served.wait()


class Fleet(NamedTuple):
    """Where the pods and the vendor are."""

    pods: list[str]
    vendor: str


@pytest.fixture(scope="module")
def fleet(redis_url: str) -> Iterator[Fleet]:
    """Return a running vendor and pods that share one store."""
    with ExitStack() as stack:
        vendor = stack.enter_context(process("vendor:app"))
        settings = {"REDIS_URL": redis_url, "VENDOR_URL": vendor, "PREFIX": f"flow-{token_hex(4)}"}
        pods = [stack.enter_context(process("service:app", **settings)) for _ in range(PODS)]
        for pod in pods:  # waits in the listening socket until it serves
            httpx.get(f"{pod}/health/ready", timeout=PATIENCE).raise_for_status()
        yield Fleet(pods, vendor)


class Users:
    """Who asks the pods, in turn."""

    def __init__(self, client: httpx.AsyncClient, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet
        self._turn = 0

    async def ask(self, key: str, *, pod: int | None = None) -> httpx.Response:
        """Ask one pod, as the user whose key that is, what nobody has asked before."""
        self._turn += 1
        url = self._fleet.pods[self._turn % PODS if pod is None else pod]
        question = {"question": f"why {self._turn}"}
        return await self._client.get(f"{url}/answer", params=question, headers={"x-api-key": key})

    async def flood(
        self, number: int, *, seconds: float, key: str | None = None, pod: int | None = None
    ) -> list[httpx.Response]:
        """Ask so often in so much time, whatever the answers are; as many users, unless told."""
        began = SYSTEM.now()
        tasks = []
        for turn in range(number):
            late = began + seconds * turn / number - SYSTEM.now()
            if late > 0:
                await asyncio.sleep(late)  # noqa: TID251 - load comes in real time
            tasks.append(asyncio.create_task(self.ask(key or f"user-{turn}", pod=pod)))
        return await asyncio.gather(*tasks)

    async def converse(self, number: int, *, pause: float, key: str) -> list[httpx.Response]:
        """Ask so often, each time after the last answer and a pause."""
        answers = []
        for _ in range(number):
            answers.append(await self.ask(key))
            await asyncio.sleep(pause)  # noqa: TID251 - users take their time
        return answers

    async def vendor_is(self, mode: str) -> None:
        """Let the vendor behave so."""
        (await self._client.post(f"{self._fleet.vendor}/mode/{mode}")).raise_for_status()

    async def vendor_saw(self) -> dict[str, Any]:
        """Return what the vendor saw since."""
        seen: dict[str, Any] = (await self._client.get(f"{self._fleet.vendor}/seen")).json()
        return seen

    async def states(self) -> list[dict[str, Any]]:
        """Return what each pod tells of itself."""
        return [(await self._client.get(f"{pod}/state")).json() for pod in self._fleet.pods]

    async def breakers(self) -> set[str]:
        """Return the states of the vendor's breaker on the pods."""
        return {_part(state["vendor"], "breaker")["state"] for state in await self.states()}

    async def acted(self) -> Counter[str]:
        """Return how often each part of the way has refused, cut off or tried again so far."""
        counts: Counter[str] = Counter()
        for state in await self.states():
            edge, vendor = state["edge"], state["vendor"]
            counts["shed"] += _part(edge, "shed")["rejected"]
            counts["user limit"] += edge["limits"]["limits"]["api-key"]["over"]
            counts["queue"] += _part(edge, "adaptive_limit")["rejected"]
            counts["retry"] += _part(vendor, "retry")["retries"]
            counts["breaker"] += _part(vendor, "breaker")["rejected"]
            counts["vendor limit"] += _part(vendor, "rate_limit", 0)["rejected"]
            counts["local limit"] += _part(vendor, "rate_limit", 1)["rejected"]
            counts["semaphore"] += _part(vendor, "bulkhead")["rejected"]
            counts["call timeout"] += _part(vendor, "timeout")["timed_out"]
        return counts

    async def rest(self) -> None:
        """Ask nothing until the limits are as if nobody had ever asked."""
        await asyncio.sleep(1.0)  # noqa: TID251 - limits refill in real time

    async def until_well(self) -> None:
        """Ask now and then until every pod answers."""
        for _ in range(200):
            answers = [await self.ask("well") for _ in range(PODS)]
            if all(answer.status_code == 200 for answer in answers):
                return
            await asyncio.sleep(0.1)  # noqa: TID251 - the breakers' time is real
        raise AssertionError(f"the pods did not recover: {answers}")


def _part(snapshot: dict[str, Any], kind: str, number: int = 0) -> dict[str, Any]:
    found: list[dict[str, Any]] = [p for p in snapshot["policies"] if p["policy"] == kind]
    return found[number]


@asynccontextmanager
async def users_of(fleet: Fleet) -> AsyncIterator[Users]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
        users = Users(client, fleet)
        await users.vendor_is("good")
        await users.until_well()
        await users.vendor_is("good")
        yield users


def _reasons(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(
        "answered" if answer.status_code == 200 else answer.json()["reason"] for answer in answers
    )


def _check_refusals(answers: list[httpx.Response], statuses: set[int]) -> None:
    """See that each answer is of one of these kinds, and that each refusal says what it should."""
    for answer in answers:
        assert answer.status_code in statuses
        if answer.status_code != 200:
            assert answer.headers["content-type"] == "application/problem+json"
        if answer.status_code in {429, 503}:
            assert int(answer.headers["retry-after"]) >= 1


def test_all_is_well_while_the_vendor_is(fleet: Fleet):
    """Every user on every pod is answered, with one request to the vendor for each."""

    async def main() -> None:
        async with users_of(fleet) as users:
            talks = [users.converse(10, pause=0.1, key=f"user-{number}") for number in range(PODS)]
            answers = [answer for talk in await asyncio.gather(*talks) for answer in talk]
            assert _reasons(answers) == {"answered": 30}
            assert {answer.json()["answer"][:3] for answer in answers} == {"WHY"}
            assert (await users.vendor_saw())["requests"] == 30

    asyncio.run(main())


def test_a_user_has_one_limit_on_all_pods(fleet: Fleet):
    """Who asks too often is told so with 429 by every pod, and nobody else is."""

    async def main() -> None:
        async with users_of(fleet) as users:
            before, began = await users.acted(), SYSTEM.now()
            greedy, *others = await asyncio.gather(
                users.flood(150, seconds=1.0, key="greedy"),
                users.converse(5, pause=0.2, key="modest"),
                users.converse(5, pause=0.2, key="patient"),
            )
            lasted = SYSTEM.now() - began
            statuses = Counter(answer.status_code for answer in greedy)
            assert 10 <= 150 - statuses[429] <= 10 + 20 * lasted + 1
            assert (await users.acted() - before)["user limit"] == statuses[429]
            _check_refusals(greedy, {200, 429, 503})
            for answer in greedy:
                if answer.status_code == 429:
                    assert answer.json()["violated-policies"] == ["api-key"]
            assert {answer.status_code for talk in others for answer in talk} == {200}

    asyncio.run(main())


def test_the_vendor_gets_no_more_than_it_grants(fleet: Fleet):
    """However many ask on however many pods, the vendor's own limit holds at the vendor."""

    async def main() -> None:
        async with users_of(fleet) as users:
            before, began = await users.acted(), SYSTEM.now()
            answers = await users.flood(250, seconds=1.0)
            lasted = SYSTEM.now() - began
            seen, reasons = await users.vendor_saw(), _reasons(answers)
            assert 20 <= reasons["answered"] <= seen["requests"] <= 30 + 40 * lasted + 1
            assert 1 <= (await users.acted() - before)["vendor limit"] <= reasons["rate_limited"]
            _check_refusals(answers, {200, 503})

    asyncio.run(main())


def test_one_pod_takes_no_more_than_its_part(fleet: Fleet):
    """What all users ask of one pod is held to that pod's own limit, below the vendor's."""

    async def main() -> None:
        async with users_of(fleet) as users:
            await users.rest()
            before, began = await users.acted(), SYSTEM.now()
            answers = await users.flood(150, seconds=1.0, pod=0)
            lasted = SYSTEM.now() - began
            seen = await users.vendor_saw()
            assert 20 <= seen["requests"] <= 30 + 30 * lasted + 1
            assert (await users.acted() - before)["local limit"] >= 1
            _check_refusals(answers, {200, 503})

    asyncio.run(main())


def test_a_vendor_that_fails_now_and_then_is_asked_again(fleet: Fleet):
    """Users see nothing of it, and the vendor hardly more than one request for each."""

    async def main() -> None:
        async with users_of(fleet) as users:
            before = await users.acted()
            await users.vendor_is("flaky")
            talks = [users.converse(10, pause=0.1, key=f"user-{number}") for number in range(PODS)]
            answers = [answer for talk in await asyncio.gather(*talks) for answer in talk]
            assert _reasons(answers) == {"answered": 30}
            assert 33 <= (await users.vendor_saw())["requests"] <= 36
            assert 3 <= (await users.acted() - before)["retry"] <= 6

    asyncio.run(main())


def test_a_broken_vendor_is_left_alone_by_all_pods(fleet: Fleet):
    """The breaker opens on all pods, users get 502 and then 503 at once, and it heals by itself."""

    async def main() -> None:
        async with users_of(fleet) as users:
            before = await users.acted()
            await users.vendor_is("failing")
            answers = await users.flood(150, seconds=1.5)
            seen, reasons = await users.vendor_saw(), _reasons(answers)
            assert "closed" not in await users.breakers()
            assert reasons["circuit_open"] >= 75
            assert (await users.acted() - before)["breaker"] >= 75
            assert reasons["answered"] == 0
            # 3 pods, each with 5 failed calls and the 5 retries of its budget; and those under way.
            assert seen["requests"] <= 45
            _check_refusals(answers, {502, 503})
            await users.vendor_is("good")
            await users.until_well()

    asyncio.run(main())


def test_a_slow_vendor_holds_nobody_for_long(fleet: Fleet):
    """Users are answered within their time, and the vendor never has more at once than slots.

    Who asks a pod that is full waits half a second for a place there, and no longer; who asks one
    where nobody else can even wait is shed at once.
    """

    async def main() -> None:
        async with users_of(fleet) as users:
            await users.rest()
            before = await users.acted()
            await users.vendor_is("slow")
            answers = await users.flood(100, seconds=0.4, pod=0)
            seen, acted = await users.vendor_saw(), await users.acted() - before
            assert {"shed", "queue", "semaphore", "call timeout"} <= set(acted)
            assert 1 <= seen["most_at_once"] <= 10
            _check_refusals(answers, {503, 504})
            slowest = max(answer.elapsed.total_seconds() for answer in answers)
            assert slowest < 3.0 + 1.0  # the edge's timeout, and some for the machine

    asyncio.run(main())


def test_a_busy_vendor_is_asked_as_it_wishes(fleet: Fleet):
    """What the vendor refuses is not asked again before its Retry-After, nor beyond the budget."""

    async def main() -> None:
        async with users_of(fleet) as users:
            await users.vendor_is("busy")
            answers = await users.flood(30, seconds=0.5)
            seen = await users.vendor_saw()
            assert _reasons(answers)["answered"] == 0
            assert seen["requests"] <= 45
            assert seen["soonest_again"] is None or seen["soonest_again"] > 0.99
            _check_refusals(answers, {502, 503, 504})

    asyncio.run(main())
