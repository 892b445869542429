"""Wire format of a cluster's messages: bounded, signed with the group's key, protected from replay.

    format (1)  session (8)  counter (4)  body  signature (16)

The body has a time stamp, the fields of the message, and its updates. It is encrypted if the
keyring says so. All received data is untrusted until its signature was checked, and still bounded
afterwards.

Promises:
- A refused message changes nothing, and is counted by its reason.
- A message is accepted at most once. Every sender numbers its messages within its own session; an
  unknown session is accepted only with a time stamp from the last `SKEW` seconds.
- A member accepts nothing from another group, even from one with the same keys.
- Memory for senders is bounded by `MOST_SESSIONS`.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final

from seawall.clock import Clock, current_clock, epoch_of
from seawall.members.keyring import TAG, GroupKey, Keyring
from seawall.models.detection.gossip import (
    ENVELOPE,
    MOST_ADDRESS,
    MOST_METADATA,
    MOST_NAME,
    GossipUpdate,
    MemberState,
)
from seawall.models.detection.messages import Message, MessageKind

MOST_BYTES: Final = 20 * 2**20
"""Maximum size of a message in bytes.

The full view of 10 000 members fits, however long their names.
"""
MOST_UPDATES: Final = 20_000
"""Maximum number of updates in a message: two for each member of the largest group."""
SKEW: Final = 60.0
"""Maximum clock difference in seconds of a new sender, including delays."""
REORDERED: Final = 1024
"""Number of later messages of one sender that may overtake a message."""
MOST_SESSIONS: Final = 4096
"""Maximum number of senders tracked at a time."""
INCARNATIONS: Final = 1000
"""Incarnations per second since 1970.

Refuting never gets this far, so a higher one is forged or damaged. A member that has to refute it
waits until the clock has passed it, not for ever.
"""
REASONS: Final = (
    "size",  # too short or too long for a message
    "version",  # another format, or no message at all
    "key",  # not signed with a key of this ring for this group, or changed on the way
    "encryption",  # encrypted, but this process cannot decrypt
    "stale",  # from a new sender whose time stamp is too far off
    "replay",  # seen before, or too late to be sure that it was not
    "sessions",  # too many senders to track
    "unknown",  # a kind of message that a later version may introduce
    "malformed",  # fields that no member writes
    "incarnation",  # one update was omitted, the rest of its message was accepted
)
"""Reasons for refusals."""
_SIGNED: Final = 1
_ENCRYPTED: Final = 2
_HEAD: Final = struct.Struct("!B8sI")
_FIELDS: Final = struct.Struct("!QBQH")  # time stamp in milliseconds, kind, number, updates
_UPDATE: Final = struct.Struct("!BQ")  # state, incarnation
_LENGTH: Final = struct.Struct("!H")
_KINDS: Final = tuple(MessageKind)
_STATES: Final = (
    MemberState.ALIVE,
    MemberState.SUSPECTED,
    MemberState.CONFIRMED,
    MemberState.LEFT,
)
_MOST_NUMBER: Final = 2**53
_SEEN: Final = (1 << REORDERED) - 1


class MessageRefused(Exception):
    """The received bytes are not accepted as a message, for one of the `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Codec:
    """Encoder and decoder of one member of one group. Not safe for concurrent calls."""

    def __init__(self, keyring: Keyring | None, *, group: str, clock: Clock | None = None) -> None:
        self._keyring = keyring
        self._group = group
        self._clock = clock or current_clock()
        self._keyless = GroupKey(b"", group)
        self._senders = _Senders()
        self._process = 0
        self._session = b""
        self._counter = 0
        self.refused = dict.fromkeys(REASONS, 0)
        """Number of refusals by reason."""

    def encode(self, message: Message) -> bytes:
        """Encode `message` for one datagram or one frame of a connection."""
        self._counter += 1
        if self._process != os.getpid() or self._counter >= 2**32:
            # A forked child must not continue its parent's numbers: two different messages with the
            # same number would reveal the encryption key.
            self._process, self._session, self._counter = os.getpid(), os.urandom(8), 1
        encrypts = self._keyring is not None and self._keyring.encrypts
        head = _HEAD.pack(_ENCRYPTED if encrypts else _SIGNED, self._session, self._counter)
        body = _written(message, self._time_of_day())
        key = self._group_keys()[0]
        if encrypts:
            return head + key.cipher.encrypt(head[1:], body, head[:1])
        return head + body + key.sign(head + body)

    def decode(self, data: bytes) -> Message:
        """Decode `data`, or raise MessageRefused."""
        try:
            return self._decoded(data)
        except MessageRefused as refusal:
            self.refused[refusal.reason] += 1
            raise

    def _decoded(self, data: bytes) -> Message:
        if not ENVELOPE <= len(data) <= MOST_BYTES:
            raise MessageRefused("size")
        body = self._opened(data)
        _format, session, counter = _HEAD.unpack_from(data)
        stamp, kind, number, updates = _FIELDS.unpack_from(body)
        now = self._time_of_day()
        self._senders.admit(session, counter, stamp / 1000, now)
        if kind >= len(_KINDS):
            raise MessageRefused("unknown")
        if number >= _MOST_NUMBER or updates > MOST_UPDATES:
            raise MessageRefused("malformed")
        reader = _Reader(body, _FIELDS.size)
        source = reader.name()
        target = reader.text(MOST_NAME)
        address = reader.text(MOST_ADDRESS)
        highest = int((now + SKEW) * INCARNATIONS)
        taken = []
        for _ in range(updates):
            update = reader.update()
            if update.incarnation <= highest:
                taken.append(update)
            else:
                self.refused["incarnation"] += 1
        reader.end()
        return Message(_KINDS[kind], source, tuple(taken), number, target, address)

    def _opened(self, data: bytes) -> bytes | memoryview:
        """Return the body of the message if it is authentic."""
        if data[0] == _SIGNED:
            signed, signature = memoryview(data)[:-TAG], data[-TAG:]
            for key in self._group_keys():
                if key.verifies(signed, signature):
                    return signed[_HEAD.size :]
        elif data[0] == _ENCRYPTED:
            head, nonce, sealed = data[:1], data[1 : _HEAD.size], data[_HEAD.size :]
            for key in self._group_keys():
                body = _decrypted(key, nonce, sealed, head)
                if body is not None:
                    return body
        else:
            raise MessageRefused("version")
        raise MessageRefused("key")

    def _time_of_day(self) -> float:
        """Return the number of seconds since 1970."""
        return self._clock.now() - epoch_of(self._clock)

    def _group_keys(self) -> tuple[GroupKey, ...]:
        """Return the current keys, the signing key first; they may change between calls."""
        return self._keyring.for_group(self._group) if self._keyring else (self._keyless,)


@dataclass(slots=True)
class _Session:
    highest: int
    stamp: float
    """Latest time stamp. Once that is stale, so are all messages of this session."""
    seen: int = 1
    """One bit for each recent number; the lowest one is for `highest`."""


class _Senders:
    """The known sessions, so that no message is accepted twice."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, _Session] = {}

    def admit(self, name: bytes, counter: int, stamp: float, now: float) -> None:
        """Record an authentic message, or raise if it is not new.

        The time stamp matters only for an unknown session, so a clock that is changed while a
        member runs does not cut it off from the others.
        """
        session = self._sessions.get(name)
        if session is None:
            if abs(stamp - now) > SKEW:
                raise MessageRefused("stale")
            if len(self._sessions) >= MOST_SESSIONS and not self._make_room(now):
                raise MessageRefused("sessions")
            self._sessions[name] = _Session(counter, stamp)
            return
        ahead = counter - session.highest
        if ahead > 0:
            session.highest = counter
            session.seen = ((session.seen << ahead) & _SEEN) | 1 if ahead < REORDERED else 1
        elif -ahead >= REORDERED or session.seen >> -ahead & 1:
            raise MessageRefused("replay")
        else:
            session.seen |= 1 << -ahead
        session.stamp = max(session.stamp, stamp)

    def _make_room(self, now: float) -> bool:
        """Forget the sessions whose messages would be stale; return whether there were any."""
        kept = {name: one for name, one in self._sessions.items() if now - one.stamp <= SKEW}
        room = len(kept) < len(self._sessions)
        self._sessions = kept
        return room


class _Reader:
    """Reads consecutive fields, each within its bounds."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data = bytes(data)
        self._at = at

    def _take(self, length: int) -> bytes:
        end = self._at + length
        part = self._data[self._at : end]
        if len(part) != length:
            raise MessageRefused("malformed")
        self._at = end
        return part

    def text(self, most: int) -> str:
        length = self._take(1)[0]
        if length > most:
            raise MessageRefused("malformed")
        try:
            text = self._take(length).decode()
        except UnicodeDecodeError:
            raise MessageRefused("malformed") from None
        if not text.isprintable():  # names appear in logs, on pages and in terminals
            raise MessageRefused("malformed")
        return text

    def name(self) -> str:
        name = self.text(MOST_NAME)
        if not name:
            raise MessageRefused("malformed")
        return name

    def update(self) -> GossipUpdate:
        code, incarnation = _UPDATE.unpack(self._take(_UPDATE.size))
        if code >= len(_STATES):
            raise MessageRefused("malformed")
        state = _STATES[code]
        name = self.name()
        address = self.text(MOST_ADDRESS)
        by = self.text(MOST_NAME)
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > MOST_METADATA:
            raise MessageRefused("malformed")
        metadata = self._take(length)
        if state is MemberState.ALIVE:
            if not address or by:
                raise MessageRefused("malformed")
        elif address or metadata or not by:
            raise MessageRefused("malformed")
        return GossipUpdate(state, name, incarnation, address, metadata, by)

    def end(self) -> None:
        if self._at != len(self._data):
            raise MessageRefused("malformed")


def _decrypted(key: GroupKey, nonce: bytes, sealed: bytes, head: bytes) -> bytes | None:
    """Decrypt with `key`; return None if another key encrypted the data."""
    try:
        cipher = key.cipher
    except ImportError:
        raise MessageRefused("encryption") from None
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(nonce, sealed, head)
    except InvalidTag:
        return None


def _written(message: Message, now: float) -> bytes:
    kind = _KINDS.index(message.kind)
    parts = [
        _FIELDS.pack(int(now * 1000), kind, message.number, len(message.updates)),
        *(_text(text) for text in (message.source, message.target, message.address)),
    ]
    for update in message.updates:
        parts += (
            _UPDATE.pack(_STATES.index(update.state), update.incarnation),
            *(_text(text) for text in (update.name, update.address, update.by)),
            _LENGTH.pack(len(update.metadata)),
            update.metadata,
        )
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
