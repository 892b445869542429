"""FIFO messages, each processed once, over a network that loses, repeats and reorders them.

A `FifoSender` numbers messages in the transaction that sends them, and keeps them until a
`FifoReceiver` confirms that they took effect. The transport is up to the user: HTTP, a queue, a
file; a message is four values (`FifoMessage`), an acknowledgement five (`FifoAck`).

Promises of a sender:

- A message has its number if and only if the transaction that sent it is committed. The numbers of
  a sender and receiver have no gaps.
- A message is kept until the receiver confirms that it took effect.
- A sender whose records were lost starts a later epoch automatically.

Promises of a receiver:

- Messages of a sender are delivered in the order of their numbers. If the transaction of a delivery
  is committed, they are never delivered again.
- Messages that arrive early are buffered durably, up to `window`; those beyond it are refused.
- After any crash, uncommitted work counts as never received.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import Connection, NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import stored_name
from seawall.durable.database.transaction_block import TransactionBlock
from seawall.durable.database.twins import OnConnection, transaction_twins, twins
from seawall.errors import FifoFull, FifoStateLost
from seawall.events import FifoGap
from seawall.events.bus import emit
from seawall.models.fifo import Position, gap_since, judge, run_length, skip_to
from seawall.runtime.driver import Steps
from seawall.runtime.mutex import Mutex

LARGEST: Final = 1024 * 1024
"""Default maximum bytes of a payload."""
WIDEST: Final = 10_000
"""Maximum number of buffered messages of a sender."""
KEEP_SKIPPED: Final = 90 * 86_400.0
"""Seconds for which records of skipped messages are kept."""
MOST_REPORTED: Final = 10_000
"""Maximum number of senders whose last gap is remembered, in order to report it once."""
OnGap = Literal["wait", "skip"]
TOGETHER: Final = "a number is taken if, and only if, its message is kept"


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


Post = Callable[[FifoMessage], Awaitable[FifoAck | None] | FifoAck | None]
"""Transports a message to the receiver and returns its acknowledgement; None if there is none."""


class _Posting(NamedTuple):
    """A request of `twins`: call `post` for a message."""

    post: Callable[[FifoMessage], Any]
    message: FifoMessage

    def run(self, _database: Database) -> Any:
        return self.post(self.message)

    async def arun(self, _database: Database) -> Any:
        return await self.post(self.message)


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
        stored_name("sender", sender),
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
        stored_name("sender", sender),
        stored_name("receiver", receiver),
        check.count("epoch", epoch, minimum=0),
        check.count("expected", expected),
        check.count("allowed", allowed, minimum=0),
    )


class FifoSender:
    """One sender of messages to one receiver; any number of processes may send under its name."""

    def __init__(
        self,
        database: Database,
        sender: str,
        *,
        to: str,
        max_unacknowledged: int = 10_000,
        max_payload: int = LARGEST,
    ) -> None:
        """Send as `sender` to the receiver `to`, and keep unacknowledged messages.

        Beyond `max_unacknowledged` kept messages, more are refused with `FifoFull`.
        """
        self.database = checked_database("FifoSender", database)
        self.sender = stored_name("sender", sender)
        self.receiver = stored_name("to", to)
        self.max_unacknowledged = check.count("max_unacknowledged", max_unacknowledged)
        self.max_payload = check.count("max_payload", max_payload)
        self._pair = {"sender": self.sender, "receiver": self.receiver}
        self._counts = dict.fromkeys(("sent", "refused", "resent", "acknowledgements"), 0)
        registry.enter(self, "fifo_sender", self.receiver)

    def __repr__(self) -> str:
        return f"<FifoSender {self.sender!r} to {self.receiver!r}>"

    def _send(self, conn: Any, payload: bytes | str) -> Steps[FifoMessage]:
        """Assign a number to a message and store it, in the transaction of `conn`.

        Transport it to the receiver after the commit: `aunacknowledged` and `aresend` find it.
        Others that send as this sender wait for the end of the transaction. A connection without
        one is refused.
        """
        sent = checked_payload(payload, self.max_payload)
        stored: FifoMessage = yield OnConnection(conn, lambda: self._sending(sent), TOGETHER)
        return stored

    send, asend = twins(_send)

    def _sending(self, payload: bytes) -> Steps[FifoMessage]:
        rows = yield NamedQuery("fifo.number", {**self._pair, "most": self.max_unacknowledged})
        if not rows:
            self._counts["refused"] += 1
            raise FifoFull(
                f"{self!r}: {self.max_unacknowledged} messages are not acknowledged",
                policy=self.sender,
            )
        epoch, sequence = rows[0]
        kept = {"epoch": epoch, "sequence": sequence, "payload": payload}
        yield NamedQuery("fifo.keep", {**self._pair, **kept})
        self._counts["sent"] += 1
        return FifoMessage(self.sender, sequence, payload, epoch)

    # Unacknowledged messages

    def _unacknowledged(self, limit: int = 100) -> Steps[list[FifoMessage]]:
        """Return the first `limit` messages to send (again) that the receiver has room for."""
        most = check.count("limit", limit, maximum=10_000)
        rows = yield NamedQuery("fifo.unacknowledged", {**self._pair, "most": most})
        return [
            FifoMessage(self.sender, sequence, bytes(payload), epoch)
            for epoch, sequence, payload in rows
        ]

    unacknowledged, aunacknowledged = transaction_twins(_unacknowledged)

    def _resend(self, post: Post, limit: int = 100) -> Steps[int]:
        """Send the first `limit` unacknowledged messages; return how many were acknowledged.

        The messages are sent in order. `post(message)`, which `aresend` awaits, transports one to
        the receiver and returns its acknowledgement, or None. Call it in a loop that pauses when it
        returns 0. An exception of `post` propagates; acknowledgements before it count.
        """
        check.function("post", post)
        messages = yield lambda: self._unacknowledged(limit)
        last: FifoAck | None = None
        news = False
        try:
            for message in messages:
                ack = yield _Posting(post, message)
                self._counts["resent"] += 1
                if ack is not None and (last is None or checked_ack(ack) > last):
                    last = checked_ack(ack)
        finally:
            if last is not None:
                news = yield from self._acknowledge(last)
        return last.expected - messages[0].sequence if news and last is not None else 0

    resend, aresend = twins(_resend)

    def _acknowledge(self, ack: FifoAck) -> Steps[bool]:
        """Delete acknowledged messages; return False if the acknowledgement brings no news.

        Raises `FifoStateLost` if the receiver has messages that, by our records, were never sent.
        """
        known = checked_ack(ack)
        if known[:2] != (self.sender, self.receiver):
            return False
        return bool((yield lambda: self._acknowledging(known)))

    acknowledge, aacknowledge = twins(_acknowledge)

    def _acknowledging(self, ack: FifoAck) -> Steps[bool]:
        until = ack.expected - 1
        of = {**self._pair, "epoch": ack.epoch, "until": until}
        if (yield NamedQuery("fifo.acknowledge", {**of, "allowed": ack.allowed})):
            yield NamedQuery("fifo.drop_sent", of)
            self._counts["acknowledgements"] += 1
            return True
        rows = yield NamedQuery("fifo.sender", self._pair)
        epoch, last, _ = rows[0] if rows else (0, 0, 0)
        if ack.epoch > epoch or (ack.epoch == epoch and until > last):
            raise FifoStateLost(
                f"{self!r}: the receiver has number {until} of epoch {ack.epoch}, and here is"
                f" known up to {last} of {epoch}: was a backup restored? Call `restart`"
            )
        return False

    def _restart(self) -> Steps[int]:
        """Start a later epoch, with unacknowledged messages numbered from 1; return the epoch.

        For a sender or a receiver whose records were reset to an earlier state. Messages that took
        effect without being acknowledged take effect once more.
        """
        yield NamedQuery("fifo.lock_sender", self._pair)
        rows = yield NamedQuery("fifo.sender", self._pair)
        if not rows:
            return 0  # nothing was sent yet: its first message starts an epoch
        acknowledged = rows[0][2]
        ((epoch, _),) = yield NamedQuery("fifo.restart", self._pair)
        renumbered = {**self._pair, "epoch": epoch, "acknowledged": acknowledged}
        yield NamedQuery("fifo.renumber", renumbered)
        return int(epoch)

    restart, arestart = transaction_twins(_restart)

    def snapshot(self) -> dict[str, Any]:
        """Return the counts of messages sent, refused and resent, and of acknowledgements."""
        return {"sender": self.sender, "receiver": self.receiver, **self._counts}


class FifoReceiver:
    """One receiver for any number of senders; any number of processes may receive as it."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        window: int = 256,
        batch: int = 100,
        gap_timeout: float = 60.0,
        on_gap: OnGap = "wait",
        max_payload: int = LARGEST,
    ) -> None:
        """Receive as `name`; buffer less than `window` early messages per sender.

        At most `batch` messages are delivered at once. A message that is missing for `gap_timeout`
        seconds is reported (`FifoGap`); with `on_gap="skip"` it is also skipped, which is recorded.
        """
        self.database = checked_database("FifoReceiver", database)
        self.name = stored_name("name", name)
        self.window = check.count("window", window, maximum=WIDEST)
        self.batch = check.count("batch", batch, maximum=WIDEST)
        self.gap_timeout = check.seconds("gap_timeout", gap_timeout)
        self.on_gap: OnGap = check.choice("on_gap", on_gap, ("wait", "skip"))
        self.max_payload = check.count("max_payload", max_payload)
        words = ("delivered", "buffered", "duplicate", "late", "beyond", "stale")
        self._counts = dict.fromkeys((*words, "restarts", "gaps", "skipped", "failed"), 0)
        self._reported_gaps: OrderedDict[str, Position] = OrderedDict()
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "fifo_receiver", self.name)

    def _after_fork(self) -> None:
        """Replace the lock, which another thread may have held."""
        self._mutex = Mutex()

    def __repr__(self) -> str:
        return f"<FifoReceiver {self.name!r}: window={self.window}, on_gap={self.on_gap!r}>"

    def receive(
        self, conn: Any, sender: str, sequence: int, payload: bytes | str, epoch: int = 1
    ) -> TransactionBlock[Received]:
        """Receive a message: `async with receiver.receive(conn, *message) as ready:`.

        `ready` are the messages that are deliverable now, in order: none, this one, or this one and
        those that waited for it. Apply their effects in the block with the same `conn`, which must
        have an open transaction; commit it, then send `ready.ack` back. If the block raises,
        nothing is received. For a blocking connection, write `with`.
        """
        message = checked_message(sender, sequence, payload, epoch, self.max_payload)
        return _Receiving(self, self.database.connection(conn), message.sender, message)

    def drain(self, conn: Any, sender: str) -> TransactionBlock[Received]:
        """Deliver buffered messages without a new one: after an expired gap, or if `more`."""
        own = self.database.connection(conn)
        return _Receiving(self, own, stored_name("sender", sender), None)

    # Gaps

    def _gaps(self, limit: int = 100) -> Steps[list[Gap]]:
        """Return the gaps, the oldest first; report those older than `gap_timeout`."""
        most = check.count("limit", limit, maximum=WIDEST)
        rows = yield NamedQuery("fifo.gaps", {"receiver": self.name, "most": most})
        gaps = [Gap(*row)._replace(age=row[5] / 1_000_000) for row in rows]
        for gap in gaps:
            if gap.age >= self.gap_timeout:
                self._report_gap(gap.sender, Position(gap.epoch, gap.expected), gap.age, None)
        return gaps

    gaps, agaps = transaction_twins(_gaps)

    def _skip(self, sender: str, to: int) -> Steps[int]:
        """Skip all messages before the number `to`, recorded; return how many numbers that were.

        Then `drain` delivers the messages that waited behind them.
        """
        pair = {"receiver": self.name, "sender": stored_name("sender", sender)}
        check.count("to", to)
        rows = yield NamedQuery("fifo.place", pair)
        if not rows or rows[0][1] >= to:
            return 0
        epoch, expected, _, _, version = rows[0]
        yield from self._record(pair, Position(epoch, expected), to)
        # Skipped messages may be among the buffered ones; the next call finds out how many remain.
        moved = {"epoch": epoch, "expected": to, "buffered": 1, "version": version}
        yield NamedQuery("fifo.move", {**pair, **moved})
        yield NamedQuery("fifo.drop_buffered", {**pair, "epoch": epoch, "expected": to})
        return int(to - expected)

    skip, askip = transaction_twins(_skip)

    def _record(self, pair: dict[str, Any], position: Position, to: int) -> Steps[None]:
        epoch, first = position
        yield NamedQuery("fifo.skipped", {**pair, "epoch": epoch, "first": first, "last": to - 1})

    def _skipped(self, limit: int = 100) -> Steps[list[Skipped]]:
        """Return the skipped messages, the latest first."""
        most = check.count("limit", limit, maximum=WIDEST)
        rows = yield NamedQuery("fifo.skips", {"receiver": self.name, "most": most})
        return [Skipped(*row[:4]) for row in rows]

    skipped, askipped = transaction_twins(_skipped)

    def _cleanup(
        self, *, older_than: float = KEEP_SKIPPED, batch: int = 1000, within: float = 10.0
    ) -> Steps[int]:
        """Remove records of skips older than `older_than` seconds; return how many.

        Works in batches. It ends after about `within` seconds, finished or not.
        """
        age = int(check.seconds("older_than", older_than, zero=True) * 1_000_000)
        forgetting = NamedQuery("fifo.forget_skipped", {"receiver": self.name, "age": age})
        return cleaning_steps(batch, within, forgetting)

    cleanup, acleanup = twins(_cleanup)

    # Counters and events

    def snapshot(self) -> dict[str, Any]:
        """Return the counts of messages that this process received.

        The age of the oldest gap is in the database: see `agaps`.
        """
        return {"receiver": self.name, "window": self.window, **self._counts}

    def _report_gap(self, sender: str, position: Position, age: float, to: int | None) -> None:
        """Report a gap, once per process while it is open."""
        with self._mutex:
            if to is None and self._reported_gaps.get(sender) == position:
                return
            self._reported_gaps[sender] = position
            self._reported_gaps.move_to_end(sender)
            if len(self._reported_gaps) > MOST_REPORTED:
                self._reported_gaps.popitem(last=False)
            self._counts["gaps"] += 1
        gap = {"sender": sender, **position._asdict(), "age": age, "skipped_to": to}
        emit(FifoGap, self.name, **gap)


class Received:
    """The messages that are deliverable now, in order, and the verdict on the received one.

    Created by `FifoReceiver.receive` and `drain` only.
    """

    def __init__(self, verdict: str, messages: list[FifoMessage], ack: FifoAck) -> None:
        """Hold the deliverable messages."""
        self.verdict = verdict
        """As in the model; or "late" if the message was skipped before, "drained" if none came."""
        self.messages = messages
        self.ack = ack
        """The receiver's position after the block; valid once the transaction is committed."""
        self.more = False
        """Whether more messages are deliverable: call `drain`."""

    def __repr__(self) -> str:
        return f"<Received {self.verdict}: {len(self.messages)} ready>"

    def __iter__(self) -> Iterator[FifoMessage]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


class _Receiving(TransactionBlock[Received]):
    """A message from its arrival until the position has moved past it.

    Everything is written at the end, the position first: rows left behind it are never used.
    """

    def __init__(
        self,
        receiver: FifoReceiver,
        connection: Connection,
        sender: str,
        message: FifoMessage | None,
    ) -> None:
        super().__init__(connection)
        self._receiver = receiver
        self._message = message
        self._pair = {"receiver": receiver.name, "sender": sender}
        self._before = self._after = Position(0, 1)
        self._skip_from: Position | None = None
        self._buffered: dict[int, int] = {}
        self._stored_count = self._version = 0
        self._verdict = "drained"
        self._skipped_to = 0
        self._gap_age = 0.0

    def _begin(self) -> Steps[Received]:
        receiver, message = self._receiver, self._message
        rows = yield NamedQuery("fifo.place", self._pair)
        if not rows and message is not None:
            yield NamedQuery("fifo.begin", {**self._pair, "epoch": message.epoch})
            rows = yield NamedQuery("fifo.place", self._pair)
        if not rows:
            return self._received("drained", [])
        epoch, expected, self._stored_count, now, self._version = rows[0]
        position = self._before = self._after = Position(epoch, expected)
        if self._stored_count:
            wanted = {"epoch": epoch, "expected": expected, "most": WIDEST}
            self._buffered = dict((yield NamedQuery("fifo.buffered", {**self._pair, **wanted})))
        verdict = "drained"
        if message is not None:
            position, verdict = judge(
                position, self._buffered, receiver.window, message.epoch, message.sequence
            )
            if position.epoch != epoch:
                self._buffered = {}
            if verdict in ("delivered", "buffered"):
                self._buffered[message.sequence] = now
            elif verdict == "duplicate" and message.sequence < position.expected:
                arguments = {"epoch": message.epoch, "sequence": message.sequence}
                if (yield NamedQuery("fifo.was_skipped", {**self._pair, **arguments})):
                    verdict = "late"
        position = self._handle_gap(position, now)
        length = run_length(position.expected, self._buffered, receiver.batch)
        self._after = Position(position.epoch, position.expected + length)
        messages = yield from self._messages(position.expected, length)
        received = self._received(verdict, messages)
        received.more = self._after.expected in self._buffered or bool(
            length
            and receiver.on_gap == "skip"
            and self._after_gap(self._after, now) != self._after
        )
        self._verdict = verdict
        return received

    def _after_gap(self, position: Position, now: int) -> Position:
        """Return the position after a gap that is too old; else the same position."""
        held = {number: at for number, at in self._buffered.items() if number >= position.expected}
        return skip_to(position, held, now, int(self._receiver.gap_timeout * 1_000_000))

    def _handle_gap(self, position: Position, now: int) -> Position:
        """Report or skip a gap that is too old; return the position to continue from."""
        receiver, behind = self._receiver, self._after_gap(position, now)
        if behind == position:
            return position
        since = gap_since(position, self._buffered)
        age = 0.0 if since is None else (now - since) / 1_000_000
        if receiver.on_gap == "wait":
            receiver._report_gap(self._pair["sender"], position, age, None)
            return position
        self._skip_from, self._skipped_to, self._gap_age = position, behind.expected, age
        return behind

    def _messages(self, first: int, length: int) -> Steps[list[FifoMessage]]:
        if not length:
            return []
        sender, message, epoch = self._pair["sender"], self._message, self._after.epoch
        payloads: dict[int, bytes] = {}
        if message is not None and message.epoch == epoch:
            payloads[message.sequence] = message.payload
        if length > 1 or first not in payloads:
            arguments = {"epoch": epoch, "first": first, "last": first + length - 1}
            for sequence, payload in (
                yield NamedQuery("fifo.payloads", {**self._pair, **arguments})
            ):
                payloads[sequence] = bytes(payload)
        numbers = range(first, first + length)
        return [FifoMessage(sender, number, payloads[number], epoch) for number in numbers]

    def _received(self, verdict: str, messages: list[FifoMessage]) -> Received:
        sender, (epoch, expected) = self._pair["sender"], self._after
        allowed = expected + self._receiver.window - 1
        ack = FifoAck(sender, self._receiver.name, epoch, expected, allowed)
        return Received(verdict, messages, ack)

    def _end(self) -> Steps[None]:
        message, after, before = self._message, self._after, self._before
        waiting = sum(number >= after.expected for number in self._buffered)
        if (*after, waiting) != (*before, self._stored_count):
            moved = {"epoch": after.epoch, "expected": after.expected, "buffered": waiting}
            moved["version"] = self._version
            if not (yield NamedQuery("fifo.move", {**self._pair, **moved})):
                raise RuntimeError(
                    f"{self._receiver!r}: the transaction was rolled back inside the block, and"
                    " nothing was received: let the error leave the block instead"
                )
        if self._skip_from is not None:
            receiver, behind = self._receiver, self._skipped_to
            yield from receiver._record(self._pair, self._skip_from, behind)
            receiver._report_gap(self._pair["sender"], self._skip_from, self._gap_age, behind)
        received = self._verdict in ("delivered", "buffered")
        if message is not None and message.sequence >= after.expected and received:
            kept = {"epoch": after.epoch, "sequence": message.sequence, "payload": message.payload}
            yield NamedQuery("fifo.buffer", {**self._pair, **kept})
        if self._stored_count and after != before:
            place = {"epoch": after.epoch, "expected": after.expected}
            yield NamedQuery("fifo.drop_buffered", {**self._pair, **place})
        self._count()

    def _undo(self) -> Steps[None]:
        with self._receiver._mutex:
            self._receiver._counts["failed"] += 1
        return
        yield

    def _count(self) -> None:
        delivered = self._after.expected - (
            1 if self._after.epoch != self._before.epoch else self._before.expected
        )
        skipped = 0
        if self._skip_from is not None:
            skipped = self._skipped_to - self._skip_from.expected
        with self._receiver._mutex:
            counts = self._receiver._counts
            counts["skipped"] += skipped
            counts["delivered"] += delivered - skipped
            counts["restarts"] += self._after.epoch != self._before.epoch
            if self._verdict in counts and self._verdict != "delivered":
                counts[self._verdict] += 1
