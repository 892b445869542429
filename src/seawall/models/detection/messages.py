"""What members of a group say to each other, and what the state machine asks its shell to do.

`members/wire.py` writes messages as bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from seawall.models.detection.gossip import MOST_METADATA, MemberState, Update


class MessageKind(StrEnum):
    """The kinds of messages."""

    PING = "ping"
    ACK = "ack"
    PING_REQUEST = "ping-request"
    NACK = "nack"
    """A helper has heard nothing yet, but is there itself."""
    GOSSIP = "gossip"
    PUSH = "push"
    """The whole view of the sender; it is answered with a pull."""
    PULL = "pull"


class Message(NamedTuple):
    """One message between two members; every kind carries updates."""

    kind: MessageKind
    source: str
    """The name of the member that sends it."""
    updates: tuple[Update, ...] = ()
    number: int = 0
    """Which probe it belongs to, as the member counts that asked."""
    target: str = ""
    """The member to probe, by name; an answer to another one proves nothing."""
    address: str = ""
    """Where a helper reaches the member to probe."""


class Send(NamedTuple):
    """Send `message` to an address; `reliable` means by a connection and not by a datagram."""

    address: str
    message: Message
    reliable: bool = False


class Change(NamedTuple):
    """A member has another state than before."""

    name: str
    before: MemberState | None
    """None for a member that was not known."""
    after: MemberState
    reason: str
    by: str
    """The member by whose account it changed."""
    at: float
    duration: float
    """Seconds that the state before has lasted."""


class RoundTrip(NamedTuple):
    """A member answered a direct probe after this time."""

    name: str
    seconds: float


class Pause(NamedTuple):
    """The process itself was stopped for this time."""

    seconds: float


class MissedDatagram(NamedTuple):
    """A member answered by connection, but to no datagram: a firewall, if it happens often."""

    name: str


Directive = Send | Change | RoundTrip | Pause | MissedDatagram


def check_text(what: str, value: str, most: int) -> str:
    """Return a name or an address that others accept, or raise."""
    if not value or not value.isprintable() or len(value.encode()) > most:
        raise ValueError(
            f"{what}={value!r}: write 1 to {most} bytes of printable text; others refuse the rest"
        )
    return value


def check_metadata(metadata: bytes) -> bytes:
    """Return `metadata` if a member may have it, or raise."""
    if not isinstance(metadata, bytes):
        raise TypeError(f"metadata={metadata!r}: write bytes, such as b'zone=a'")
    if len(metadata) > MOST_METADATA:
        raise ValueError(
            f"metadata of {len(metadata)} bytes: write at most {MOST_METADATA}; every member keeps"
            " it of every other"
        )
    return metadata
