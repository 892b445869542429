"""The users: they send requests at random times, whether or not earlier ones were answered.

Some pay and some do not. Each request of a protected user goes to one of the pods, and to the next
one if the connection is refused or breaks, as a load balancer does; the unprotected service gets as
much for its one pod as each of the protected ones. A user without an answer after `PATIENCE`
seconds gives up.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final

from seawall import _checks as check
from seawall.clock import SYSTEM
from seawall_demo._calls import Broken, Caller
from seawall_demo._lifeline import Lifeline, Message
from seawall_demo._settings import (
    FREE_USERS,
    ITEMS,
    PATIENCE,
    PREMIUM_SHARE,
    PREMIUM_USERS,
    SIDES,
    pause,
)
from seawall_demo._tally import ERROR, RequestResult, Tally, outcome_of

EVERY: Final = 1.0
"""Seconds between two reports."""
AVOIDED: Final = 1.0
"""Seconds for which an unreachable pod is tried last."""
MOST: Final = 2000
"""Maximum number of waiting requests of one side; more could not even connect."""
_CRITICALITY: Final = {True: "critical", False: "sheddable"}


class Crowd:
    """The users of one side: their targets, and how many wait."""

    def __init__(self, side: str) -> None:
        """Start without targets."""
        self.side = side
        self.ports: list[int] = []
        self.pods = 0
        self.waiting = 0
        self._turn = 0
        self._avoided: dict[int, float] = {}

    def places(self, now: float) -> list[int]:
        """Return the ports to try, in rotation; those that failed just now come last."""
        self._turn += 1
        turn = self._turn % len(self.ports) if self.ports else 0
        ports = self.ports[turn:] + self.ports[:turn]
        return sorted(ports, key=lambda port: self._avoided.get(port, 0.0) > now)

    def avoid(self, port: int, now: float) -> None:
        """Try the other ports first for a moment."""
        self._avoided = {one: until for one, until in self._avoided.items() if until > now}
        self._avoided[port] = now + AVOIDED


class Load:
    """All users, controlled by messages: targets, phase and surge."""

    def __init__(self, lifeline: Lifeline, *, rate: float, rng: Random | None = None) -> None:
        """Send `rate` requests per second for each pod, once the targets are known."""
        self._lifeline = lifeline
        self._rate = check.seconds("rate", rate)
        self._rng = rng or Random()  # noqa: S311 - needs no secrecy
        self._crowds = {side: Crowd(side) for side in SIDES}
        self._caller = Caller()
        self._tally = Tally(SIDES)
        self._phase: str | None = None
        self._surge = 1.0
        self._under_way: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.over = asyncio.Event()

    def on_message(self, message: Message) -> None:
        """Handle a message of the parent."""
        for side, ports in message.get("targets", {}).items():
            crowd = self._crowds[side]
            crowd.ports, crowd.pods = list(ports), max(crowd.pods, len(ports))
        self._surge = message.get("surge", self._surge)
        if "phase" in message:
            self._phase = message["phase"]
        if "start" in message:
            self._tasks = [
                asyncio.create_task(self._come(crowd)) for crowd in self._crowds.values()
            ]
            self._tasks.append(asyncio.create_task(self._report()))
        if "finish" in message:
            self._tasks.append(asyncio.create_task(self._finish(message["finish"])))

    async def _come(self, crowd: Crowd) -> None:
        """Send requests at random times, whatever their outcomes."""
        due = SYSTEM.now()
        while True:
            usual = self._rate * crowd.pods
            due += self._rng.expovariate(usual * self._surge if usual else self._rate)
            wait = due - SYSTEM.now()
            if wait > 0:
                await pause(wait)
            elif wait < -1.0:
                due = SYSTEM.now()  # the machine was asleep: missed requests are not made up for
            if not crowd.pods:
                continue
            more = self._rng.uniform(0, self._surge) >= 1.0  # an additional request of the surge
            premium = not more and self._rng.uniform(0, 1) < PREMIUM_SHARE
            task = asyncio.create_task(self._ask(crowd, premium=premium))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _ask(self, crowd: Crowd, *, premium: bool) -> None:
        began, phase = SYSTEM.now(), self._phase
        crowd.waiting += 1
        try:
            outcome = await self._outcome(crowd, premium=premium)
        finally:
            crowd.waiting -= 1
        now = SYSTEM.now()
        self._tally.add(RequestResult(now, phase, crowd.side, premium, outcome, now - began))

    async def _outcome(self, crowd: Crowd, *, premium: bool) -> str:
        if crowd.waiting > MOST:
            return ERROR
        tier, users = ("premium", PREMIUM_USERS) if premium else ("free", FREE_USERS)
        headers = {
            "x-api-key": f"{tier}-{self._rng.randrange(users)}",
            "baggage": f"seawall.criticality={_CRITICALITY[premium]}",
        }
        path = f"/quote?item={self._rng.randrange(ITEMS)}"
        try:
            async with asyncio.timeout(PATIENCE):
                for port in crowd.places(SYSTEM.now()):
                    try:
                        return outcome_of(*await self._caller.get(port, path, headers))
                    except Broken:
                        crowd.avoid(port, SYSTEM.now())
        except TimeoutError:
            pass
        return ERROR

    async def _report(self) -> None:
        while True:
            await pause(EVERY)
            recent: dict[str, dict[str, Any]] = self._tally.recent(SYSTEM.now())
            for side, results in recent.items():
                results["waiting"] = self._crowds[side].waiting
            self._lifeline.send(recent=recent)

    async def _finish(self, groups: dict[str, list[str]]) -> None:
        """Stop sending, wait for pending requests, and report each group."""
        for task in self._tasks[:-1]:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        results = {group: self._tally.phases(phases) for group, phases in groups.items()}
        self._lifeline.send(phases=results)


async def _main(lifeline: Lifeline, rate: float) -> None:
    load = Load(lifeline, rate=rate)
    lifeline.listen(load.on_message, load.over.set)
    lifeline.send(port=0)
    await load.over.wait()


if __name__ == "__main__":
    import sys

    asyncio.run(_main(Lifeline(), float(sys.argv[1])))
