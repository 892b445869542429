"""Wire format of FIFO messages: numbered messages and acknowledgements."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.durable.database.transaction_block import named

LARGEST: Final = 1024 * 1024
"""Default maximum bytes of a payload."""


class FifoMessage(NamedTuple):
    """A numbered message: a transport carries it, and `receive(connection, *message)` takes it."""

    sender: str
    sequence: int
    payload: bytes
    epoch: int


class FifoAck(NamedTuple):
    """A receiver's position: all below `expected` took effect; up to `allowed` there is room."""

    sender: str
    receiver: str
    epoch: int
    expected: int
    allowed: int


class Gap(NamedTuple):
    """A missing message, while later ones have arrived."""

    sender: str
    epoch: int
    expected: int
    next: int
    buffered: int
    age: float


class Skipped(NamedTuple):
    """Skipped messages, from `first` to `last`."""

    sender: str
    epoch: int
    first: int
    last: int


def checked_payload(payload: Any, largest: int) -> bytes:
    """Return a payload as bytes, or raise: it is untrusted input."""
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
    """Return a message received over the wire, or raise."""
    return FifoMessage(
        named("sender", sender),
        check.count("sequence", sequence),
        checked_payload(payload, largest),
        check.count("epoch", epoch, minimum=0),
    )


def checked_ack(ack: Any) -> FifoAck:
    """Return an acknowledgement received over the wire, or raise."""
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
