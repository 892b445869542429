"""Effects that happen once: a request that is repeated gets the answer of the first.

Promises, for each (scope, operation, key): one runs at a time, and one is completed. A repeat gets
the stored answer byte for byte; another payload is told apart (`Mismatch`, `KeyReused`); while the
first is at work the others learn how long to wait, or wait. Who does not end within its lease may
be taken over, and is then refused whatever it says later. All times are the database's.

Three ways in: `reserve` and `complete` (the ASGI middleware is built on them, and the decorator
`idempotent`); `once` inside a transaction of the user's, where key and effect are committed
together; and `asingle`, one statement for the hot path on PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import Any, Final, Literal, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable import _idempotency_records as records
from seawall.durable._blocks import named
from seawall.durable._cleaning import Cleaning
from seawall.durable._idempotency_asking import Waiting, wanted_of
from seawall.durable._idempotency_function import Codec, Function, idempotent_function
from seawall.durable._idempotency_keeping import Keeper, akeeping, regardless
from seawall.durable._idempotency_once import Once, Outbox
from seawall.durable._idempotency_records import KeyEvent, KeyRecord, Terms, Wanted
from seawall.durable._idempotency_single import Single, asingle, single
from seawall.durable._together import gathering
from seawall.durable.database import Database
from seawall.errors import (
    AnswerNotKept,
    KeyInFlight,
    KeyMissing,
    KeyReused,
    RecordedFailure,
    RecordGarbled,
)
from seawall.models.idempotency import (
    Answer,
    Fresh,
    KeyClaim,
    KeyState,
    Mismatch,
    Pending,
    Replay,
    fingerprint_of,
)
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.mutex import Mutex, survives_fork

__all__ = [
    "Answer",
    "AnswerNotKept",
    "Fresh",
    "Idempotency",
    "KeyClaim",
    "KeyEvent",
    "KeyInFlight",
    "KeyMissing",
    "KeyRecord",
    "KeyReused",
    "KeyState",
    "Mismatch",
    "Once",
    "Pending",
    "RecordGarbled",
    "RecordedFailure",
    "Replay",
    "Single",
    "fingerprint_of",
]

F = TypeVar("F", bound=Callable[..., Any])

WITHDRAWING: Final = 1.0
"""Seconds for which who was cancelled tries to give back what it may have taken."""

_SECOND: Final = 1_000_000
_COUNTED: Final = (
    *("fresh", "taken_over", "replays", "in_flight", "reused"),
    *("completed", "failed", "abandoned", "forgotten", "refused_late", "cleaned"),
    *("together", "apart"),
)


class Idempotency:
    """Keys and their answers, in a database."""

    def __init__(
        self,
        database: Database,
        *,
        lease: float = 30.0,
        ttl: float = 86400.0,
        max_body: int = 1024 * 1024,
        unscoped: bool = False,
        together: int = 1,
        name: str = "idempotency",
        clock: Clock | None = None,
    ) -> None:
        """Keep answers for `ttl` seconds, with bodies of up to `max_body` bytes.

        Who has not completed (or renewed) after `lease` seconds may be taken over. `unscoped=True`
        allows `scope=None`: then whoever knows a key gets its answer. Up to `together` calls
        of `asingle` share a commit. `clock` is for who waits.
        """
        if not isinstance(database, Database):
            raise TypeError(f"database={database!r}: pass a Database, such as Database(pool)")
        self.database, self.name = database, named("name", name)
        self.lease = check.seconds("lease", lease)
        self.ttl = check.seconds("ttl", ttl)
        if self.ttl <= self.lease:
            raise ValueError(f"ttl={ttl!r}: write more than the lease of {lease!r} seconds")
        self.max_body = check.count("max_body", max_body, minimum=0)
        self.unscoped = check.flag("unscoped", unscoped)
        self._together = gathering(database, together, self._count)
        self.terms = Terms(int(lease * _SECOND), int(ttl * _SECOND), max_body)
        self._clock = None if clock is None else check_clock(clock)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._mutex = Mutex()
        self._keeper = Keeper(self.lease, self._renewed, lambda: self._count("refused_late"))
        survives_fork(self)
        registry.enter(self, "idempotency", self.name)

    @property
    def clock(self) -> Clock:
        """The clock of those who wait and block."""
        return self._clock or current_clock()

    def __repr__(self) -> str:
        return f"<Idempotency {self.name!r}: lease={self.lease:g}, ttl={self.ttl:g}>"

    def snapshot(self) -> dict[str, int]:
        """Return what this process has seen, in numbers."""
        with self._mutex:
            return dict(self._counts)

    def _after_fork(self) -> None:
        self._mutex = Mutex()

    def _count(self, *happened: str, by: int = 1) -> None:
        counts = self._counts
        if LOCK_FREE:
            for what in happened:
                counts[what] += by
            return
        with self._mutex:
            for what in happened:
                counts[what] += by

    # Reserving

    def reserve(
        self,
        scope: str | None,
        operation: str,
        key: str,
        fingerprint: object,
        *,
        wait: float = 0.0,
    ) -> KeyState:
        """Take the record of a key, or tell why not: what was answered, or who is at it.

        `scope` is whose key it is: tenant and principal. `fingerprint` is the payload, or stands
        for it: bytes, text, or what `Outbox.add` takes as a payload (compared as JSON, whatever the
        order of members); None is for not comparing. Who finds another at work waits
        for up to `wait` seconds, or until shortly before its deadline, without a connection.
        """
        wanted = self._wanted(scope, operation, key, fingerprint)
        clock = self.clock
        waiting = Waiting(wait, clock.now())
        while True:
            found = self.database.run(lambda: records.reserve(wanted, self.terms))
            pause = waiting.pause(found, clock.now())
            if pause is None:
                return self._counted(found)
            clock.sleep(pause)

    async def areserve(
        self,
        scope: str | None,
        operation: str,
        key: str,
        fingerprint: object,
        *,
        wait: float = 0.0,
    ) -> KeyState:
        """Do the same, awaiting. Who is cancelled meanwhile has taken nothing."""
        wanted = self._wanted(scope, operation, key, fingerprint)
        loop = asyncio.get_running_loop()
        waiting = Waiting(wait, loop.time())
        while True:
            try:
                found = await self.database.arun(lambda: records.reserve(wanted, self.terms))
            except asyncio.CancelledError:
                # It may have been committed by now, and nobody would complete it. Where that cannot
                # be undone soon, the lease will be over: who is cancelled has to end.
                with suppress(Exception), regardless():
                    async with asyncio.timeout(WITHDRAWING):
                        await self.database.arun(lambda: records.withdraw(wanted))
                raise
            pause = waiting.pause(found, loop.time())
            if pause is None:
                return self._counted(found)
            await asyncio.sleep(pause)  # noqa: TID251 - the loop's own time, virtual or not

    def _wanted(self, *named: Any, owned: bool = True) -> Wanted:
        """Check what names a record (`wanted_of`), and return it."""
        return wanted_of(*named, unscoped=self.unscoped, owned=owned)

    def _counted(self, found: KeyState) -> KeyState:
        match found:
            case Fresh(claim):
                self._count("taken_over" if claim.taken_over else "fresh")
            case Replay():
                self._count("replays")
            case Pending():
                self._count("in_flight")
            case Mismatch():
                self._count("reused")
        return found

    # What becomes of a claim

    def complete(self, claim: KeyClaim, answer: object, *, failed: bool = False) -> bool:
        """Store the answer (an `Answer`, bytes, or what JSON has) for all who come again.

        False: somebody took over, and this answer is refused. A body over `max_body` is not kept,
        but that it was done is: nobody does it again. Said twice, it is as said once.
        """
        self._check_claim(claim)
        said = records.stored(answer, self.terms, failed=check.flag("failed", failed))
        with regardless():
            done = self.database.run(lambda: records.complete(claim, said, self.terms))
        return self._told("failed" if failed else "completed", done=done)

    async def acomplete(self, claim: KeyClaim, answer: object, *, failed: bool = False) -> bool:
        """Do the same, awaiting."""
        self._check_claim(claim)
        said = records.stored(answer, self.terms, failed=check.flag("failed", failed))
        with regardless():
            done = await self.database.arun(lambda: records.complete(claim, said, self.terms))
        return self._told("failed" if failed else "completed", done=done)

    def abandon(self, claim: KeyClaim) -> bool:
        """Keep nothing: the next one runs. False: somebody took over."""
        self._check_claim(claim)
        with regardless():
            done = self.database.run(lambda: records.abandon(claim))
        return self._told("abandoned", done=done)

    async def aabandon(self, claim: KeyClaim) -> bool:
        """Do the same, awaiting."""
        self._check_claim(claim)
        with regardless():
            done = await self.database.arun(lambda: records.abandon(claim))
        return self._told("abandoned", done=done)

    def renew(self, claim: KeyClaim) -> bool:
        """Let the lease begin anew. False: somebody took over, so stop."""
        self._check_claim(claim)
        return self._told(None, done=self._renewed(claim))

    async def arenew(self, claim: KeyClaim) -> bool:
        """Do the same, awaiting."""
        self._check_claim(claim)
        done = await self.database.arun(lambda: records.renew(claim, self.terms))
        return self._told(None, done=done)

    def _renewed(self, claim: KeyClaim) -> bool:
        return self.database.run(lambda: records.renew(claim, self.terms))

    def keeping(self, claim: KeyClaim) -> AbstractContextManager[None]:
        """Renew the lease of `claim` while the block runs, in a thread that all blocks share."""
        self._check_claim(claim)
        return self._keeper.keeping(claim)

    def akeeping(self, claim: KeyClaim) -> AbstractAsyncContextManager[None]:
        """Do the same in a task."""
        self._check_claim(claim)
        return akeeping(lambda: self.arenew(claim), self.lease)

    def _told(self, what: str | None, *, done: bool) -> bool:
        if not done:
            self._count("refused_late")
        elif what is not None:
            self._count(what)
        return done

    def _check_claim(self, claim: KeyClaim) -> None:
        if not isinstance(claim, KeyClaim):
            raise TypeError(f"claim={claim!r}: pass the claim of a Fresh reservation")

    def lookup(self, scope: str | None, operation: str, key: str) -> KeyRecord | None:
        """Tell an operator how a key is, and which events were committed with it; None: no record.

        The events are those of `Once.answer` and `Keyed.complete`, while the outbox keeps them.
        """
        wanted = self._wanted(scope, operation, key, None, owned=False)
        return self.database.run(lambda: records.lookup(wanted))

    async def alookup(self, scope: str | None, operation: str, key: str) -> KeyRecord | None:
        """Do the same, awaiting."""
        wanted = self._wanted(scope, operation, key, None, owned=False)
        return await self.database.arun(lambda: records.lookup(wanted))

    def forget(self, scope: str | None, operation: str, key: str) -> bool:
        """Remove the record of a key, so that the next request with it runs; False: there is none.

        For operators, who know that its effect did not happen or may happen again. Raises
        `KeyInFlight` where it is being carried out.
        """
        wanted = self._wanted(scope, operation, key, None, owned=False)
        return self._forgotten(operation, self.database.run(lambda: records.forget(wanted)))

    async def aforget(self, scope: str | None, operation: str, key: str) -> bool:
        """Do the same, awaiting."""
        wanted = self._wanted(scope, operation, key, None, owned=False)
        return self._forgotten(operation, await self.database.arun(lambda: records.forget(wanted)))

    def _forgotten(self, operation: str, found: bool | Pending) -> bool:  # noqa: FBT001 - as found
        if isinstance(found, Pending):
            raise KeyInFlight(
                f"{operation!r} is being carried out: ask again when it has ended",
                retry_after=found.retry_after,
            )
        if found:
            self._count("forgotten")
        return found

    # Inside the user's own transaction, and in one statement

    def once(
        self,
        conn: Any,
        *,
        scope: str | None,
        operation: str,
        key: str,
        fingerprint: object,
        wait: bool = True,
    ) -> Once:
        """Commit the key with the user's own rows: `async with idempotency.once(conn, ...)`.

        `conn` is the user's connection or session, with a transaction begun. Of two with one key
        the second waits until the first has ended, and then has its answer; or is itself the
        first, if that was rolled back. Without `wait` it raises `KeyInFlight` at once (PostgreSQL):
        who waits holds a connection meanwhile. Raises `KeyReused`, or `KeyInFlight` where the key
        was reserved otherwise.
        """
        wanted = self._wanted(scope, operation, key, fingerprint)
        waits = check.flag("wait", wait)
        return Once(self.database.connection(conn), wanted, self.terms, self._count, wait=waits)

    async def asingle(
        self,
        sql: str,
        arguments: dict[str, Any],
        *,
        scope: str | None,
        operation: str,
        key: str,
        fingerprint: object,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        conn: Any = None,
    ) -> Single:
        """Do the user's own statement with its key, and events, as one: in one round trip.

        `sql` is an INSERT, UPDATE or DELETE that ends with RETURNING what a repeat is to be told,
        with parameters as `:name`. The statement is a transaction of its own (PostgreSQL only), on
        a connection of the database's, or on `conn`, which is in no transaction.
        Where it returns no row nothing was done, and the key stays free. `events` (each a
        `NewEvent`) are added to `outbox`; they may have columns of the row (`FromRow`). Raises as
        `once` does.
        """
        wanted = self._wanted(scope, operation, key, fingerprint, owned=False)
        return await asingle(self, sql, arguments, wanted, outbox, events, conn)

    def single(
        self,
        sql: str,
        arguments: dict[str, Any],
        *,
        scope: str | None,
        operation: str,
        key: str,
        fingerprint: object,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        conn: Any = None,
    ) -> Single:
        """Do the same, blocking."""
        wanted = self._wanted(scope, operation, key, fingerprint, owned=False)
        return single(self, sql, arguments, wanted, outbox, events, conn)

    # For any function

    def idempotent(
        self,
        *,
        operation: str | None = None,
        key: str | Function | None = None,
        scope: str | Function | None = None,
        fingerprint: Literal["arguments"] | Function | None = "arguments",
        wait: float = 0.0,
        keep: type[Exception] | Sequence[type[Exception]] = (),
        codec: Codec | None = None,
    ) -> Callable[[F], F]:
        """Make a function one that is done once for each key: what it returned is returned again.

        `key` and `scope` name arguments of the function, or are functions of its arguments; unless
        given they are `current_idempotency_key()` and `current_tenant()`. The `operation` is the
        function's name. The payload that is compared is all arguments, as JSON; or what the
        function `fingerprint` makes of them; None is for not comparing.

        What it raises is not kept, and the next one runs; errors of the classes in `keep` are, and
        raised again as `RecordedFailure`. Results are JSON, unless `codec` (with `dumps` to bytes
        and `loads`) says otherwise. While the function runs its lease is renewed.
        """
        return idempotent_function(
            self, operation, key, scope, fingerprint, wait=wait, keep=keep, codec=codec
        )

    # Cleaning up

    def cleanup(self, *, batch: int = 1000, within: float = 10.0) -> int:
        """Remove what is over, `batch` by batch; return how many that were.

        It ends after about `within` seconds, done or not: call it now and then.
        """
        gone = Cleaning(batch, within, records.clean).run(self.database)
        self._count("cleaned", by=gone)
        return gone

    async def acleanup(self, *, batch: int = 1000, within: float = 10.0) -> int:
        """Do the same, awaiting."""
        gone = await Cleaning(batch, within, records.clean).arun(self.database)
        self._count("cleaned", by=gone)
        return gone
