"""A network in memory for clusters on virtual time, and ways to wait for what they find out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from socket import AF_INET
from typing import Any

from seawall.members import Cluster

PATIENCE = 120.0
"""Real seconds in which something happens also on a machine with a high load."""

LOOK_AGAIN = 0.05
"""Real seconds between two looks at what no event tells."""


class Hub:
    """Where members in memory find each other, by address."""

    def __init__(self) -> None:
        self.wires: dict[str, MemoryWire] = {}
        self.sent: list[tuple[str, str, Any]] = []

    def cluster(self, member: str, *, seeds: tuple[str, ...] = (), **options: Any) -> Cluster:
        """Return a cluster whose messages go through here; addresses are 10.0.0.N:7946."""
        options.setdefault("rng", Random(member))
        cluster = Cluster("group", member=member, seeds=seeds, **options)
        address = f"10.0.0.{member.removeprefix('m')}:7946"
        cluster._make_transport = lambda receive: MemoryWire(self, address, receive)
        return cluster


class MemoryWire:
    """The transport of one member; every message takes a millisecond."""

    family = AF_INET

    def __init__(self, hub: Hub, address: str, receive: Callable[..., None]) -> None:
        self.hub = hub
        self.address = address
        self.receive = receive
        self.waiting: list[tuple[Any, str, bool]] = []
        self.is_stalled = False
        """Whether what arrives waits until it is drained, as in a process that is busy."""

    def open(self) -> None:
        self.hub.wires[self.address] = self

    def send(self, address: str, message: Any, *, reliable: bool) -> None:
        self.hub.sent.append((self.address, address, message))
        loop = asyncio.get_running_loop()
        if self.hub.wires.get(self.address) is self:
            loop.call_later(0.001, self._deliver, address, (message, self.address, reliable))

    def _deliver(self, address: str, arrived: tuple[Any, str, bool]) -> None:
        there = self.hub.wires.get(address)
        if there is not None:
            there.waiting.append(arrived)
            if not there.is_stalled:
                there.drain()

    def drain(self) -> None:
        waiting, self.waiting = self.waiting, []
        for message, address, reliable in waiting:
            self.receive(message, address, reliable)

    def vanish(self) -> None:
        """Be gone, as if the process had been killed."""
        self.hub.wires.pop(self.address, None)

    async def close(self) -> None:
        self.vanish()

    def abandon(self) -> None:
        self.vanish()


async def until(condition: Callable[[], Any], *clusters: Cluster) -> None:
    """Wait until something is true, at the changes of `clusters` and now and then."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    ends = [
        one.subscribe(lambda _change: loop.call_soon_threadsafe(changed.set)) for one in clusters
    ]
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN):
                        await changed.wait()
                changed.clear()
    finally:
        for end in ends:
            end()


def wait_until(condition: Callable[[], Any], *clusters: Cluster) -> None:
    """Do the same in a program without an event loop."""
    changed = threading.Event()
    ends = [one.subscribe(lambda _change: changed.set()) for one in clusters]
    try:
        for _ in range(round(PATIENCE / LOOK_AGAIN)):
            if condition():
                return
            changed.wait(LOOK_AGAIN)
            changed.clear()
        raise TimeoutError("it does not come true")
    finally:
        for end in ends:
            end()
