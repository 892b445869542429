"""Random faults on a simulated network: what a group promises holds for every seed.

Each history loses, delays, duplicates and reorders datagrams; members crash, restart, leave, stop
for a while, or go on while all that they send and receive is held up; the network splits; clocks
drift.
Then the network is well, and these must hold:

- Views converge within `healing_bound`, and stay so.
- A crash is then confirmed by every member within `crash_bound`.
- Every suspicion has ended exactly once: cleared, confirmed, or the member left.
- No incarnation ever fell, and none is above those that the member gave itself (checked by the
  network after every message).
"""

from __future__ import annotations

from math import log10
from random import Random

import pytest

from seawall.models.detection.gossip import LONGEST_FACTOR, MemberState
from seawall.models.detection.settings import SwimSettings, lan, local
from tests.models.detection.network import Conditions, Network, Node

DRIFT = 0.01


def crash_bound(settings: SwimSettings, members: int) -> float:
    """Return the seconds in which each of `members` that are well confirms a crashed one.

    By itself, even without gossip: in two rounds of its shuffled order it probes the crashed one,
    then the probe fails, and nobody shares the suspicion.
    """
    least = settings.suspicion_multiplier * max(1.0, log10(members)) * settings.interval
    return (2 * members * settings.interval + LONGEST_FACTOR * least) * (1 + DRIFT)


def healing_bound(settings: SwimSettings, members: int) -> float:
    """Return the seconds in which `members` agree after all faults are over.

    At each exchange a member contacts the next one that it takes for dead, so each of the others
    within as many exchanges. Suspicions that began during the faults need their time; and a member
    of the worst health probes at a ninth of the rate at first.
    """
    exchanges = members * settings.exchange_interval
    return (exchanges + 9 * settings.interval) * (1 + DRIFT) + crash_bound(settings, members)


def up(network: Network) -> set[str]:
    """Return the names of all members that are up."""
    return {node.name for node in network.nodes.values() if node.is_up}


def assert_suspicions_end_once(node: Node) -> None:
    """Each begins from alive, and the next change of that member ends it."""
    before: dict[str, MemberState | None] = {}
    for change in node.changes:
        assert change.before == before.get(change.name), change
        assert change.after is not change.before
        if change.after is MemberState.SUSPECTED:
            assert change.before is MemberState.ALIVE
        before[change.name] = change.after
    begun = sum(change.after is MemberState.SUSPECTED for change in node.changes)
    ended = sum(change.before is MemberState.SUSPECTED for change in node.changes)
    open_ones = sum(one.state is MemberState.SUSPECTED for one in node.swim.members.values())
    assert begun == ended + open_ones


class History:
    """One random history of a small group; `ended` are the members of earlier lives."""

    def __init__(self, seed: int) -> None:
        """Choose the group and its network."""
        self.random = random = Random(seed)
        self.settings = random.choice([lan, local])()
        self.size = random.randint(3, 8)
        conditions = Conditions(
            loss=random.choice([0.0, 0.1, 0.3]),
            duplicates=random.choice([0.0, 0.2]),
            delay=random.choice([(0.001, 0.005), (0.001, 0.4)]),
            drift=random.choice([0.0, DRIFT]),
        )
        self.network = Network(self.size, seed, settings=self.settings, conditions=conditions)
        self.ended: list[Node] = []

    def do_faults(self) -> None:
        """Do some faults, a few seconds apart."""
        network, random = self.network, self.random
        network.run(random.uniform(0.0, 5.0))
        for _ in range(random.randint(1, 6)):
            fault = random.choice(
                ["kill", "pause", "block", "partition", "heal", "restart", "leave", "metadata"]
            )
            self.do(fault, random.choice(sorted(network.nodes)))
            network.run(random.uniform(1.0, 20.0))

    def do(self, fault: str, victim: str) -> None:
        """Do one fault."""
        network, random = self.network, self.random
        node = network.nodes[victim]
        if fault == "restart":
            network.kill(victim)
            network.run(random.uniform(0.0, 20.0))
            self.ended.append(node)
            network.start(victim)
        elif fault == "partition":
            network.groups = {name: random.randint(0, 1) for name in network.nodes}
        elif fault == "heal":
            network.groups = {}
        elif not node.is_up:
            return
        elif fault == "pause":
            network.pause(victim, random.uniform(0.5, 15.0))
        elif fault == "block":
            network.block(victim, random.uniform(0.5, 15.0))
        elif fault == "metadata":
            network.set_metadata(victim, random.randbytes(8))
        elif len(up(network)) > 2:
            (network.kill if fault == "kill" else network.leave)(victim)

    def run_until(self, seconds: float, names: set[str]) -> float:
        """Run until all agree on `names`, which must be so in time; return how long it took."""
        network = self.network
        began = network.now
        while not network.agree_on(names):
            assert network.now - began < seconds, f"no agreement on {names}: {network.views()}"
            network.run(0.5)
        return network.now - began

    def check(self) -> None:
        """End all faults, and check everything that is promised."""
        network = self.network
        network.run(2.0)  # those that leave have ended
        network.groups, network.conditions = {}, Conditions()
        self.run_until(15.0 + healing_bound(self.settings, self.size), up(network))
        network.run(10.0)
        while any(node.swim.health.score for node in network.nodes.values() if node.is_up):
            network.run(1.0)
        assert network.agree_on(up(network)), network.views()
        if len(up(network)) > 2:
            network.kill(self.random.choice(sorted(up(network))))
        self.run_until(crash_bound(self.settings, len(up(network)) + 1), up(network))
        for node in [*self.ended, *network.nodes.values()]:
            assert_suspicions_end_once(node)


def play(seed: int) -> None:
    """Play the history of a seed, which is in the error if a promise is broken."""
    history = History(seed)
    try:
        history.do_faults()
        history.check()
    except Exception as error:
        error.add_note(f"in the history of seed {seed}")
        raise


@pytest.mark.parametrize("seed", range(30))
def test_all_promises_hold_after_random_faults(seed):
    """Loss, delay, duplicates, drift, pauses, overload, partitions, crashes and restarts."""
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(100))
def test_all_promises_hold_after_random_faults_of_10_000_seeds(block):
    """The same, a hundred histories at a time."""
    for seed in range(block * 100, block * 100 + 100):
        play(seed)
