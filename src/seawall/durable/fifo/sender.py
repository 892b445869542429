"""Sending side of FIFO messages: numbers without gaps, kept until they are acknowledged.

Promises:

- A message has its number if and only if the transaction that sent it is committed. The numbers of
  a sender and receiver have no gaps.
- A message is kept until the receiver confirms that it took effect.
- A sender whose records were lost starts a later epoch automatically.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.transaction_block import named
from seawall.durable.database.twins import OnConnection, transaction_twins, twins
from seawall.durable.fifo.messages import (
    LARGEST,
    FifoAck,
    FifoMessage,
    checked_ack,
    checked_payload,
)
from seawall.errors import FifoFull, FifoStateLost
from seawall.runtime.driver import Steps, adrive, drive

Post = Callable[[FifoMessage], Awaitable[FifoAck | None]]
"""Transports a message to the receiver and returns its acknowledgement; None if there is none."""

TOGETHER: Final = "a number is taken if, and only if, its message is kept"


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
        self.sender = named("sender", sender)
        self.receiver = named("to", to)
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

    async def aresend(self, post: Post, limit: int = 100) -> int:
        """Send the first `limit` unacknowledged messages; return how many were acknowledged.

        The messages are sent in order. `await post(message)` transports one to the receiver and
        returns its acknowledgement, or None. Call it in a loop that pauses when it returns 0. An
        exception of `post` propagates; acknowledgements before it count.
        """
        check.function("post", post)
        messages = await self.aunacknowledged(limit)

        async def answer(asked: FifoMessage | FifoAck) -> Any:
            if isinstance(asked, FifoAck):
                return await self.aacknowledge(asked)
            return await post(asked)

        return await adrive(self._resending(messages), answer)

    def resend(self, post: Callable[[FifoMessage], FifoAck | None], limit: int = 100) -> int:
        """Sync twin of `aresend`."""
        check.function("post", post)
        messages = self.unacknowledged(limit)

        def answer(asked: FifoMessage | FifoAck) -> Any:
            return self.acknowledge(asked) if isinstance(asked, FifoAck) else post(asked)

        return drive(self._resending(messages), answer)

    def _resending(self, messages: list[FifoMessage]) -> Steps[int]:
        """Yield each message to post it; at the end, yield the latest acknowledgement."""
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
