"""The receiver's side: in order, each once, and the place is kept with the effect.

Promises: messages of a sender are given out in the order of their numbers, and where the
transaction in which they are is committed, never again. What is ahead is buffered, durably, up to
`window`; what is further ahead is refused. Whatever crashes: what is not committed is as if it had
not come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall import registry
from seawall.durable._blocks import Block, named
from seawall.durable._cleaning import Cleaning
from seawall.durable._connections import Ask, Connection
from seawall.durable._fifo_wire import (
    LARGEST,
    FifoAck,
    FifoMessage,
    Gap,
    Skipped,
    checked_message,
)
from seawall.durable.database import Database
from seawall.models.fifo import Position, gap_since, judge, run_length, skip_to
from seawall.runtime.durable_events import FifoGap
from seawall.runtime.events import emit
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.stepping import Steps

WIDEST: Final = 10_000
"""Messages that may be buffered for a sender."""
KEEP_SKIPPED: Final = 90 * 86_400.0
"""Seconds for which it is kept what was given up."""
MOST_TOLD: Final = 10_000
"""Senders whose last gap is remembered, so that it is told once."""

OnGap = Literal["wait", "skip"]


class FifoReceiver:
    """One receiver, of any number of senders; any number of processes may receive as it."""

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
        """Receive as `name`, and buffer what is ahead, less than `window` messages of a sender.

        At most `batch` are given out at once. A message that is missing for `gap_timeout` seconds
        is told (`FifoGap`), and with `on_gap="skip"` given up, which is recorded.
        """
        if not isinstance(database, Database):
            raise TypeError(f"FifoReceiver({database!r}, ...): pass a Database")
        self.database = database
        self.name = named("name", name)
        self.window = check.count("window", window, maximum=WIDEST)
        self.batch = check.count("batch", batch, maximum=WIDEST)
        self.gap_timeout = check.seconds("gap_timeout", gap_timeout)
        self.on_gap: OnGap = check.choice("on_gap", on_gap, ("wait", "skip"))
        self.max_payload = check.count("max_payload", max_payload)
        words = ("delivered", "buffered", "duplicate", "late", "beyond", "stale")
        self._counts = dict.fromkeys((*words, "restarts", "gaps", "skipped", "failed"), 0)
        self._told: OrderedDict[str, Position] = OrderedDict()
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "fifo_receiver", self.name)

    def _after_fork(self) -> None:
        """Have a lock that nobody holds."""
        self._mutex = Mutex()

    def __repr__(self) -> str:
        return f"<FifoReceiver {self.name!r}: window={self.window}, on_gap={self.on_gap!r}>"

    def receive(
        self, conn: Any, sender: str, sequence: int, payload: bytes | str, epoch: int = 1
    ) -> Block[Received]:
        """Take a message: `async with receiver.receive(conn, *message) as ready:`.

        `ready` are the messages whose turn it is now, in order: none, this one, or this one and
        those that waited for it. Make their effects in the block, by the same `conn`, which
        has a transaction begun; commit it, then send `ready.ack` back. Left by an error, nothing is
        received. For connections that are not awaited, write `with`.
        """
        message = checked_message(sender, sequence, payload, epoch, self.max_payload)
        return _Receiving(self, self.database.connection(conn), message.sender, message)

    def drain(self, conn: Any, sender: str) -> Block[Received]:
        """Give out what is ready without a new message: behind a gap that is too old, or `more`."""
        own = self.database.connection(conn)
        return _Receiving(self, own, named("sender", sender), None)

    # What is missing

    async def agaps(self, limit: int = 100) -> list[Gap]:
        """Return where messages are missing, the oldest first; each is told if it is too old."""
        return await self.database.arun(lambda: self._gaps(limit))

    def gaps(self, limit: int = 100) -> list[Gap]:
        """Do the same, blocking."""
        return self.database.run(lambda: self._gaps(limit))

    def _gaps(self, limit: int) -> Steps[list[Gap]]:
        most = check.count("limit", limit, maximum=WIDEST)
        rows = yield Ask("fifo.gaps", {"receiver": self.name, "most": most})
        gaps = [Gap(*row)._replace(age=row[5] / 1_000_000) for row in rows]
        for gap in gaps:
            if gap.age >= self.gap_timeout:
                self._tell(gap.sender, Position(gap.epoch, gap.expected), gap.age, None)
        return gaps

    async def askip(self, sender: str, to: int) -> int:
        """Give up all before the number `to`, recorded; return how many numbers that were.

        Then `drain` gives out what waited behind them.
        """
        return await self.database.arun(lambda: self._skipping(sender, to))

    def skip(self, sender: str, to: int) -> int:
        """Do the same, blocking."""
        return self.database.run(lambda: self._skipping(sender, to))

    def _skipping(self, sender: str, to: int) -> Steps[int]:
        pair = {"receiver": self.name, "sender": named("sender", sender)}
        check.count("to", to)
        rows = yield Ask("fifo.place", pair)
        if not rows or rows[0][1] >= to:
            return 0
        epoch, expected, _, _, version = rows[0]
        yield from self._record(pair, Position(epoch, expected), to)
        # Those that are given up may be among the buffered: they are of no use any more.
        moved = {"epoch": epoch, "expected": to, "buffered": 1, "version": version}
        yield Ask("fifo.move", {**pair, **moved})  # whether any are buffered, the next one sees
        yield Ask("fifo.drop_buffered", {**pair, "epoch": epoch, "expected": to})
        return int(to - expected)

    def _record(self, pair: dict[str, Any], position: Position, to: int) -> Steps[None]:
        epoch, first = position
        yield Ask("fifo.skipped", {**pair, "epoch": epoch, "first": first, "last": to - 1})

    async def askipped(self, limit: int = 100) -> list[Skipped]:
        """Return what was given up, the latest first."""
        return await self.database.arun(lambda: self._skipped(limit))

    def skipped(self, limit: int = 100) -> list[Skipped]:
        """Do the same, blocking."""
        return self.database.run(lambda: self._skipped(limit))

    def _skipped(self, limit: int) -> Steps[list[Skipped]]:
        most = check.count("limit", limit, maximum=WIDEST)
        rows = yield Ask("fifo.skips", {"receiver": self.name, "most": most})
        return [Skipped(*row[:4]) for row in rows]

    async def acleanup(
        self, *, older_than: float = KEEP_SKIPPED, batch: int = 1000, within: float = 10.0
    ) -> int:
        """Remove records of what was given up `older_than` so many seconds ago; return how many.

        Batch by batch. It ends after about `within` seconds, done or not.
        """
        return await Cleaning(batch, within, self._cleaning(older_than)).arun(self.database)

    def cleanup(
        self, *, older_than: float = KEEP_SKIPPED, batch: int = 1000, within: float = 10.0
    ) -> int:
        """Do the same, blocking."""
        return Cleaning(batch, within, self._cleaning(older_than)).run(self.database)

    def _cleaning(self, older_than: float) -> Callable[[int], Steps[int]]:
        age = int(check.seconds("older_than", older_than, zero=True) * 1_000_000)

        def removing(batch: int) -> Steps[int]:
            asked = {"receiver": self.name, "age": age, "batch": batch}
            return len((yield Ask("fifo.forget_skipped", asked)))

        return removing

    # What is told

    def snapshot(self) -> dict[str, Any]:
        """Return what became of the messages that came to this process.

        `agaps` tells the age of the oldest gap, which is in the database.
        """
        return {"receiver": self.name, "window": self.window, **self._counts}

    def _tell(self, sender: str, position: Position, age: float, to: int | None) -> None:
        """Tell of a gap, once in this process while it is waited for."""
        with self._mutex:
            if to is None and self._told.get(sender) == position:
                return
            self._told[sender] = position
            self._told.move_to_end(sender)
            if len(self._told) > MOST_TOLD:
                self._told.popitem(last=False)
            self._counts["gaps"] += 1
        emit(
            FifoGap,
            self.name,
            sender=sender,
            epoch=position.epoch,
            expected=position.expected,
            age=age,
            skipped_to=to,
        )


class Received:
    """What it is the turn of now, in order; and what became of the message that came.

    Made by `FifoReceiver.receive` and `drain`, and by nobody else.
    """

    def __init__(self, verdict: str, messages: list[FifoMessage], ack: FifoAck) -> None:
        """Hold the messages that are to take effect."""
        self.verdict = verdict
        """As of the model; or "late" if it was skipped before, "drained" if none came."""
        self.messages = messages
        self.ack = ack
        """How far the receiver is after the block; true once the transaction is committed."""
        self.more = False
        """Whether more is ready than was given out: call `drain`."""

    def __repr__(self) -> str:
        return f"<Received {self.verdict}: {len(self.messages)} ready>"

    def __iter__(self) -> Iterator[FifoMessage]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


class _Receiving(Block[Received]):
    """A message, from its arrival until the place is moved behind it.

    All is written at the end, the place first: what is left behind it is of no use to anybody.
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
        self._skipped_from: Position | None = None
        self._held: dict[int, int] = {}
        self._noted = self._version = 0
        self._verdict = "drained"
        self._skipped_to = 0
        self._gap_age = 0.0

    def _begin(self) -> Steps[Received]:
        receiver, message = self._receiver, self._message
        rows = yield Ask("fifo.place", self._pair)
        if not rows and message is not None:
            yield Ask("fifo.begin", {**self._pair, "epoch": message.epoch})
            rows = yield Ask("fifo.place", self._pair)
        if not rows:
            return self._received("drained", [])
        epoch, expected, self._noted, now, self._version = rows[0]
        position = self._before = self._after = Position(epoch, expected)
        if self._noted:
            wanted = {"epoch": epoch, "expected": expected, "most": WIDEST}
            self._held = dict((yield Ask("fifo.buffered", {**self._pair, **wanted})))
        verdict = "drained"
        if message is not None:
            position, verdict = judge(
                position, self._held, receiver.window, message.epoch, message.sequence
            )
            if position.epoch != epoch:
                self._held = {}
            if verdict in ("delivered", "buffered"):
                self._held[message.sequence] = now
            elif verdict == "duplicate" and message.sequence < position.expected:
                asked = {"epoch": message.epoch, "sequence": message.sequence}
                if (yield Ask("fifo.was_skipped", {**self._pair, **asked})):
                    verdict = "late"
        position = self._look_at_gap(position, now)
        length = run_length(position.expected, self._held, receiver.batch)
        self._after = Position(position.epoch, position.expected + length)
        messages = yield from self._messages(position.expected, length)
        received = self._received(verdict, messages)
        received.more = self._after.expected in self._held or bool(
            length and receiver.on_gap == "skip" and self._behind(self._after, now) != self._after
        )
        self._verdict = verdict
        return received

    def _behind(self, position: Position, now: int) -> Position:
        """Return where it goes on behind a gap that is too old; else the same."""
        held = {number: at for number, at in self._held.items() if number >= position.expected}
        return skip_to(position, held, now, int(self._receiver.gap_timeout * 1_000_000))

    def _look_at_gap(self, position: Position, now: int) -> Position:
        """Tell of a gap that is too old; return where it goes on."""
        receiver, behind = self._receiver, self._behind(position, now)
        if behind == position:
            return position
        since = gap_since(position, self._held)
        age = 0.0 if since is None else (now - since) / 1_000_000
        if receiver.on_gap == "wait":
            receiver._tell(self._pair["sender"], position, age, None)
            return position
        self._skipped_from, self._skipped_to, self._gap_age = position, behind.expected, age
        return behind

    def _messages(self, first: int, length: int) -> Steps[list[FifoMessage]]:
        if not length:
            return []
        sender, message, epoch = self._pair["sender"], self._message, self._after.epoch
        payloads: dict[int, bytes] = {}
        if message is not None and message.epoch == epoch:
            payloads[message.sequence] = message.payload
        if length > 1 or first not in payloads:
            asked = {"epoch": epoch, "first": first, "last": first + length - 1}
            for sequence, payload in (yield Ask("fifo.payloads", {**self._pair, **asked})):
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
        waiting = sum(number >= after.expected for number in self._held)
        if (*after, waiting) != (*before, self._noted):
            moved = {"epoch": after.epoch, "expected": after.expected, "buffered": waiting}
            moved["version"] = self._version
            if not (yield Ask("fifo.move", {**self._pair, **moved})):
                raise RuntimeError(
                    f"{self._receiver!r}: the transaction was rolled back inside the block, and"
                    " nothing was received: let the error leave the block instead"
                )
        if self._skipped_from is not None:
            receiver, behind = self._receiver, self._skipped_to
            yield from receiver._record(self._pair, self._skipped_from, behind)
            receiver._tell(self._pair["sender"], self._skipped_from, self._gap_age, behind)
        if message is not None and message.sequence >= after.expected and self._kept:
            kept = {"epoch": after.epoch, "sequence": message.sequence, "payload": message.payload}
            yield Ask("fifo.buffer", {**self._pair, **kept})
        if self._noted and after != before:
            place = {"epoch": after.epoch, "expected": after.expected}
            yield Ask("fifo.drop_buffered", {**self._pair, **place})
        self._count()

    @property
    def _kept(self) -> bool:
        """Whether the message is one of those that wait."""
        return self._verdict in ("delivered", "buffered")

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
        if self._skipped_from is not None:
            skipped = self._skipped_to - self._skipped_from.expected
        with self._receiver._mutex:
            counts = self._receiver._counts
            counts["skipped"] += skipped
            counts["delivered"] += delivered - skipped
            counts["restarts"] += self._after.epoch != self._before.epoch
            if self._verdict in counts and self._verdict != "delivered":
                counts[self._verdict] += 1
