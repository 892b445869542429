"""Messages as bytes: exact in size, refused unless authentic, new and within bounds."""

from __future__ import annotations

import os
import struct
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clock import VirtualClock
from seawall.members.keyring import GroupKey, Keyring
from seawall.members.wire import (
    MOST_BYTES,
    MOST_SESSIONS,
    MOST_UPDATES,
    REASONS,
    REORDERED,
    SKEW,
    Codec,
    MessageRefused,
)
from seawall.models.detection.gossip import (
    ENVELOPE,
    MOST_ADDRESS,
    MOST_METADATA,
    MOST_NAME,
    GossipUpdate,
    MemberState,
)
from seawall.models.detection.messages import Message, MessageKind

KEY = b"a key of the tests, 32 bytes...."
START = 1_790_000_000.0
PING = Message(MessageKind.PING, "a", number=7, target="b")


class Party:
    """A codec with a clock of its own."""

    def __init__(self, *keys, encrypt=False, group="g", at=START):
        self.clock = VirtualClock(at)
        ring = Keyring(*keys, encrypt=encrypt) if keys else None
        self.codec = Codec(ring, group=group, clock=self.clock)
        self.encode = self.codec.encode
        self.decode = self.codec.decode

    def refusal(self, data):
        """Return why `data` is refused."""
        before = sum(self.codec.refused.values())
        with pytest.raises(MessageRefused) as raised:
            self.decode(data)
        assert sum(self.codec.refused.values()) == before + 1
        assert self.codec.refused[raised.value.reason] >= 1
        return raised.value.reason


def names(most):
    """Return texts of up to `most` bytes that a member may write."""
    return st.text("ab-7.:[] é漢𝄞", min_size=1, max_size=most // 4)


NAMES = names(MOST_NAME) | st.just("n" * MOST_NAME)
ADDRESSES = names(MOST_ADDRESS) | st.just("h" * MOST_ADDRESS)
INCARNATIONS = st.integers(0, int(START * 1000))
ALIVE = st.builds(
    GossipUpdate,
    st.just(MemberState.ALIVE),
    NAMES,
    INCARNATIONS,
    ADDRESSES,
    st.binary(max_size=MOST_METADATA),
    st.just(""),
)
ACCUSED = st.builds(
    GossipUpdate,
    st.sampled_from([MemberState.SUSPECTED, MemberState.CONFIRMED, MemberState.LEFT]),
    NAMES,
    INCARNATIONS,
    st.just(""),
    st.just(b""),
    NAMES,
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(MessageKind),
    NAMES,
    st.lists(ALIVE | ACCUSED, max_size=5).map(tuple),
    st.integers(0, 2**53 - 1),
    st.just("") | NAMES,
    st.just("") | ADDRESSES,
)
KINDS = [(), (KEY,), (KEY, "encrypt")]


def pair(kind):
    """Return a sender and a receiver: without a key, signed, or encrypted."""
    return [Party(*kind[:1], encrypt=len(kind) > 1) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "signed", "encrypted"])
@given(message=MESSAGES)
def test_a_message_arrives_as_it_was(kind, message):
    """Every field, of every kind; and its size is what the state machine counts on."""
    sender, receiver = pair(kind)
    data = sender.encode(message)
    assert receiver.decode(data) == message
    fields = (message.source, message.target, message.address)
    size = sum(len(text.encode()) for text in fields) + sum(one.size for one in message.updates)
    assert len(data) == ENVELOPE + size


@pytest.mark.parametrize("kind", KINDS[1:], ids=["signed", "encrypted"])
def test_what_the_wrong_key_signed_is_refused(kind):
    """Messages with a wrong signature, or none, are refused."""
    _sender, receiver = pair(kind)
    stranger = Party(b"another key of at least 16", encrypt=len(kind) > 1)
    assert receiver.refusal(stranger.encode(PING)) == "key"
    assert receiver.refusal(Party().encode(PING)) == "key"


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "signed", "encrypted"])
def test_groups_with_the_same_key_do_not_mix(kind):
    """The name of the group is part of every signature."""
    sender, receiver = (
        Party(*kind[:1], encrypt=len(kind) > 1, group=group) for group in ("blue", "green")
    )
    assert receiver.refusal(sender.encode(PING)) == "key"


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "signed", "encrypted"])
def test_truncated_and_changed_messages_are_refused(kind):
    """At every byte, and with every bit turned; what is refused does not use up the message."""
    sender, receiver = pair(kind)
    data = sender.encode(
        PING._replace(updates=(GossipUpdate(MemberState.ALIVE, "c", 1, "h:1", b"m"),))
    )
    for end in range(len(data)):
        assert receiver.refusal(data[:end]) in ("size", "key")
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        assert receiver.refusal(bytes(changed)) in ("key", "version")
    assert receiver.refusal(data + b"x") == "key"
    assert receiver.decode(data).source == "a"


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "signed", "encrypted"])
def test_random_bytes_are_refused(kind):
    """Of any length, and with a valid first byte too."""
    _sender, receiver = pair(kind)
    random = Random(7)
    for _ in range(3000):
        data = random.randbytes(random.randrange(1500))
        assert receiver.refusal(data) in ("size", "version", "key")
        assert receiver.refusal(b"\1" + data) in ("size", "key")
        assert receiver.refusal(b"\2" + data) in ("size", "key")
    assert set(receiver.codec.refused) == set(REASONS)


@pytest.mark.parametrize("length", [MOST_BYTES, MOST_BYTES + 1])
def test_the_largest_frame_is_refused_without_a_key(length):
    """At most it is read once for its signature."""
    receiver = Party(KEY)
    assert receiver.refusal(b"\1" * length) == ("key" if length == MOST_BYTES else "size")


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "signed", "encrypted"])
def test_a_message_is_taken_once(kind):
    """However often and late it arrives again, and in whatever order."""
    sender, receiver = pair(kind)
    sent = [sender.encode(PING._replace(number=number)) for number in range(50)]
    Random(3).shuffle(sent)
    for data in sent:
        receiver.decode(data)
    receiver.clock.advance(3 * SKEW)
    assert {receiver.refusal(data) for data in sent} == {"replay"}


@cache
def session():
    """Return the messages of one sender."""
    sender = Party(KEY)
    return [sender.encode(PING) for _ in range(3 * REORDERED + 1)]


@given(st.lists(st.integers(0, 3 * REORDERED), max_size=60))
def test_each_number_of_a_session_is_taken_at_most_once(order):
    """As a set of all numbers would decide, unless they are too late."""
    receiver = Party(KEY)
    sent = session()
    seen: set[int] = set()
    for number in order:
        late = bool(seen) and number <= max(seen) - REORDERED
        if number in seen or late:
            assert receiver.refusal(sent[number]) == "replay"
        else:
            receiver.decode(sent[number])
            seen.add(number)


@pytest.mark.parametrize("skew", [-SKEW + 1, 0.0, SKEW - 1])
def test_clocks_may_differ(skew):
    """By up to a minute."""
    assert Party(KEY).decode(Party(KEY, at=START + skew).encode(PING)) == PING


@pytest.mark.parametrize("skew", [-SKEW - 1, SKEW + 1])
def test_a_new_sender_of_another_time_is_refused(skew):
    """It may be a recording of a sender that this process has not heard."""
    receiver = Party(KEY)
    assert receiver.refusal(Party(KEY, at=START + skew).encode(PING)) == "stale"


def test_a_clock_that_is_set_cuts_nobody_off():
    """Those that have heard a member before go by its numbers."""
    sender, receiver = Party(KEY), Party(KEY)
    receiver.decode(sender.encode(PING))
    sender.clock.advance(86_400)
    assert receiver.decode(sender.encode(PING)) == PING
    receiver.clock.advance(7 * 86_400)
    assert receiver.decode(sender.encode(PING)) == PING


def test_senders_are_bounded():
    """Of more than that many, those that were not heard for long give way; others are refused."""
    receiver = Party(KEY)
    heard = [Party(KEY).encode(PING) for _ in range(MOST_SESSIONS)]
    for data in heard:
        receiver.decode(data)
    assert receiver.refusal(Party(KEY).encode(PING)) == "sessions"
    receiver.clock.advance(SKEW + 1)
    later = Party(KEY, at=START + SKEW + 1)
    assert receiver.decode(later.encode(PING)) == PING
    assert {receiver.refusal(data) for data in heard[:50]} == {"stale"}, "forgotten, not new"


def test_a_forked_child_begins_a_session_of_its_own(monkeypatch):
    """Two messages never have the same nonce."""
    sender = Party(KEY, encrypt=True)
    before = sender.encode(PING)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    after = sender.encode(PING)
    assert before[1:9] != after[1:9]
    assert after[9:13] == (1).to_bytes(4)


def test_numbers_of_a_session_are_never_used_twice(monkeypatch):
    """After the last one a new session begins."""
    sender = Party(KEY)
    first = sender.encode(PING)
    monkeypatch.setattr(sender.codec, "_counter", 2**32 - 2)
    last, following = sender.encode(PING), sender.encode(PING)
    assert last[1:9] == first[1:9]
    assert last[9:13] == b"\xff" * 4
    assert following[1:9] != first[1:9]


def forged(
    *,
    kind=0,
    number=0,
    updates=0,
    texts=(b"a", b"", b""),
    rest=b"",
):
    """Return an authentic message with fields that no member writes."""
    body = struct.pack("!QBQH", int(START * 1000), kind, number, updates)
    body += b"".join(bytes((len(text),)) + text for text in texts) + rest
    signed = b"\1" + os.urandom(8) + struct.pack("!I", 1) + body
    return signed + GroupKey(KEY, "g").sign(signed)


def update(state=0, incarnation=1, name=b"c", address=b"h:1", by=b"", metadata=b"", length=None):
    """Return an update as bytes."""
    fields = b"".join(bytes((len(text),)) + text for text in (name, address, by))
    length = len(metadata) if length is None else length
    return struct.pack("!BQ", state, incarnation) + fields + struct.pack("!H", length) + metadata


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 2**53},
        {"updates": 1},
        {"updates": MOST_UPDATES + 1, "rest": update() * (MOST_UPDATES + 1)},
        {"rest": b"x"},
        {"texts": (b"", b"", b"")},
        {"texts": (b"x" * (MOST_NAME + 1), b"", b"")},
        {"texts": (b"\xff", b"", b"")},
        {"texts": (b"a\nb", b"", b"")},
        {"texts": ("a\u202eb".encode(), b"", b"")},
        {"texts": (b"\xed\xa0\x80", b"", b"")},
        {"texts": (b"a", b"x" * (MOST_NAME + 1), b"")},
        {"texts": (b"a", b"", b"\x1b[2J")},
        {"texts": (b"abcd",)},
        {"updates": 1, "rest": update(state=4)},
        {"updates": 1, "rest": update(name=b"")},
        {"updates": 1, "rest": update(name=b"\0")},
        {"updates": 1, "rest": update(address=b"")},
        {"updates": 1, "rest": update(by=b"a")},
        {"updates": 1, "rest": update(state=1, by=b"a")},
        {"updates": 1, "rest": update(state=1, address=b"", by=b"")},
        {"updates": 1, "rest": update(state=3, address=b"", by=b"a", metadata=b"m")},
        {"updates": 1, "rest": update(metadata=b"m" * (MOST_METADATA + 1))},
        {"updates": 1, "rest": update(length=3)},
    ],
)
def test_fields_beyond_their_bounds_are_refused(fields):
    """Also if the signature is right: it may be a defect, or another version."""
    assert Party(KEY).refusal(forged(**fields)) == "malformed"


def test_kinds_of_later_versions_are_refused_apart():
    """So that a rolling upgrade does not look like an attack."""
    receiver = Party(KEY)
    assert receiver.decode(forged(kind=len(MessageKind) - 1)).source == "a"
    assert receiver.refusal(forged(kind=len(MessageKind), rest=b"anything")) == "unknown"
    assert receiver.refusal(b"\3" + forged()[1:]) == "version"


@pytest.mark.parametrize("incarnation", [2**64 - 1, 2**53, int((START + SKEW) * 1000) + 1])
def test_an_incarnation_ahead_of_the_clock_is_left_out(incarnation):
    """It could not be refuted, so it is ignored; the rest of the message counts."""
    receiver = Party(KEY)
    rest = update(incarnation=incarnation, name=b"c") + update(name=b"d")
    message = receiver.decode(forged(updates=2, rest=rest))
    assert [one.name for one in message.updates] == ["d"]
    assert receiver.codec.refused["incarnation"] == 1


def test_without_the_extra_encrypted_messages_are_refused_as_such(monkeypatch):
    """And asking for encryption says what to install."""
    data = Party(KEY, encrypt=True).encode(PING)
    monkeypatch.setattr("seawall.members.keyring._aes_gcm", lambda: None)
    assert Party(KEY).refusal(data) == "encryption"
    with pytest.raises(ImportError, match=r"seawall\[cryptography\]"):
        Keyring(KEY, encrypt=True)


def test_encrypted_messages_show_nothing():
    """Neither names nor metadata; a signed one shows both."""
    message = Message(
        MessageKind.GOSSIP, "orders-7", (GossipUpdate(MemberState.ALIVE, "c", 1, "h:1", b"zone-a"),)
    )
    signed, encrypted = (Party(KEY, encrypt=on).encode(message) for on in (False, True))
    assert b"orders-7" in signed
    assert b"orders-7" not in encrypted
    assert b"zone-a" not in encrypted
