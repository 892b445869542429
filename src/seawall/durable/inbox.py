"""Inbox: process each message once, however often it is delivered.

Promises:

- The message's id is recorded for its consumer in the transaction of the effect. So both exist or
  neither.
- Of two concurrent deliveries, one is processed. The other waits for the first one's transaction,
  and is dropped if that commits, or processed if it does not.
- Records are forgotten after `ttl`.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import Connection, NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import stored_name
from seawall.durable.database.transaction_block import TransactionBlock
from seawall.durable.database.twins import transaction_twins, twins
from seawall.runtime.driver import Steps
from seawall.runtime.mutex import Mutex

__all__ = ["Inbox"]

LONGEST_ID: Final = 4096
"""Maximum characters of a message's id. Only a hash is stored, so an id may hold anything."""

BATCH: Final = 1000
_COUNTED: Final = ("handled", "duplicates", "failed")
MOST_CONSUMERS: Final = 1000
"""Maximum number of consumers with their own counts; the rest is counted as "others"."""


class Inbox:
    """The messages that the consumers of a database have processed."""

    def __init__(self, database: Database, *, ttl: float = 14 * 86_400.0) -> None:
        """Remember messages for `ttl` seconds: longer than any redelivery can take."""
        self.database = checked_database("Inbox", database)
        self.ttl = check.seconds("ttl", ttl)
        self._counts: dict[str, Counter[str]] = {kind: Counter() for kind in _COUNTED}
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "inbox", database.name)

    def __repr__(self) -> str:
        return f"<Inbox of {self.database!r}: ttl={self.ttl:g}>"

    def once(self, conn: Any, consumer: str, message_id: str) -> TransactionBlock[bool]:
        """Yield whether to process this delivery: `async with inbox.once(...) as first:`.

        `conn` must have an open transaction, which also contains the effect: commit it after the
        block. For a blocking connection, write `with`. If the block raises, the message counts as
        not processed, even if the transaction is then committed.
        """
        record = {
            "consumer": stored_name("consumer", consumer),
            "message": _digest(message_id),
            "token": token_bytes(16),
        }
        return _Once(self, self.database.connection(conn), record)

    def _seen(self, consumer: str, message_id: str) -> Steps[bool]:
        """Return whether a message was processed, according to the committed records."""
        arguments = {"consumer": stored_name("consumer", consumer), "message": _digest(message_id)}
        return bool((yield NamedQuery("inbox.seen", arguments)))

    seen, aseen = transaction_twins(_seen)

    def _cleanup(self, *, batch: int = BATCH, within: float = 10.0) -> Steps[int]:
        """Remove records older than `ttl`, in batches; return how many were removed.

        It ends after about `within` seconds, finished or not: call it periodically.
        """
        return cleaning_steps(batch, within, NamedQuery("inbox.cleanup", {}))

    cleanup, acleanup = twins(_cleanup)

    def snapshot(self) -> dict[str, Any]:
        """Return how many deliveries this process processed, dropped and failed."""
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


class _Once(TransactionBlock[bool]):
    """One delivery."""

    def __init__(self, inbox: Inbox, connection: Connection, record: dict[str, Any]) -> None:
        super().__init__(connection)
        self._inbox = inbox
        self._record = record
        self._first: bool | None = None

    def _begin(self) -> Steps[bool]:
        ttl = int(self._inbox.ttl * 1_000_000)
        first = self._first = bool((yield NamedQuery("inbox.note", {**self._record, "ttl": ttl})))
        return first

    def _end(self) -> Steps[None]:
        self._inbox._count("handled" if self._first else "duplicates", self._record["consumer"])
        return
        yield

    def _undo(self) -> Steps[None]:
        self._inbox._count("failed", self._record["consumer"])
        if self._first is not False:  # None: cancelled while asking, so it may have been recorded
            yield NamedQuery("inbox.forget", self._record)


def _digest(message_id: str) -> bytes:
    if not isinstance(message_id, str):
        raise TypeError(f"message_id={message_id!r}: write text, such as the event's id")
    if not 0 < len(message_id) <= LONGEST_ID:
        raise ValueError(f"message_id: write 1 to {LONGEST_ID} characters")
    return blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=32).digest()
