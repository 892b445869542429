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

    async def ask(self, key: str) -> httpx.Response:
        """Ask one pod, as the user whose key that is."""
        self._turn += 1
        pod = self._fleet.pods[self._turn % PODS]
        return await self._client.get(
            f"{pod}/answer", params={"question": "why"}, headers={"x-api-key": key}
        )

    async def flood(self, number: int, *, seconds: float, keys: int = 1000) -> list[httpx.Response]:
        """Ask so often in so much time, whatever the answers are."""
        began = SYSTEM.now()
        tasks = []
        for turn in range(number):
            late = began + seconds * turn / number - SYSTEM.now()
            if late > 0:
                await asyncio.sleep(late)  # noqa: TID251 - load comes in real time
            tasks.append(asyncio.create_task(self.ask(f"user-{turn % keys}")))
        return await asyncio.gather(*tasks)

    async def vendor_is(self, mode: str) -> None:
        """Let the vendor behave so."""
        (await self._client.post(f"{self._fleet.vendor}/mode/{mode}")).raise_for_status()

    async def vendor_saw(self) -> dict[str, int]:
        """Return what the vendor saw since."""
        seen: dict[str, int] = (await self._client.get(f"{self._fleet.vendor}/seen")).json()
        return seen

    async def breakers(self) -> list[str]:
        """Return the state of the vendor's breaker on each pod."""
        states = [(await self._client.get(f"{pod}/state")).json() for pod in self._fleet.pods]
        return [_part(state["vendor"], "breaker")["state"] for state in states]

    async def until_well(self) -> None:
        """Ask now and then until every pod answers."""
        for _ in range(200):
            answers = [await self.ask("well") for _ in range(PODS)]
            if all(answer.status_code == 200 for answer in answers):
                return
            await asyncio.sleep(0.1)  # noqa: TID251 - the breakers' time is real
        raise AssertionError(f"the pods did not recover: {answers}")


def _part(snapshot: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in snapshot["policies"] if p["policy"] == kind)
    return found


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


def test_all_is_well_while_the_vendor_is(fleet: Fleet):
    """Every user on every pod is answered, with one request to the vendor for each."""

    async def main() -> None:
        async with users_of(fleet) as users:
            answers = await users.flood(60, seconds=1.0)
            assert _reasons(answers) == {"answered": 60}
            assert {answer.json()["answer"] for answer in answers} == {"WHY"}
            assert (await users.vendor_saw())["requests"] == 60

    asyncio.run(main())


def test_a_user_has_one_limit_on_all_pods(fleet: Fleet):
    """Who asks too often is told so with 429 by every pod, and nobody else is."""

    async def main() -> None:
        async with users_of(fleet) as users:
            greedy, others = await asyncio.gather(
                users.flood(200, seconds=1.0, keys=1),
                asyncio.gather(*(users.ask(f"other-{number}") for number in range(20))),
            )
            refused = [answer for answer in greedy if answer.status_code == 429]
            took = len(greedy) - len(refused)
            assert 50 <= took <= 110  # the burst, and a second of 50/s
            assert all(answer.status_code == 200 for answer in others)
            for answer in refused:
                assert answer.headers["content-type"] == "application/problem+json"
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["violated-policies"] == ["api-key"]

    asyncio.run(main())


def test_the_vendor_gets_no_more_than_it_grants(fleet: Fleet):
    """However many ask on however many pods, the vendor's own limit holds at the vendor."""

    async def main() -> None:
        async with users_of(fleet) as users:
            answers = await users.flood(800, seconds=2.0)
            seen = await users.vendor_saw()
            reasons = _reasons(answers)
            assert seen["most_a_second"] <= 115  # 100 a second and the burst; some wait on the way
            assert reasons["answered"] >= 150
            assert reasons["rate_limited"] >= 200

    asyncio.run(main())


def test_a_broken_vendor_is_left_alone_by_all_pods(fleet: Fleet):
    """The breaker opens on all pods, users get 502 and then 503 at once, and it heals by itself."""

    async def main() -> None:
        async with users_of(fleet) as users:
            await users.vendor_is("failing")
            answers = await users.flood(150, seconds=1.5)
            seen = await users.vendor_saw()
            reasons = _reasons(answers)
            assert await users.breakers() == ["open"] * PODS
            assert reasons["circuit_open"] >= 75
            assert reasons["answered"] == 0
            assert seen["requests"] <= 60
            for answer in answers:
                assert answer.status_code in {502, 503}
                assert answer.status_code == 502 or int(answer.headers["retry-after"]) >= 1
            await users.vendor_is("good")
            await users.until_well()

    asyncio.run(main())


def test_a_slow_vendor_holds_nobody_for_long(fleet: Fleet):
    """Users are answered within their time, and the vendor never has more at once than slots."""

    async def main() -> None:
        async with users_of(fleet) as users:
            await users.vendor_is("slow")
            began = SYSTEM.now()
            answers = await users.flood(150, seconds=1.0)
            took = SYSTEM.now() - began
            seen = await users.vendor_saw()
            assert _reasons(answers)["answered"] == 0
            assert {answer.status_code for answer in answers} <= {503, 504}
            assert took < 1.0 + 3.0 + 1.0  # the flood, the edge's timeout, and some for the machine
            assert seen["most_at_once"] <= PODS * 20

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

    asyncio.run(main())
