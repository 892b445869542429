"""Messages between the members of a group, and directives of the state machine to its driver.

`members/wire.py` encodes messages as bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from seawall.models.detection.gossip import MOST_METADATA, GossipUpdate, MemberState


class MessageKind(StrEnum):
    """Kinds of messages."""

    PING = "ping"
    ACK = "ack"
    PING_REQUEST = "ping-request"
    NACK = "nack"  # A helper has not heard from the target yet, but is alive itself
    GOSSIP = "gossip"
    PUSH = "push"  # the whole view of the sender. It is answered with a pull
    PULL = "pull"


class Message(NamedTuple):
    """One message between two members; every kind carries updates."""

    kind: MessageKind
    source: str  # name of the sending member
    updates: tuple[GossipUpdate, ...] = ()
    number: int = 0  # number of the probe, as counted by the member that started it
    target: str = ""  # name of the member to probe. An answer to another member proves nothing
    address: str = ""  # address at which a helper reaches the member to probe


class Send(NamedTuple):
    """Send `message` to an address; `reliable` means over a connection instead of a datagram."""

    address: str
    message: Message
    reliable: bool = False


class MembershipChange(NamedTuple):
    """A member's state has changed."""

    name: str
    before: MemberState | None  # None for a member that was not known before
    after: MemberState
    reason: str
    by: str  # the member that reported the change
    at: float
    duration: float  # duration of the previous state in seconds


class RoundTrip(NamedTuple):
    """A member answered a direct probe after this time."""

    name: str
    seconds: float


class Pause(NamedTuple):
    """The process itself was stopped for this time."""

    seconds: float


class MissedDatagram(NamedTuple):
    """A member answered over a connection, but not by datagram. If frequent, suspect a firewall."""

    name: str


Directive = Send | MembershipChange | RoundTrip | Pause | MissedDatagram


def check_text(what: str, value: str, most: int) -> str:
    """Return a name or an address that other members accept, or raise."""
    if not value or not value.isprintable() or len(value.encode()) > most:
        raise ValueError(
            f"{what}={value!r}: write 1 to {most} bytes of printable text; others refuse the rest"
        )
    return value


def check_metadata(metadata: bytes) -> bytes:
    """Return `metadata` if it is valid, or raise."""
    if not isinstance(metadata, bytes):
        raise TypeError(f"metadata={metadata!r}: write bytes, such as b'zone=a'")
    if len(metadata) > MOST_METADATA:
        raise ValueError(
            f"metadata of {len(metadata)} bytes: write at most {MOST_METADATA}; every member keeps"
            " it of every other"
        )
    return metadata
