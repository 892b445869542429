"""What goes between a sender and a receiver: numbered messages, and how far they have come."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.durable._blocks import named
from seawall.errors import Rejected, SeawallError
from seawall.runtime.events import Event

LARGEST: Final = 1024 * 1024
"""Bytes of a payload, unless more are allowed."""


class FifoFull(Rejected):
    """As many messages as may are not acknowledged; nothing was sent."""

    reason = "fifo_full"


class FifoStateLost(SeawallError):
    """The receiver has more of this sender than the sender knows of: `restart` the sender."""

    reason = "fifo_state_lost"


class FifoGap(Event):
    """A message is missing for too long; `guard` is the receiver's name."""

    __slots__ = ("age", "epoch", "expected", "sender", "skipped_to")
    name = "fifo_gap"

    def __init__(
        self,
        guard: str,
        *,
        sender: str,
        epoch: int,
        expected: int,
        age: float,
        skipped_to: int | None,
    ) -> None:
        """Tell which is missing, for how long, and where it goes on; None while it waits."""
        super().__init__(guard)
        self.sender = sender
        self.epoch = epoch
        self.expected = expected
        self.age = age
        self.skipped_to = skipped_to


class FifoMessage(NamedTuple):
    """A numbered message: what a transport carries, and `receive(connection, *message)` takes."""

    sender: str
    sequence: int
    payload: bytes
    epoch: int


class FifoAck(NamedTuple):
    """How far a receiver is: all below `expected` took effect; up to `allowed` there is room."""

    sender: str
    receiver: str
    epoch: int
    expected: int
    allowed: int


class Gap(NamedTuple):
    """A message that is missing while later ones are there."""

    sender: str
    epoch: int
    expected: int
    next: int
    buffered: int
    age: float


class Skipped(NamedTuple):
    """Messages that were given up, from `first` to `last`."""

    sender: str
    epoch: int
    first: int
    last: int


def checked_payload(payload: Any, largest: int) -> bytes:
    """Return a payload as bytes, or raise: it may come from anybody."""
    if isinstance(payload, str):
        payload = payload.encode()
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError(f"payload: pass bytes or text, not {type(payload).__name__}")
    if memoryview(payload).nbytes > largest:
        raise ValueError(f"payload: at most {largest} bytes; send what is larger by reference")
    return bytes(payload)


def checked_message(
    sender: Any, sequence: Any, payload: Any, epoch: Any, largest: int
) -> FifoMessage:
    """Return a message that came by the wire, or raise."""
    return FifoMessage(
        named("sender", sender),
        check.count("sequence", sequence),
        checked_payload(payload, largest),
        check.count("epoch", epoch, minimum=0),
    )


def checked_ack(ack: Any) -> FifoAck:
    """Return an acknowledgement that came by the wire, or raise."""
    if not isinstance(ack, (tuple, list)) or len(ack) != len(FifoAck._fields):
        raise TypeError(f"acknowledgement: pass a FifoAck, or its {len(FifoAck._fields)} values")
    sender, receiver, epoch, expected, allowed = ack
    return FifoAck(
        named("sender", sender),
        named("receiver", receiver),
        check.count("epoch", epoch, minimum=0),
        check.count("expected", expected),
        check.count("allowed", allowed, minimum=0),
    )
