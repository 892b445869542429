"""A simulated network of members on virtual time.

Datagrams are lost, delayed, duplicated and so reordered. Members crash, restart, stop for a while,
or go on while all that they send and receive is held up. Networks split; clocks run fast or slow.
After every message the network checks that no incarnation fell, and that none is above those that
the member has given itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from seawall.models.detection.gossip import MemberState
from seawall.models.detection.messages import (
    Directive,
    MembershipChange,
    Message,
    Pause,
    Send,
)
from seawall.models.detection.settings import SwimSettings
from seawall.models.detection.swim import Swim

PRESENT = (MemberState.ALIVE, MemberState.SUSPECTED)


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
    changes: list[MembershipChange] = field(default_factory=list)
    pauses: int = 0
    is_up: bool = True
    wakes_at: float = inf
    paused_until: float = 0.0
    blocked_until: float = 0.0
    waiting: list[tuple[Message, str, bool]] = field(default_factory=list)
    """What has arrived while it was paused or blocked."""
    unsent: list[Send] = field(default_factory=list)
    """What it sent while it was blocked."""


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
        """Start `size` members that know two seed addresses, m0 and m1."""
        self.random = Random(seed)
        self.conditions = conditions or Conditions()
        self.settings = settings or SwimSettings()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, int] = {}
        """The side of a partition on which a member is; all are on 0 unless said otherwise."""
        self.packets = 0
        self.watch: Callable[[str, Send], object] = lambda _source, _send: None
        """Called for each message that a member sends."""
        self.highest: dict[str, int] = {}
        """The highest incarnation that each member has given itself, in all its lives."""
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
            rng=Random(self.random.random()).random,
            now=self.now * rate,
        )
        node = self.nodes[name] = Node(name, swim, rate)
        self._wake(node)
        self._join(node)
        return node

    def _join(self, node: Node) -> None:
        """Ask the seeds that are no members again and again, as a `Cluster` does."""
        if self.nodes[node.name] is not node:
            return
        swim = node.swim
        known = {member.address for member in swim.present}
        strangers = [seed for seed in ("m0", "m1") if seed not in known]
        is_alone = len(known) == 1
        if not is_alone:
            strangers = self.random.sample(strangers, min(1, len(strangers)))
        is_running = node.is_up and self.now >= node.paused_until
        if strangers and is_running and swim.own.state is not MemberState.LEFT:
            self._do(node, swim.join(strangers, self.now * node.rate))
            self._wake(node)
        pause = self.settings.interval if is_alone else self.settings.exchange_interval
        self.at(self.now + pause, lambda: self._join(node))

    def kill(self, name: str) -> None:
        """Crash a member."""
        self.nodes[name].is_up = False

    def pause(self, name: str, seconds: float) -> None:
        """Stop the process of a member for a while; what is sent to it waits."""
        node = self.nodes[name]
        node.paused_until = self.now + seconds
        self.at(node.paused_until, lambda: self._advance(node))

    def block(self, name: str, seconds: float) -> None:
        """Hold up all that a member sends and receives, as an overloaded process does.

        Its clock and timers go on, so by its own view nobody answers.
        """
        node = self.nodes[name]
        node.blocked_until = max(node.blocked_until, self.now + seconds)

        def end() -> None:
            if self.now < max(node.blocked_until, node.paused_until):
                self.at(max(node.blocked_until, node.paused_until), end)
                return
            unsent, node.unsent = node.unsent, []
            for send in unsent:
                self._send(node, send)
            self._catch_up(node)

        self.at(node.blocked_until, end)

    def resume(self, name: str) -> None:
        """Undo a crash: the member goes on, but without the messages that it missed."""
        node = self.nodes[name]
        node.is_up, node.wakes_at = True, inf
        self._wake(node)

    def set_metadata(self, name: str, metadata: bytes) -> None:
        """Let a member say something else about itself."""
        node = self.nodes[name]
        self._do(node, node.swim.set_metadata(metadata, self.now * node.rate))

    def leave(self, name: str) -> None:
        """Let a member leave by its own wish; its process ends a moment later."""
        node = self.nodes[name]
        self._do(node, node.swim.leave(self.now * node.rate))
        self.at(self.now + 1.0, lambda: self.kill(name) if self.nodes[name] is node else None)

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
        """Tell whether every member that is up takes exactly `names` for alive, without doubt."""
        return all(
            {name} | {other for other, state in view.items() if state in PRESENT} == names
            and MemberState.SUSPECTED not in view.values()
            for name, view in self.views().items()
        )

    def _wake(self, node: Node) -> None:
        """Let time reach the member when it wants, unless it will do so earlier anyway."""
        # Rounded up: by its own clock the moment has come.
        when = max(self.now, node.swim.wake_at / node.rate + 1e-9)
        if when < node.wakes_at:
            node.wakes_at = when
            self.at(when, lambda: self._advance(node) if node.wakes_at == when else None)

    def _advance(self, node: Node) -> None:
        if self.nodes.get(node.name) is not node or not node.is_up:
            return
        if self.now < node.paused_until:
            node.wakes_at = node.paused_until
            self.at(node.paused_until, lambda: self._advance(node))
            return
        node.wakes_at = inf
        self._do(node, node.swim.advance(self.now * node.rate))
        self._catch_up(node)
        self._wake(node)

    def _catch_up(self, node: Node) -> None:
        """Let a member read what has arrived while it could not."""
        if node.waiting and node.is_up and self.now >= max(node.paused_until, node.blocked_until):
            waiting, node.waiting = node.waiting, []
            for message, source, reliable in waiting:
                self._arrive(node, message, source, reliable=reliable)

    def _do(self, node: Node, directives: list[Directive]) -> None:
        own = node.swim.own
        self.highest[node.name] = max(self.highest.get(node.name, 0), own.incarnation)
        for directive in directives:
            if isinstance(directive, MembershipChange):
                node.changes.append(directive)
            elif isinstance(directive, Pause):
                node.pauses += 1
            elif not isinstance(directive, Send):
                continue
            elif self.now < node.blocked_until:
                node.unsent.append(directive)
            else:
                self._send(node, directive)

    def _send(self, node: Node, send: Send) -> None:
        conditions, random = self.conditions, self.random
        self.packets += 1
        self.watch(node.name, send)
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
        if self.now < max(node.paused_until, node.blocked_until):
            node.waiting.append((message, source, reliable))
            return
        swim, highest = node.swim, self.highest
        names = {update.name for update in message.updates}
        before = {name: swim.members[name].incarnation for name in names if name in swim.members}
        self._do(node, swim.receive(message, source, self.now * node.rate, reliable=reliable))
        for name in names & swim.members.keys():
            incarnation = swim.members[name].incarnation
            assert before.get(name, 0) <= incarnation <= highest.get(name, 0), (node.name, name)
        self._wake(node)
