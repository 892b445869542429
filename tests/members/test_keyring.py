"""Keys of a cluster: checked, replaced without downtime, never shown."""

from __future__ import annotations

import secrets

import pytest

from seawall.members.keyring import MOST_KEYS, Keyring, check_exposure
from seawall.members.wire import Codec, MessageRefused
from seawall.models.detection.messages import Message, MessageKind

OLD, NEW = secrets.token_bytes(), secrets.token_bytes()
PING = Message(MessageKind.PING, "a", number=7, target="b")


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ((), ValueError, "at least one key"),
        ((b"x" * 15,), ValueError, "at least 16"),
        (("x" * 15,), ValueError, "at least 16"),
        ((OLD, b""), ValueError, "at least 16"),
        ((7,), TypeError, "bytes or text"),
        ([secrets.token_bytes() for _ in range(MOST_KEYS + 1)], ValueError, f"at most {MOST_KEYS}"),
    ],
)
def test_what_is_no_key_is_refused(keys, error, said):
    """And the message says what to pass."""
    with pytest.raises(error, match=said):
        Keyring(*keys)


def test_no_key_is_shown():
    """Neither by `repr` nor by the errors about a key."""
    key = "a-very-secret-key"
    ring = Keyring(key, NEW)
    assert repr(ring) == "<Keyring of 2>"
    assert repr(Keyring(key, encrypt=True)) == "<Keyring of 1, encrypts>"
    for act, wrong in ((ring.use, "another-secret-key"), (ring.remove, key), (Keyring, "short-1")):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - what it does not say is tested
            act(wrong)
        assert wrong not in str(raised.value)


def test_text_and_bytes_are_the_same_key():
    """A key from the environment is text."""
    ring = Keyring("0123456789abcdef")
    ring.add(b"0123456789abcdef")
    assert len(ring) == 1


@pytest.mark.parametrize("encrypt", [False, True])
def test_replacing_a_key_interrupts_nobody(encrypt):
    """Members do each step one after another, and at every moment all understand all."""
    rings = [Keyring(OLD, encrypt=encrypt) for _ in range(3)]
    codecs = [Codec(ring, group="g") for ring in rings]
    steps = [lambda ring: ring.add(NEW), lambda ring: ring.use(NEW), lambda ring: ring.remove(OLD)]
    for step in steps:
        for ring in rings:
            step(ring)
            for sender in codecs:
                data = sender.encode(PING)
                assert all(one.decode(data) == PING for one in codecs if one is not sender)
    with pytest.raises(MessageRefused, match="key"):
        codecs[0].decode(Codec(Keyring(OLD), group="g").encode(PING))


def test_switching_encryption_on_interrupts_nobody():
    """Signed and encrypted messages are understood by members with either setting."""
    signed, encrypted = (Codec(Keyring(OLD, encrypt=on), group="g") for on in (False, True))
    assert signed.decode(encrypted.encode(PING)) == PING
    assert encrypted.decode(signed.encode(PING)) == PING


def test_a_key_that_is_not_there_says_what_is_wrong_with_each_step():
    """`use` needs it to be added first; `remove` does not."""
    ring = Keyring(OLD, NEW)
    ring.remove(NEW)
    with pytest.raises(
        ValueError, match="not in the Keyring: it was removed before, or is another"
    ):
        ring.remove(NEW)
    with pytest.raises(ValueError, match=r"not in the Keyring: add\(\) it on every member first"):
        ring.use(NEW)


def test_the_key_that_signs_cannot_be_removed():
    """Another one has to be used first."""
    ring = Keyring(OLD, NEW)
    with pytest.raises(ValueError, match=r"use\(\) another"):
        ring.remove(OLD)
    with pytest.raises(ValueError, match=r"add\(\) it"):
        ring.use(secrets.token_bytes())


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"]
)
def test_a_loopback_address_needs_no_key(host):
    """Only this machine reaches it."""
    check_exposure(host, None)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.0", "", "::", "10.0.0.7", "example.com", "localhost.example.com", "::ffff:1.2.3.4"],
)
def test_an_address_that_others_reach_needs_a_key(host):
    """A name may lead anywhere, so it needs one too."""
    with pytest.raises(ValueError, match="Keyring"):
        check_exposure(host, None)
    check_exposure(host, Keyring(OLD))
