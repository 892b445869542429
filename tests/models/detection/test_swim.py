"""Membership by gossip on a simulated network: complete, convergent, suspicions end once."""

from __future__ import annotations

from random import Random

import pytest

from seawall.models.detection.gossip import MemberState, Update
from seawall.models.detection.messages import (
    Change,
    Message,
    MessageKind,
    Pause,
    RoundTrip,
    Send,
)
from seawall.models.detection.settings import (
    SwimSettings,
    lan,
    local,
    wan,
)
from seawall.models.detection.swim import Swim
from tests.models.detection.network import Conditions, Network

ALIVE = MemberState.ALIVE

BOUND = 60.0
"""Seconds in which a group of a dozen has surely found out: several rounds and a suspicion."""


def everybody(network: Network) -> set[str]:
    """Return the names of all members that are up."""
    return {node.name for node in network.nodes.values() if node.is_up}


def suspicions(changes: list[Change]) -> dict[str, list[MemberState]]:
    """Return the states that each member was given after the first, by name."""
    states: dict[str, list[MemberState]] = {}
    for change in changes:
        states.setdefault(change.name, []).append(change.after)
    return states


def assert_suspicions_end_once(network: Network) -> None:
    """Each begins from alive, and what ends it is the next change of that member."""
    for node in network.nodes.values():
        before: dict[str, MemberState | None] = {}
        for change in node.changes:
            assert change.before == before.get(change.name), change
            assert change.after is not change.before
            if change.after is MemberState.SUSPECTED:
                assert change.before is MemberState.ALIVE
            before[change.name] = change.after
        counts = node.swim.counts
        begun = sum(change.after is MemberState.SUSPECTED for change in node.changes)
        ended = sum(change.before is MemberState.SUSPECTED for change in node.changes)
        present = sum(m.state is MemberState.SUSPECTED for m in node.swim.members.values())
        assert begun == counts.suspicions == ended + present


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("preset", [lan, wan, local])
def test_members_find_each_other_by_one_seed(size, preset):
    """Whoever joins is known to all soon after."""
    network = Network(size, seed=1, settings=preset())
    network.run(BOUND)
    assert network.agree_on(everybody(network))


@pytest.mark.parametrize("seed", range(5))
def test_a_crash_is_confirmed_by_all_and_nobody_else_is_suspected(seed):
    """On a quiet network."""
    network = Network(12, seed)
    network.run(10.0)
    network.kill("m3")
    network.run(BOUND)
    assert network.agree_on(everybody(network))
    for node in network.nodes.values():
        if node.is_up:
            wanted = [MemberState.SUSPECTED, MemberState.CONFIRMED]
            assert suspicions(node.changes)["m3"][-2:] == wanted
            assert {
                name for name, states in suspicions(node.changes).items() if len(states) > 1
            } == {"m3"}
    assert_suspicions_end_once(network)


def test_a_member_that_leaves_is_not_suspected():
    """By its own word it has left."""
    network = Network(8, seed=2)
    network.run(10.0)
    node = network.nodes["m5"]
    network._do(node, node.swim.leave(network.now))
    network.run(2.0)
    network.kill("m5")
    network.run(BOUND)
    for other in network.nodes.values():
        if other.is_up:
            assert suspicions(other.changes)["m5"] == [MemberState.ALIVE, MemberState.LEFT]


def test_a_crashed_member_comes_back_under_its_name():
    """It begins with incarnation 0, hears that it is taken for dead, and refutes."""
    network = Network(6, seed=3)
    network.run(10.0)
    network.kill("m4")
    network.run(BOUND)
    network.start("m4")
    network.run(BOUND)
    assert network.agree_on(everybody(network))
    assert network.nodes["m4"].swim.own.incarnation > 0


def test_a_quarter_of_all_datagrams_may_be_lost():
    """30 members converge, and nobody stays confirmed."""
    network = Network(30, seed=4, conditions=Conditions(loss=0.25))
    network.run(90.0)
    network.conditions.loss = 0.0
    network.run(BOUND)
    assert network.agree_on(everybody(network))
    assert_suspicions_end_once(network)


def test_a_partition_of_a_minute_heals_by_itself():
    """Both sides take each other for dead; then all know all again."""
    network = Network(12, seed=5)
    network.run(10.0)
    network.groups = {f"m{number}": 1 for number in range(6)}
    network.run(60.0)
    assert network.views()["m0"]["m11"] is MemberState.CONFIRMED
    network.groups = {}
    network.run(90.0)
    assert network.agree_on(everybody(network))
    assert_suspicions_end_once(network)


def test_a_process_that_was_stopped_accuses_nobody():
    """It is suspected by the others and cleared; it says that it was stopped."""
    network = Network(12, seed=6, settings=SwimSettings(suspicion_multiplier=6))
    network.run(10.0)
    network.pause("m7", 6.0)
    network.run(BOUND)
    assert network.agree_on(everybody(network))
    stopped = network.nodes["m7"]
    assert stopped.swim.counts.pauses == 1
    assert stopped.swim.counts.suspicions == 0
    others = [node for node in network.nodes.values() if node is not stopped]
    assert any(MemberState.SUSPECTED in suspicions(node.changes)["m7"] for node in others)
    assert not any(MemberState.CONFIRMED in suspicions(node.changes)["m7"] for node in others)


def test_suspicion_can_be_paused():
    """While a process does heavy work, it accuses and confirms nobody."""
    network = Network(2, seed=7)
    network.run(5.0)
    node = network.nodes["m0"]
    node.swim.pause_suspicion()
    network.kill("m1")
    network.run(BOUND)
    assert node.swim.counts.suspicions == 0
    node.swim.resume_suspicion(network.now)
    network.run(BOUND)
    assert node.swim.counts.confirmed == 1


def test_an_answer_that_waited_for_heavy_work_to_end_is_no_failure():
    """The probe before it is forgotten, and the next accusation takes an interval more."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    swim.receive(Message(MessageKind.GOSSIP, "b", (Update(ALIVE, "b", 0, "b"),)), "b", 0.0)
    sent = swim.advance(1.0)
    assert any(isinstance(one, Send) and one.message.kind == MessageKind.PING for one in sent)
    swim.pause_suspicion()
    swim.resume_suspicion(4.0)
    swim.advance(4.0)
    assert swim.counts.suspicions == 0
    for at in range(5, 9):
        swim.advance(float(at))
    assert swim.members["b"].state is MemberState.SUSPECTED


def test_a_pause_and_round_trips_are_reported_with_their_length():
    """For metrics; the state says why and by whom."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    swim.receive(Message(MessageKind.GOSSIP, "b", (Update(ALIVE, "b", 0, "b"),)), "b", 0.0)
    assert (swim.members["b"].reason, swim.members["b"].by) == ("it joined", "b")
    pings = [one for one in swim.advance(1.0) if isinstance(one, Send)]
    number = max(one.message.number for one in pings)
    answers = swim.receive(Message(MessageKind.ACK, "b", (), number), "b", 1.25)
    assert RoundTrip("b", 0.25) in answers
    assert Pause(6.0) in swim.advance(7.25)


def test_joining_exchanges_views_with_each_address():
    """By a connection, since a view may be large."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    sent = [one for one in swim.join(["x", "y"], 0.5) if isinstance(one, Send)]
    assert [(one.address, one.message.kind, one.reliable) for one in sent] == [
        ("x", "push", True),
        ("y", "push", True),
    ]


def test_a_member_that_has_left_waits_for_no_verdict():
    """One that was suspected before must not keep it awake."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    alive = Update(MemberState.ALIVE, "b", 0, "b")
    suspected = Update(MemberState.SUSPECTED, "b", 0, by="c")
    swim.receive(Message(MessageKind.GOSSIP, "c", (alive, suspected)), "c", 0.1)
    swim.leave(0.2)
    now = 0.2
    swim.advance(now)
    for _ in range(200):
        assert swim.wake_at > now
        now = swim.wake_at
        swim.advance(now)
    assert now > 20.0


def test_the_view_is_bounded():
    """Forged members beyond it are refused and counted; the first ones stay."""
    swim = Swim("a", "a", settings=SwimSettings(max_members=10), rng=Random(1).random, now=0.0)
    forged = tuple(Update(MemberState.ALIVE, f"x{n}", 0, f"x{n}") for n in range(10_000))
    swim.receive(Message(MessageKind.PUSH, "x", forged), "x", 0.1)
    assert len(swim.members) == 9
    assert swim.counts.refused == 10_000 - 9


def test_only_the_accused_raises_its_incarnation():
    """A suspicion of an older incarnation says nothing about the newer one."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    alive = Update(MemberState.ALIVE, "b", 5, "b")
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive,)), "b", 0.1)
    old = Update(MemberState.SUSPECTED, "b", 4, by="c")
    swim.receive(Message(MessageKind.GOSSIP, "c", (old,)), "c", 0.2)
    assert swim.members["b"].state is MemberState.ALIVE
    swim.receive(Message(MessageKind.GOSSIP, "c", (old._replace(incarnation=5),)), "c", 0.3)
    assert swim.members["b"].state is MemberState.SUSPECTED
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive,)), "b", 0.4)
    assert swim.members["b"].state is MemberState.SUSPECTED
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive._replace(incarnation=6),)), "b", 0.5)
    assert swim.members["b"].state is MemberState.ALIVE


def rough_life(seed: int) -> None:
    """Play a random history of faults; then the network is well, and all must agree."""
    random = Random(seed)
    size = random.randint(3, 8)
    conditions = Conditions(
        loss=random.choice([0.0, 0.1, 0.3]),
        duplicates=random.choice([0.0, 0.2]),
        delay=random.choice([(0.001, 0.005), (0.001, 0.4)]),
        drift=random.choice([0.0, 0.01]),
    )
    network = Network(size, seed, settings=random.choice([lan, local])(), conditions=conditions)
    network.run(5.0)
    incarnations: dict[tuple[str, str], int] = {}
    for _ in range(random.randint(1, 6)):
        victim = random.choice(sorted(network.nodes))
        fault = random.choice(["kill", "pause", "partition", "restart", "calm"])
        if fault == "kill" and len(everybody(network)) > 2:
            network.kill(victim)
        elif fault == "pause":
            network.pause(victim, random.uniform(0.5, 15.0))
        elif fault == "partition":
            network.groups = {name: random.randint(0, 1) for name in network.nodes}
        elif fault == "restart":
            network.kill(victim)
            network.run(random.uniform(0.0, 20.0))
            network.start(victim)
            incarnations = {pair: n for pair, n in incarnations.items() if pair[0] != victim}
        network.run(random.uniform(1.0, 20.0))
        for node in network.nodes.values():
            for member in node.swim.members.values():
                pair = node.name, member.name
                assert member.incarnation >= incarnations.get(pair, 0), pair
                incarnations[pair] = member.incarnation
    network.groups, network.conditions = {}, Conditions()
    network.run(240.0)
    assert network.agree_on(everybody(network)), network.views()
    assert_suspicions_end_once(network)


@pytest.mark.parametrize("seed", range(20))
def test_views_converge_when_the_faults_are_over(seed):
    """Loss, delay, duplicates, drift, pauses, partitions, crashes and restarts."""
    rough_life(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(100))
def test_views_converge_when_the_faults_are_over_by_10_000_seeds(block):
    """The same histories, many of them."""
    for seed in range(block * 100, block * 100 + 100):
        rough_life(seed)


def test_the_same_seed_gives_the_same_history():
    """Nothing but the seed decides."""
    histories = []
    for _ in range(2):
        network = Network(8, seed=9, conditions=Conditions(loss=0.2))
        network.run(5.0)
        network.kill("m2")
        network.run(30.0)
        histories.append([node.changes for node in network.nodes.values()])
    assert histories[0] == histories[1]


def test_wrong_settings_are_refused():
    """At once, with what to write."""
    with pytest.raises(ValueError, match="about half"):
        SwimSettings(timeout=1.0)
    with pytest.raises(ValueError, match="interval"):
        SwimSettings(interval=0.0)
    with pytest.raises(ValueError, match="at most 512"):
        Swim("a", "a", metadata=b"x" * 513, rng=Random(1).random, now=0.0)
