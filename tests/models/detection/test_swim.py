"""Membership by gossip: the rules of one member, and of a group on a quiet network.

`test_faults.py` has random faults, `test_scale.py` large groups.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from seawall.models.detection.gossip import GossipUpdate, MemberState
from seawall.models.detection.messages import (
    MembershipChange,
    Message,
    MessageKind,
    MissedDatagram,
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

ALIVE, SUSPECTED = MemberState.ALIVE, MemberState.SUSPECTED
CONFIRMED, LEFT = MemberState.CONFIRMED, MemberState.LEFT

BOUND = 60.0
"""Seconds in which a group of a dozen has surely found out: several rounds and a suspicion."""


def everybody(network: Network) -> set[str]:
    """Return the names of all members that are up."""
    return {node.name for node in network.nodes.values() if node.is_up}


def suspicions(changes: list[MembershipChange]) -> dict[str, list[MemberState]]:
    """Return the states that each member was given after the first, by name."""
    states: dict[str, list[MemberState]] = {}
    for change in changes:
        states.setdefault(change.name, []).append(change.after)
    return states


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("preset", [lan, wan, local])
def test_members_find_each_other_by_one_seed(size, preset):
    """A new member is known to all soon after it joined."""
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


def test_a_process_that_was_stopped_accuses_nobody():
    """It is suspected by the others and cleared; it says that it was stopped."""
    network = Network(12, seed=6, settings=SwimSettings(suspicion_multiplier=6))
    network.run(10.0)
    network.pause("m7", 6.0)
    network.run(BOUND)
    assert network.agree_on(everybody(network))
    stopped = network.nodes["m7"]
    assert stopped.pauses == 1
    assert SUSPECTED not in {change.after for change in stopped.changes}
    others = [node for node in network.nodes.values() if node is not stopped]
    assert any(MemberState.SUSPECTED in suspicions(node.changes)["m7"] for node in others)
    assert not any(MemberState.CONFIRMED in suspicions(node.changes)["m7"] for node in others)


def test_suspicion_can_be_paused():
    """During heavy work a process suspects and confirms no member."""
    network = Network(2, seed=7)
    network.run(5.0)
    node = network.nodes["m0"]
    node.swim.pause_suspicion()
    network.kill("m1")
    network.run(BOUND)
    assert suspicions(node.changes)["m1"] == [ALIVE]
    node.swim.resume_suspicion(network.now)
    network.run(BOUND)
    assert suspicions(node.changes)["m1"] == [ALIVE, SUSPECTED, CONFIRMED]


def test_an_answer_that_waited_for_heavy_work_to_end_is_no_failure():
    """The probe before it is forgotten, and the next accusation takes an interval more."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    swim.receive(Message(MessageKind.GOSSIP, "b", (GossipUpdate(ALIVE, "b", 0, "b"),)), "b", 0.0)
    sent = swim.advance(1.0)
    assert any(isinstance(one, Send) and one.message.kind == MessageKind.PING for one in sent)
    swim.pause_suspicion()
    swim.resume_suspicion(4.0)
    swim.advance(4.0)
    assert swim.members["b"].state is ALIVE
    for at in range(5, 9):
        swim.advance(float(at))
    assert swim.members["b"].state is MemberState.SUSPECTED


def test_a_pause_and_round_trips_are_reported_with_their_length():
    """For metrics; the state says why and by whom."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    swim.receive(Message(MessageKind.GOSSIP, "b", (GossipUpdate(ALIVE, "b", 0, "b"),)), "b", 0.0)
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
    alive = GossipUpdate(MemberState.ALIVE, "b", 0, "b")
    suspected = GossipUpdate(MemberState.SUSPECTED, "b", 0, by="c")
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
    forged = tuple(GossipUpdate(MemberState.ALIVE, f"x{n}", 0, f"x{n}") for n in range(10_000))
    swim.receive(Message(MessageKind.PUSH, "x", forged), "x", 0.1)
    assert len(swim.members) == 9
    assert swim.refused == 10_000 - 9


def test_only_the_accused_raises_its_incarnation():
    """A suspicion of an older incarnation says nothing about the newer one."""
    swim = Swim("a", "a", rng=Random(1).random, now=0.0)
    alive = GossipUpdate(MemberState.ALIVE, "b", 5, "b")
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive,)), "b", 0.1)
    old = GossipUpdate(MemberState.SUSPECTED, "b", 4, by="c")
    swim.receive(Message(MessageKind.GOSSIP, "c", (old,)), "c", 0.2)
    assert swim.members["b"].state is MemberState.ALIVE
    swim.receive(Message(MessageKind.GOSSIP, "c", (old._replace(incarnation=5),)), "c", 0.3)
    assert swim.members["b"].state is MemberState.SUSPECTED
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive,)), "b", 0.4)
    assert swim.members["b"].state is MemberState.SUSPECTED
    swim.receive(Message(MessageKind.GOSSIP, "b", (alive._replace(incarnation=6),)), "b", 0.5)
    assert swim.members["b"].state is MemberState.ALIVE


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


def member_of(*others: str, seed: int = 1, **options: object) -> Swim:
    """Return the member a, which knows `others`; its first exchange is over."""
    swim = Swim("a", "a", settings=SwimSettings(**options), rng=Random(seed).random, now=0.0)
    alive = tuple(GossipUpdate(ALIVE, name, 0, name) for name in others)
    swim.receive(Message(MessageKind.GOSSIP, "x", alive), "x", 0.0)
    swim.advance(0.0)
    return swim


def hear(swim: Swim, now: float, *updates: GossipUpdate, kind: MessageKind = MessageKind.GOSSIP):
    """Let `swim` hear statements; return what it does."""
    return swim.receive(Message(kind, "x", updates), "x", now)


def run(swim: Swim, until: float) -> list:
    """Let time pass without any message; return all that it does."""
    done = []
    while swim.wake_at <= until:
        done += swim.advance(swim.wake_at)
    return done


def sent(directives: list, kind: MessageKind) -> list[Send]:
    """Return the messages of a kind."""
    return [one for one in directives if isinstance(one, Send) and one.message.kind is kind]


def accused(name: str, by: str = "c", incarnation: int = 0) -> GossipUpdate:
    """Return the statement that a member is suspected."""
    return GossipUpdate(SUSPECTED, name, incarnation, by=by)


def test_a_silent_member_is_probed_directly_then_by_others_and_by_connection():
    """Then it is suspected; the score of health rises by one, and by one for each missing nack."""
    swim = member_of("b", "c", "d", "e", "f", indirect_probes=2)
    done = run(swim, 1.0)
    (ping,) = sent(done, MessageKind.PING)[:1]
    probed = ping.message.target
    done = run(swim, swim.members[probed].since + 1.6)
    asked = sent(done, MessageKind.PING_REQUEST)
    assert len({one.address for one in asked}) == 2
    assert {one.message.target for one in asked} == {probed}
    (by_connection,) = [one for one in sent(done, MessageKind.PING) if one.reliable]
    assert by_connection.address == probed
    helper = asked[0].address
    nack = Message(MessageKind.NACK, helper, (), ping.message.number)
    swim.receive(nack, helper, swim._evaluated_at)
    while swim.members[probed].state is ALIVE:
        swim.advance(swim.wake_at)
    assert swim.members[probed].state is SUSPECTED
    assert swim.health.score == 2


def test_several_members_are_probed_in_an_interval_while_they_answer():
    """A silent member gets the whole interval, and no other is probed then."""
    swim = member_of("b", "c", "d", "e", "f", probes=4)
    pings: list[tuple[float, str]] = []
    while len(pings) < 9:
        now = swim.wake_at
        for ping in sent(swim.advance(now), MessageKind.PING):
            if not ping.reliable:
                pings.append((now, ping.address))
                if len(pings) != 5:
                    answer = Message(MessageKind.ACK, ping.address, (), ping.message.number)
                    swim.receive(answer, ping.address, now)
    began = [at for at, _ in pings]
    gaps = [after - before for before, after in pairwise(began)]
    assert gaps[:4] == pytest.approx([0.25] * 4)
    assert gaps[4] == pytest.approx(1.0)
    assert swim.members[pings[4][1]].since == pytest.approx(began[5])
    assert [one.state for one in swim.members.values()].count(SUSPECTED) == 1


@pytest.mark.parametrize("datagram_too", [True, False])
def test_an_answer_by_connection_alone_is_reported(datagram_too):
    """A firewall, if it happens often. A datagram that comes later shows that there is none."""
    swim = member_of("b", "c")
    (ping,) = sent(run(swim, 1.0), MessageKind.PING)
    run(swim, 1.5)
    number, name = ping.message.number, ping.message.target
    swim.receive(Message(MessageKind.ACK, name, (), number), name, 1.55, reliable=True)
    if datagram_too:
        swim.receive(Message(MessageKind.ACK, "c", (), number, name), "c", 1.6)
    done = run(swim, 2.1)
    assert (MissedDatagram(name) in done) is not datagram_too
    assert swim.members[name].state is ALIVE


@pytest.mark.parametrize(
    ("preset", "after"), [(lan, 0.4), (wan, 1.6), (local, 0.16)], ids=["lan", "wan", "local"]
)
def test_a_helper_says_in_time_that_it_has_heard_nothing(preset, after):
    """After 0.8 of the probe timeout, and before the interval of the asking member has ended."""
    settings = preset()
    swim = Swim("a", "a", settings=settings, rng=Random(1).random, now=0.0)
    request = Message(MessageKind.PING_REQUEST, "b", (), 7, "c", "c")
    (ping,) = sent(swim.receive(request, "b", 0.0), MessageKind.PING)
    assert (ping.address, ping.message.target) == ("c", "c")
    assert not sent(run(swim, after - 0.001), MessageKind.NACK)
    (nack,) = sent(run(swim, after + 0.001), MessageKind.NACK)
    assert (nack.address, nack.message.number) == ("b", 7)
    assert after < settings.interval - settings.timeout
    answer = Message(MessageKind.ACK, "c", (), ping.message.number)
    (ack,) = sent(swim.receive(answer, "c", after + 0.01), MessageKind.ACK)
    assert (ack.address, ack.message.number, ack.message.target) == ("b", 7, "c")


@pytest.mark.parametrize("lifeguard", [True, False])
def test_a_ping_to_a_suspect_carries_the_suspicion(lifeguard):
    """So that it can refute at once. Plain SWIM has no such rule."""
    swim = member_of("b", lifeguard=lifeguard, gossip_interval=60.0)
    hear(swim, 0.1, accused("b"))
    while len(swim._gossip):
        swim._gossip.take(10_000, 2)
    (ping,) = sent(run(swim, 1.0), MessageKind.PING)
    assert (accused("b") in ping.message.updates) is lifeguard


def test_a_process_that_is_late_accuses_and_confirms_nobody_at_once():
    """What others sent may wait to be read. Plain SWIM does both."""
    for lifeguard in (True, False):
        swim = member_of("b", "c", "d", lifeguard=lifeguard)
        hear(swim, 0.1, accused("c"), accused("c", "d"), accused("c", "e"))
        (ping,) = sent(run(swim, 1.0), MessageKind.PING)
        hear(swim, 3.9)
        late = swim.advance(5.5)
        states = {(one.name, one.after) for one in late if isinstance(one, MembershipChange)}
        assert ((ping.message.target, SUSPECTED) in states) is not lifeguard
        assert (("c", CONFIRMED) in states) is not lifeguard
        assert not any(isinstance(one, Pause) for one in late)


def test_the_helpers_of_a_late_process_have_their_time():
    """If it asks them late, the probe ends later; an answer then is in time."""
    swim = member_of("b", "c")
    (ping,) = sent(run(swim, 1.0), MessageKind.PING)
    name, began = ping.message.target, swim._probe.sent_at
    run(swim, began + 0.49)
    done = swim.advance(began + 0.95)
    assert sent(done, MessageKind.PING_REQUEST)
    run(swim, began + 1.2)
    assert swim.members[name].state is ALIVE
    helper = sent(done, MessageKind.PING_REQUEST)[0].address
    answer = Message(MessageKind.ACK, helper, (), ping.message.number, name)
    swim.receive(answer, helper, began + 1.2)
    run(swim, began + 1.5)
    assert {member.state for member in swim.members.values()} == {ALIVE}


def test_a_slow_rhythm_of_probes_and_gossip_is_no_pause():
    """Evaluations are due often enough, so that only a process that was stopped has a gap."""
    swim = member_of("b", interval=60.0, timeout=30.0, gossip_interval=20.0)
    assert not any(isinstance(one, Pause) for one in run(swim, 600.0))
    assert sum(isinstance(one, Pause) for one in swim.advance(606.0)) == 1


def test_a_suspicion_of_a_newer_incarnation_is_a_new_one():
    """A refutation clears the old suspicion, and the timeout of the new one starts."""
    swim = member_of("b", "c", "d", "e")
    hear(swim, 0.1, accused("b", "c"), accused("b", "d"), accused("b", "e"))
    run(swim, 3.0)
    changes = [
        one for one in hear(swim, 3.0, accused("b", "c", 1)) if isinstance(one, MembershipChange)
    ]
    assert [one.after for one in changes] == [ALIVE, SUSPECTED]
    later = [one for one in run(swim, 6.9) if isinstance(one, MembershipChange)]
    assert "b" not in {one.name for one in later}
    assert swim.members["b"].state is SUSPECTED


def test_a_member_that_is_dead_by_a_whole_view_is_suspected():
    """It gets a chance to refute, here and at those that this one passes it on to."""
    swim = member_of("b", "c", "d", "e")
    dead = GossipUpdate(CONFIRMED, "b", 0, by="c")
    hear(swim, 0.1, dead, kind=MessageKind.PULL)
    assert swim.members["b"].state is SUSPECTED
    hear(swim, 0.2, dead._replace(by="d"), kind=MessageKind.PULL)
    states = {one.state for one in swim._gossip.take(10_000, 5) if one.name == "b"}
    assert states == {SUSPECTED}
    hear(swim, 0.3, dead)
    assert swim.members["b"].state is CONFIRMED


def test_passing_on_a_view_makes_nobody_an_accuser():
    """A whole view names the member that suspects, not the one that sends the view."""
    swim = member_of("b", "c", "d", "e")
    hear(swim, 0.1, accused("b", "c"))
    (pull,) = sent(
        swim.receive(Message(MessageKind.PUSH, "d"), "d", 0.2, reliable=True), MessageKind.PULL
    )
    assert accused("b", "c") in pull.message.updates


@pytest.mark.parametrize("state", [CONFIRMED, LEFT])
def test_a_member_that_is_taken_for_gone_is_told_so(state):
    """As soon as it is heard, so that it can refute."""
    swim = member_of("b", "c")
    hear(swim, 0.1, GossipUpdate(state, "b", 0, by="b" if state is LEFT else "c"))
    done = swim.receive(Message(MessageKind.GOSSIP, "b"), "b", 0.2)
    (told,) = [one for one in sent(done, MessageKind.GOSSIP) if one.address == "b"]
    assert [one.state for one in told.message.updates if one.name == "b"] == [state]


def test_those_that_are_taken_for_dead_are_contacted_in_turn():
    """Each once in as many exchanges as there are of them."""
    swim = member_of("b", "c", "d", "e")
    hear(swim, 0.1, *(GossipUpdate(CONFIRMED, name, 0, by="b") for name in "cde"))
    pushed: list[str] = []
    while len(pushed) < 6:
        done = swim.advance(swim.wake_at)
        for ping in sent(done, MessageKind.PING):
            answer = Message(MessageKind.ACK, "b", (), ping.message.number)
            swim.receive(answer, "b", swim._evaluated_at)
        pushed += [one.address for one in sent(done, MessageKind.PUSH) if one.address in "cde"]
    assert sorted(pushed[:3]) == ["c", "d", "e"]
    assert pushed[3:] == pushed[:3]


def test_groups_that_began_apart_become_one():
    """The seeds were not there when they began; all are asked until they are members."""
    network = Network(6, seed=1)
    network.groups = {"m0": 1, "m2": 1, "m4": 1}
    network.run(40.0)
    network.groups = {}
    network.run(40.0)
    assert network.agree_on(everybody(network))


def test_a_refuting_member_doubts_its_own_health():
    """And a lost refutation is repeated, without another incarnation."""
    swim = member_of("b")
    hear(swim, 0.1, accused("a"))
    assert (swim.own.incarnation, swim.health.score) == (1, 1)
    while len(swim._gossip):
        swim._gossip.take(10_000, 2)
    hear(swim, 0.2, accused("a"))
    assert (swim.own.incarnation, swim.health.score) == (1, 1)
    assert [one.incarnation for one in swim._gossip.take(10_000, 2)] == [1]


def test_a_joiner_is_probed_at_a_random_place_of_the_round():
    """Not always first, nor last."""
    places = set()
    for seed in range(60):
        swim = member_of("b", "c", "d", seed=seed)
        hear(swim, 0.1, GossipUpdate(ALIVE, "z", 0, "z"))
        places.add(swim._order.index("z"))
    assert places == {0, 1, 2, 3}


def test_members_that_come_and_go_leave_nothing_behind():
    """Neither timers nor gossip nor places in the order grow with the number of changes."""
    swim = member_of("b", "c", "d", "e", max_members=10)
    before = len(swim._timers)
    for number in range(2000):
        name = f"x{number}"
        hear(
            swim,
            0.1,
            GossipUpdate(ALIVE, name, 0, name),
            accused(name),
            GossipUpdate(CONFIRMED, name, 0, by="c"),
            GossipUpdate(ALIVE, "b", 2 * number + 1, "b"),
            accused("b", "c", 2 * number + 1),
        )
    assert len(swim.members) <= 9
    assert len(swim._timers) <= before + 1
    assert len(swim._gossip) <= 10
    assert len(swim._order) == len(set(swim._order)) <= 10
    assert set(swim._suspects) == {"b"}
