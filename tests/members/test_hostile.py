"""Whatever arrives changes nothing, or is bounded: the codec together with the state machine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clock import VirtualClock
from seawall.members.keyring import Keyring
from seawall.members.wire import SKEW, Codec, MessageRefused
from seawall.models.detection.gossip import MOST_METADATA, MOST_NAME, GossipUpdate, MemberState
from seawall.models.detection.messages import (
    MembershipChange,
    Message,
    MessageKind,
    Send,
)
from seawall.models.detection.settings import SwimSettings
from seawall.models.detection.swim import Swim
from tests.members.test_wire import KEY, MESSAGES, START

ALIVE, SUSPECTED = MemberState.ALIVE, MemberState.SUSPECTED
CONFIRMED, LEFT = MemberState.CONFIRMED, MemberState.LEFT


class Node:
    """A member with its codec, as the shell joins them."""

    def __init__(self, name="a", *, settings=None, clock=None, key=KEY, **options):
        """Be alone, at an address that is the name."""
        self.clock = clock or VirtualClock(START)
        ring = Keyring(key, encrypt=options.pop("encrypt", False))
        self.codec = Codec(ring, group="g", clock=self.clock)
        self.peer = Codec(Keyring(KEY), group="g", clock=self.clock)
        self.swim = Swim(
            name, name, settings=settings, rng=Random(1).random, now=self.clock.now(), **options
        )

    def take(self, data, source="x", *, reliable=False):
        """Receive bytes, and return what to do."""
        message = self.codec.decode(data)
        return self.swim.receive(message, source, self.clock.now(), reliable=reliable)

    def hear(self, message, *, reliable=False):
        """Receive a message signed with the right key."""
        return self.take(self.peer.encode(message), message.source, reliable=reliable)

    def view(self):
        """Return all that is known, of the others and of this member."""
        return [replace(one) for one in (self.swim.own, *self.swim.members.values())]

    def states(self):
        """Return how the others are."""
        return {one.name: one.state for one in self.swim.members.values()}


class Wires:
    """Members that send each other bytes, without loss and at once."""

    def __init__(self, *names, **options):
        """Let everybody know the first."""
        self.clock = VirtualClock(START)
        self.nodes = {name: Node(name, clock=self.clock, **options) for name in names}
        for node in list(self.nodes.values())[1:]:
            self.follow(node, node.swim.join(names[:1], self.clock.now()))
        self.run(5)

    def run(self, seconds, step=0.05):
        """Let time pass."""
        for _ in range(int(seconds / step)):
            self.clock.advance(step)
            for node in self.nodes.values():
                if node.swim.wake_at <= self.clock.now():
                    self.follow(node, node.swim.advance(self.clock.now()))

    def follow(self, node, directives):
        """Deliver what a member sends, and what that leads to."""
        for one in directives:
            if isinstance(one, Send) and one.address in self.nodes:
                there = self.nodes[one.address]
                data = node.codec.encode(one.message)
                self.follow(there, there.take(data, node.swim.own.name, reliable=one.reliable))

    def inject(self, name, *updates):
        """Let a member receive a message signed with the right key."""
        node = self.nodes[name]
        self.follow(node, node.hear(Message(MessageKind.GOSSIP, "evil", updates)))

    def agree(self):
        """Tell whether all take all for alive."""
        everybody = dict.fromkeys(self.nodes, ALIVE)
        return all(
            {**node.states(), node.swim.own.name: node.swim.own.state} == everybody
            for node in self.nodes.values()
        )


def test_what_strangers_send_changes_nothing():
    """Random bytes, other keys, recordings and forged members, however many: all are counted."""
    node = Node()
    known = GossipUpdate(ALIVE, "b", 1, "b")
    peer = Codec(Keyring(KEY), group="g", clock=node.clock)
    recorded = peer.encode(Message(MessageKind.PUSH, "b", (known,)))
    node.take(recorded, "b", reliable=True)
    before = node.view()
    random = Random(5)
    stranger = Codec(Keyring(b"a key that nobody else has"), group="g", clock=node.clock)
    elsewhere = Codec(Keyring(KEY), group="other", clock=node.clock)
    forged = tuple(GossipUpdate(ALIVE, f"forged-{number}", 1, "h:1") for number in range(10_000))
    sent = [
        recorded,
        stranger.encode(Message(MessageKind.PUSH, "b", forged)),
        elsewhere.encode(Message(MessageKind.PUSH, "b", forged)),
        random.randbytes(20 * 2**20),
        b"\1" + random.randbytes(20 * 2**20 - 1),
        b"\2" + random.randbytes(20 * 2**20 - 1),
        b"\1" + random.randbytes(20 * 2**20),
        *(recorded[:end] for end in range(len(recorded))),
        *(random.randbytes(random.randrange(200)) for _ in range(500)),
        *(stranger.encode(Message(MessageKind.GOSSIP, "b", (one,))) for one in forged),
    ]
    for data in sent:
        with pytest.raises(MessageRefused):
            node.take(data, "b", reliable=True)
    assert node.view() == before
    assert sum(node.codec.refused.values()) == len(sent)
    assert node.codec.refused["replay"] == 1
    assert node.codec.refused["key"] > len(forged)


def test_forged_members_are_bounded_even_with_the_key():
    """The view, the gossip, the order of probes and the answers grow no further than the view."""
    settings = SwimSettings(max_members=50)
    node = Node(settings=settings)
    for start in range(0, 10_000, 1000):
        node.hear(
            Message(
                MessageKind.PUSH,
                "evil",
                tuple(GossipUpdate(ALIVE, f"f{start + one}", 1, "h:1") for one in range(1000)),
            ),
            reliable=True,
        )
    assert len(node.swim.members) == 49
    assert node.swim.refused == 10_000 - 49
    for number in range(2000):  # members that come and go take no more room either
        name = f"g{number}"
        node.hear(
            Message(MessageKind.GOSSIP, "evil", (GossipUpdate(LEFT, f"f{number}", 1, by="x"),))
        )
        node.hear(
            Message(
                MessageKind.GOSSIP,
                "evil",
                (GossipUpdate(ALIVE, name, 1, "h:1"), GossipUpdate(LEFT, name, 1, by=name)),
            )
        )
        node.hear(Message(MessageKind.GOSSIP, "evil", (GossipUpdate(ALIVE, name, number, "h:1"),)))
    assert len(node.swim.members) <= 49
    assert len(node.swim._gossip) <= 50
    assert len(node.swim._order) <= 50


def test_a_flood_of_probe_requests_is_not_amplified():
    """Each leads to one datagram at most, and as many are remembered as there may be members."""
    settings = SwimSettings(max_members=50)
    node = Node(settings=settings)
    answers = [
        one
        for number in range(5000)
        for one in node.hear(
            Message(MessageKind.PING_REQUEST, "evil", (), number, "victim", "192.0.2.1:80")
        )
    ]
    assert len(answers) <= 50
    assert all(len(node.codec.encode(one.message)) <= settings.packet for one in answers)
    node.clock.advance(2.0)
    nacks = node.swim.advance(node.clock.now())
    assert len([one for one in nacks if isinstance(one, Send)]) <= 50 + 10
    node.clock.advance(2.0)
    node.swim.advance(node.clock.now())
    assert not node.swim._relays
    assert len(node.swim._timers) < 10


def test_a_datagram_cannot_ask_for_the_whole_view():
    """Its sender could be made up, and the answer is many times larger."""
    node = Node()
    push = Message(MessageKind.PUSH, "b")
    assert node.hear(push) == []
    assert [one.message.kind for one in node.hear(push, reliable=True)] == [MessageKind.PULL]


@pytest.mark.parametrize("state", [SUSPECTED, CONFIRMED, LEFT])
def test_what_others_say_of_this_member_is_refuted(state):
    """It stays alive to itself, and contradicts."""
    node = Node()
    node.hear(Message(MessageKind.GOSSIP, "evil", (GossipUpdate(state, "a", 7, by="evil"),)))
    assert node.swim.own.state is ALIVE
    assert node.swim.own.incarnation == 8


def test_a_forged_address_is_taken_back():
    """The member itself contradicts, and all reach it again."""
    wires = Wires("a", "b", "c")
    assert wires.agree()
    wires.inject("a", GossipUpdate(ALIVE, "b", 50, "192.0.2.1:80", b"forged"))
    assert wires.nodes["a"].swim.members["b"].address == "192.0.2.1:80"
    wires.run(90)
    assert wires.agree()
    assert [wires.nodes[name].swim.members["b"].address for name in "ac"] == ["b", "b"]


@pytest.mark.parametrize("state", [ALIVE, SUSPECTED, CONFIRMED, LEFT])
def test_no_incarnation_silences_a_member_for_ever(state):
    """The highest that is accepted is refuted once the clock has passed it."""
    wires = Wires("a", "b", "c")
    highest = int((wires.clock.now() + SKEW) * 1000)
    told = GossipUpdate(state, "b", highest, *(["evil:1"] if state is ALIVE else ["", b"", "evil"]))
    for name in "abc":
        wires.inject(name, told, told._replace(incarnation=highest + 1))
        assert wires.nodes[name].codec.refused["incarnation"] == 1
    wires.run(SKEW + 90)
    assert wires.agree()
    assert wires.nodes["a"].swim.members["b"].address == "b"


def test_an_answer_to_another_member_proves_nothing():
    """A recorded answer of a dead member would keep it alive, if all counted their probes alike."""
    clock = VirtualClock(START)
    asked = []
    for seed in range(2):
        swim = Swim("a", "a", rng=Random(seed).random, now=clock.now())
        swim.receive(
            Message(MessageKind.GOSSIP, "c", (GossipUpdate(ALIVE, "c", 0, "c"),)), "c", START
        )
        asked += [
            one.message.number
            for step in range(20)
            for one in swim.advance(START + step / 10)
            if isinstance(one, Send) and one.message.kind == MessageKind.PING
        ][:1]
    assert abs(asked[0] - asked[1]) > 1000


def test_a_lost_refutation_is_repeated():
    """An accusation that continues shows that its sender missed the refutation."""
    node = Node()
    for number in range(40):  # all places to which it could be passed on have been used up
        node.hear(Message(MessageKind.PING, "b", (), number, "a"))
    old = GossipUpdate(SUSPECTED, "a", 0, by="b")
    node.hear(Message(MessageKind.GOSSIP, "b", (old,)))
    first = node.swim.own.incarnation
    for number in range(40):
        node.hear(Message(MessageKind.PING, "b", (), number, "a"))
    (answer,) = node.hear(Message(MessageKind.PING, "b", (old,), 50, "a"))
    assert GossipUpdate(ALIVE, "a", first, "a") in answer.message.updates
    assert node.swim.own.incarnation == first, "nothing new was said, so nothing rises"


@given(
    st.lists(st.tuples(MESSAGES, st.booleans(), st.sampled_from([0.0, 0.1, 1.0])), max_size=12),
    st.sampled_from(["a", "n" * MOST_NAME]),
    st.sampled_from([1200, 1400]),
)
def test_every_datagram_fits_into_a_packet(messages, name, packet):
    """Whatever was heard, with the longest names and the largest metadata, and encrypted."""
    settings = SwimSettings(packet=packet, max_members=5)
    node = Node(name, settings=settings, metadata=b"m" * MOST_METADATA, encrypt=True)
    for message, reliable, pause in messages:
        for target in (message, message._replace(target=name)):
            done = node.swim.receive(target, "h:1", node.clock.now(), reliable=reliable)
            node.clock.advance(pause)
            done += node.swim.advance(node.clock.now())
            for one in done:
                if isinstance(one, Send):
                    data = node.codec.encode(one.message)
                    assert one.reliable or len(data) <= packet
                    receiver = Codec(Keyring(KEY), group="g", clock=node.clock)
                    assert receiver.decode(data) == one.message
                else:
                    assert not isinstance(one, MembershipChange) or one.before is not one.after
    assert len(node.swim.members) < 5


def test_the_largest_update_is_gossiped():
    """The longest name, address and metadata fit into the smallest packet."""
    settings = SwimSettings(packet=1200)
    node = Node("n" * MOST_NAME, settings=settings)
    longest = GossipUpdate(ALIVE, "m" * MOST_NAME, 1, "h" * 255, b"m" * MOST_METADATA)
    node.hear(Message(MessageKind.PUSH, "b", (longest,)), reliable=True)
    sent = []
    for _ in range(20):
        node.clock.advance(0.2)
        sent += node.swim.advance(node.clock.now())
    gossip = [one.message for one in sent if isinstance(one, Send) and not one.reliable]
    assert any(longest in message.updates for message in gossip)
