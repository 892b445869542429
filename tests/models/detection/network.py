"""A simulated network of members on virtual time: loss, delay, duplicates, partitions, pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from seawall.models.detection.gossip import MemberState
from seawall.models.detection.swim import Change, Directive, Message, Send, Swim, SwimSettings


@dataclass
class Conditions:
    """What the network does to datagrams; connections only have the delay, and partitions."""

    loss: float = 0.0
    duplicates: float = 0.0
    delay: tuple[float, float] = (0.001, 0.005)
    drift: float = 0.0
    """By how much the clocks of members go fast or slow, at most."""


@dataclass
class Node:
    """One member and its process."""

    name: str
    swim: Swim
    rate: float
    changes: list[Change] = field(default_factory=list)
    is_up: bool = True
    paused_until: float = 0.0
    waiting: list[tuple[Message, str, bool]] = field(default_factory=list)
    """What has arrived while it was paused."""


class Network:
    """Members that talk to each other; the same seed gives the same history."""

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        settings: SwimSettings | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        """Start `size` members that know one seed address, m0."""
        self.random = Random(seed)
        self.conditions = conditions or Conditions()
        self.settings = settings or SwimSettings()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, int] = {}
        """The side of a partition on which a member is; all are on 0 unless said otherwise."""
        self.packets = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        for number in range(size):
            self.start(f"m{number}")

    def start(self, name: str) -> Node:
        """Start a member, also one that was killed before."""
        drift = self.conditions.drift
        rate = 1.0 + self.random.uniform(-drift, drift)
        swim = Swim(
            name,
            name,
            settings=self.settings,
            seeds=[] if name == "m0" else ["m0"],
            rng=Random(self.random.random()).random,
            now=self.now * rate,
        )
        node = self.nodes[name] = Node(name, swim, rate)
        self._wake(node)
        return node

    def kill(self, name: str) -> None:
        """Crash a member."""
        self.nodes[name].is_up = False

    def pause(self, name: str, seconds: float) -> None:
        """Stop the process of a member for a while; what is sent to it waits."""
        self.nodes[name].paused_until = self.now + seconds

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at an instant."""
        heappush(self._events, (when, next(self._serial), act))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass, or as much of it as it takes until something is so; return the instant."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _serial, act = heappop(self._events)
            act()
            if until is not None and until():
                return self.now
        self.now = end
        return end

    def views(self) -> dict[str, dict[str, MemberState]]:
        """Return how each member that is up sees the others."""
        return {
            node.name: {one.name: one.state for one in node.swim.members.values()}
            for node in self.nodes.values()
            if node.is_up
        }

    def agree_on(self, names: set[str]) -> bool:
        """Tell whether every member that is up takes exactly `names` for alive."""
        return all(
            {name} | {other for other, state in view.items() if state == "alive"} == names
            for name, view in self.views().items()
        )

    def _wake(self, node: Node) -> None:
        def act() -> None:
            if self.nodes.get(node.name) is not node or not node.is_up:
                return
            if self.now < node.paused_until:
                self.at(node.paused_until, act)
                return
            waiting, node.waiting = node.waiting, []
            self._do(node, node.swim.advance(self.now * node.rate))
            for message, source, reliable in waiting:
                self._arrive(node, message, source, reliable=reliable)
            self._wake(node)

        # Rounded up: by its own clock the moment has come.
        self.at(max(self.now, node.swim.wake_at / node.rate + 1e-9), act)

    def _do(self, node: Node, directives: list[Directive]) -> None:
        for directive in directives:
            if isinstance(directive, Change):
                node.changes.append(directive)
            elif isinstance(directive, Send):
                self._send(node, directive)

    def _send(self, node: Node, send: Send) -> None:
        conditions, random = self.conditions, self.random
        self.packets += 1
        copies = 1
        if not send.reliable:
            copies = (random.random() >= conditions.loss) + (
                random.random() < conditions.duplicates
            )
        for _ in range(copies):
            delay = random.uniform(*conditions.delay)
            self.at(self.now + delay, lambda: self._deliver(node.name, send))

    def _deliver(self, source: str, send: Send) -> None:
        node = self.nodes.get(send.address)
        same_side = self.groups.get(source, 0) == self.groups.get(send.address, 0)
        if node is not None and node.is_up and same_side:
            self._arrive(node, send.message, source, reliable=send.reliable)

    def _arrive(self, node: Node, message: Message, source: str, *, reliable: bool) -> None:
        if self.now < node.paused_until:
            node.waiting.append((message, source, reliable))
            return
        self._do(node, node.swim.receive(message, source, self.now * node.rate, reliable=reliable))
