"""The sender's side: numbers without gaps, and what is not acknowledged is kept.

Promises: a message has its number if, and only if, the transaction that sent it is committed; the
numbers of a sender and a receiver have no gap. A message is kept until the receiver says that it
took effect. A sender whose records were lost begins a later epoch by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.durable._blocks import named
from seawall.durable._connections import Ask, arequire_transaction, require_transaction
from seawall.durable._fifo_wire import (
    LARGEST,
    FifoAck,
    FifoMessage,
    checked_ack,
    checked_payload,
)
from seawall.durable.database import Database
from seawall.errors import FifoFull, FifoStateLost
from seawall.runtime.stepping import Steps, adrive, drive

Post = Callable[[FifoMessage], Awaitable[FifoAck | None]]
"""Brings a message to the receiver, and its answer back; None if there is none."""

TOGETHER: Final = "a number is taken if, and only if, its message is kept"


class FifoSender:
    """One sender of messages to one receiver; any number of processes may send as it."""

    def __init__(
        self,
        database: Database,
        sender: str,
        *,
        to: str,
        max_unacknowledged: int = 10_000,
        max_payload: int = LARGEST,
    ) -> None:
        """Send as `sender` to the receiver `to`, and keep what it has not acknowledged.

        With `max_unacknowledged` messages kept, more are refused with `FifoFull`.
        """
        if not isinstance(database, Database):
            raise TypeError(f"FifoSender({database!r}, ...): pass a Database")
        self.database = database
        self.sender = named("sender", sender)
        self.receiver = named("to", to)
        self.max_unacknowledged = check.count("max_unacknowledged", max_unacknowledged)
        self.max_payload = check.count("max_payload", max_payload)
        self._pair = {"sender": self.sender, "receiver": self.receiver}
        self._counts = dict.fromkeys(("sent", "refused", "resent", "acknowledgements"), 0)
        registry.enter(self, "fifo_sender", self.receiver)

    def __repr__(self) -> str:
        return f"<FifoSender {self.sender!r} to {self.receiver!r}>"

    async def asend(self, conn: Any, payload: bytes | str) -> FifoMessage:
        """Give a message its number and keep it, in the transaction of `conn`.

        Bring it to the receiver after the commit: what `aunacknowledged` or `aresend` finds. Others
        who send as this sender wait for the end of the transaction. Without one it is refused.
        """
        own = self.database.connection(conn)
        await arequire_transaction(own, TOGETHER)
        return await own.arun(self._sending(checked_payload(payload, self.max_payload)))

    def send(self, conn: Any, payload: bytes | str) -> FifoMessage:
        """Do the same, on a connection that is not awaited."""
        own = self.database.connection(conn)
        require_transaction(own, TOGETHER)
        return own.run(self._sending(checked_payload(payload, self.max_payload)))

    def _sending(self, payload: bytes) -> Steps[FifoMessage]:
        rows = yield Ask("fifo.number", {**self._pair, "most": self.max_unacknowledged})
        if not rows:
            self._counts["refused"] += 1
            raise FifoFull(
                f"{self!r}: {self.max_unacknowledged} messages are not acknowledged",
                policy=self.sender,
            )
        epoch, sequence = rows[0]
        kept = {"epoch": epoch, "sequence": sequence, "payload": payload}
        yield Ask("fifo.keep", {**self._pair, **kept})
        self._counts["sent"] += 1
        return FifoMessage(self.sender, sequence, payload, epoch)

    # What the receiver has not

    async def aunacknowledged(self, limit: int = 100) -> list[FifoMessage]:
        """Return what is to be sent (again), in order: the first `limit` that have room there."""
        return await self.database.arun(lambda: self._unacknowledged(limit))

    def unacknowledged(self, limit: int = 100) -> list[FifoMessage]:
        """Do the same, blocking."""
        return self.database.run(lambda: self._unacknowledged(limit))

    def _unacknowledged(self, limit: int) -> Steps[list[FifoMessage]]:
        most = check.count("limit", limit, maximum=10_000)
        rows = yield Ask("fifo.unacknowledged", {**self._pair, "most": most})
        return [
            FifoMessage(self.sender, sequence, bytes(payload), epoch)
            for epoch, sequence, payload in rows
        ]

    async def aresend(self, post: Post, limit: int = 100) -> int:
        """Send the first `limit` that are not acknowledged, in order; return how many now are.

        `await post(message)` brings one to the receiver, and returns what it acknowledges, or None.
        Call it in a loop of your own, which pauses where it returns 0. An error of `post` goes on;
        what came before it counts.
        """
        check.function("post", post)
        messages = await self.aunacknowledged(limit)

        async def answer(asked: FifoMessage | FifoAck) -> Any:
            own = isinstance(asked, FifoAck)
            return await (self.aacknowledge(asked) if own else post(asked))  # type: ignore[arg-type]

        return await adrive(self._resending(messages), answer)

    def resend(self, post: Callable[[FifoMessage], FifoAck | None], limit: int = 100) -> int:
        """Do the same, blocking."""
        check.function("post", post)
        messages = self.unacknowledged(limit)

        def answer(asked: FifoMessage | FifoAck) -> Any:
            return self.acknowledge(asked) if isinstance(asked, FifoAck) else post(asked)

        return drive(self._resending(messages), answer)

    def _resending(self, messages: list[FifoMessage]) -> Steps[int]:
        """Ask for each message's acknowledgement; in the end have the latest of these heard."""
        last: FifoAck | None = None
        news = False
        try:
            for message in messages:
                ack = yield message
                self._counts["resent"] += 1
                if ack is not None and (last is None or checked_ack(ack) > last):
                    last = checked_ack(ack)
        finally:
            if last is not None:
                news = yield last
        return last.expected - messages[0].sequence if news and last is not None else 0

    async def aacknowledge(self, ack: FifoAck) -> bool:
        """Keep no longer what the receiver has; False if that is no news.

        Raises `FifoStateLost` where the receiver has what was never sent, as far as is known here.
        """
        known = self._own(ack)
        return known is not None and await self.database.arun(lambda: self._acknowledging(known))

    def acknowledge(self, ack: FifoAck) -> bool:
        """Do the same, blocking."""
        known = self._own(ack)
        return known is not None and self.database.run(lambda: self._acknowledging(known))

    def _own(self, ack: FifoAck) -> FifoAck | None:
        known = checked_ack(ack)
        return known if known[:2] == (self.sender, self.receiver) else None

    def _acknowledging(self, ack: FifoAck) -> Steps[bool]:
        until = ack.expected - 1
        of = {**self._pair, "epoch": ack.epoch, "until": until}
        if (yield Ask("fifo.acknowledge", {**of, "allowed": ack.allowed})):
            yield Ask("fifo.drop_sent", of)
            self._counts["acknowledgements"] += 1
            return True
        rows = yield Ask("fifo.sender", self._pair)
        epoch, last, _ = rows[0] if rows else (0, 0, 0)
        if ack.epoch > epoch or (ack.epoch == epoch and until > last):
            raise FifoStateLost(
                f"{self!r}: the receiver has number {until} of epoch {ack.epoch}, and here is"
                f" known up to {last} of {epoch}: was a backup restored? Call `restart`"
            )
        return False

    async def arestart(self) -> int:
        """Begin a later epoch, in which what is not acknowledged is numbered from 1; return it.

        For a sender or a receiver whose records were put back to an earlier state. What took effect
        and was not acknowledged takes effect once more.
        """
        return await self.database.arun(self._restarting)

    def restart(self) -> int:
        """Do the same, blocking."""
        return self.database.run(self._restarting)

    def _restarting(self) -> Steps[int]:
        yield Ask("fifo.lock_sender", self._pair)
        rows = yield Ask("fifo.sender", self._pair)
        if not rows:
            return 0  # it has sent nothing: its first message begins an epoch
        acknowledged = rows[0][2]
        ((epoch, _),) = yield Ask("fifo.restart", self._pair)
        renumbered = {**self._pair, "epoch": epoch, "acknowledged": acknowledged}
        yield Ask("fifo.renumber", renumbered)
        return int(epoch)

    def snapshot(self) -> dict[str, Any]:
        """Return what this process has sent, refused and sent again, and what it was told."""
        return {"sender": self.sender, "receiver": self.receiver, **self._counts}
