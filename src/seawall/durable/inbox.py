"""Handle each message once, however often it is delivered.

Promises: in the transaction of the effect it is noted which message caused it, for each consumer.
So both are there, or neither. Of two deliveries at once one is handled; the other waits for the end
of the first's transaction, and is dropped if that was committed, or handled if it was not. What was
noted is forgotten after `ttl`.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.durable._blocks import Block, named
from seawall.durable._cleaning import Cleaning
from seawall.durable._connections import Ask, Connection
from seawall.durable.database import Database
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.stepping import Steps

__all__ = ["Inbox"]

LONGEST_ID: Final = 4096
"""Characters of a message's id. What is kept is a hash: ids may hold anything."""

BATCH: Final = 1000
_COUNTED: Final = ("handled", "duplicates", "failed")
MOST_CONSUMERS: Final = 1000
"""Consumers that are counted one by one; the others are counted together, as "others"."""


class Inbox:
    """What the consumers of a database have handled."""

    def __init__(self, database: Database, *, ttl: float = 14 * 86_400.0) -> None:
        """Remember messages for `ttl` seconds: longer than any can be delivered again."""
        if not isinstance(database, Database):
            raise TypeError(f"Inbox({database!r}): pass a Database")
        self.database = database
        self.ttl = check.seconds("ttl", ttl)
        self._counts: dict[str, Counter[str]] = {kind: Counter() for kind in _COUNTED}
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "inbox", database.name)

    def __repr__(self) -> str:
        return f"<Inbox of {self.database!r}: ttl={self.ttl:g}>"

    def once(self, conn: Any, consumer: str, message_id: str) -> Block[bool]:
        """Tell whether this delivery is to be handled: `async with inbox.once(...) as first:`.

        `conn` has a transaction begun, in which the effect is made too: commit it after the
        block. For connections that are not awaited, write `with`. Left by an error, the message
        counts as not handled, also where the transaction is committed nevertheless.
        """
        noting: dict[str, Any] = {
            "consumer": named("consumer", consumer),
            "message": _digest(message_id),
        }
        noting["token"] = token_bytes(16)
        return _Once(self, self.database.connection(conn), noting)

    async def aseen(self, consumer: str, message_id: str) -> bool:
        """Tell whether a message was handled, as far as is committed and remembered."""
        return await self.database.arun(lambda: self._seeing(consumer, message_id))

    def seen(self, consumer: str, message_id: str) -> bool:
        """Do the same, blocking."""
        return self.database.run(lambda: self._seeing(consumer, message_id))

    def _seeing(self, consumer: str, message_id: str) -> Steps[bool]:
        asked = {"consumer": named("consumer", consumer), "message": _digest(message_id)}
        return bool((yield Ask("inbox.seen", asked)))

    async def acleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Remove what is older than `ttl`, `batch` by batch; return how many were.

        It ends after about `within` seconds, done or not: call it now and then.
        """
        return await Cleaning(batch, within, _removing).arun(self.database)

    def cleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Do the same, blocking."""
        return Cleaning(batch, within, _removing).run(self.database)

    def snapshot(self) -> dict[str, Any]:
        """Return how many deliveries of this process were handled, dropped, and failed."""
        with self._mutex:
            kinds = {kind: dict(counts) for kind, counts in self._counts.items()}
        consumers = sorted({name for counts in kinds.values() for name in counts})
        return {
            **{kind: sum(counts.values()) for kind, counts in kinds.items()},
            "consumers": {
                name: {kind: counts.get(name, 0) for kind, counts in kinds.items()}
                for name in consumers
            },
        }

    def _count(self, kind: str, consumer: str) -> None:
        with self._mutex:
            counts = self._counts[kind]
            if consumer not in counts and len(counts) >= MOST_CONSUMERS:
                consumer = "others"
            counts[consumer] += 1

    def _after_fork(self) -> None:
        self._mutex = Mutex()


class _Once(Block[bool]):
    """One delivery."""

    def __init__(self, inbox: Inbox, connection: Connection, noting: dict[str, Any]) -> None:
        super().__init__(connection)
        self._inbox = inbox
        self._noting = noting
        self._first: bool | None = None

    def _begin(self) -> Steps[bool]:
        ttl = int(self._inbox.ttl * 1_000_000)
        first = self._first = bool((yield Ask("inbox.note", {**self._noting, "ttl": ttl})))
        return first

    def _end(self) -> Steps[None]:
        self._count("handled" if self._first else "duplicates")
        return
        yield

    def _undo(self) -> Steps[None]:
        self._count("failed")
        if self._first is not False:  # or it is not known: it was cancelled while it was asked
            yield Ask("inbox.forget", self._noting)

    def _count(self, kind: str) -> None:
        self._inbox._count(kind, self._noting["consumer"])


def _removing(batch: int) -> Steps[int]:
    return len((yield Ask("inbox.cleanup", {"batch": batch})))


def _digest(message_id: str) -> bytes:
    if not isinstance(message_id, str):
        raise TypeError(f"message_id={message_id!r}: write text, such as the event's id")
    if not 0 < len(message_id) <= LONGEST_ID:
        raise ValueError(f"message_id: write 1 to {LONGEST_ID} characters")
    return blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=32).digest()
