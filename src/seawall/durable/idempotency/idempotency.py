"""Effects that happen once: a repeated request gets the answer of the first.

Promises, for each (scope, operation, key):

- One request runs at a time, and one is completed.
- A repeat gets the stored answer byte for byte. A different payload is detected (`Mismatch`,
  `KeyReused`).
- While the first request is running, others are given a time to wait, or wait.
- A request that does not end within its lease may be taken over; its later writes are refused.
- All times are those of the database.

There are three interfaces: `reserve` and `complete` (used by the ASGI middleware and by the
decorator `idempotent`); `once` inside a transaction of the user, where key and effect are committed
together; and `asingle`, one statement for the hot path on PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import Any, Final, Literal, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, checked_database, without_deadline
from seawall.durable.database.statements import stored_name
from seawall.durable.database.twins import twins
from seawall.durable.idempotency import records
from seawall.durable.idempotency.decorator import Function, ResultCodec, idempotent_function
from seawall.durable.idempotency.lease_renewal import LeaseKeeper, akeeping
from seawall.durable.idempotency.once import Once
from seawall.durable.idempotency.records import (
    KeyRecord,
    KeyRequest,
    KeyTerms,
    KeyWait,
    key_request,
)
from seawall.durable.idempotency.single_statement import Single, single
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import KeyInFlight
from seawall.models.idempotency import Fresh, KeyClaim, KeyState, Mismatch, Pending, Replay
from seawall.runtime.driver import Steps
from seawall.runtime.mutex import LOCK_FREE, Mutex

F = TypeVar("F", bound=Callable[..., Any])

WITHDRAW_TIMEOUT: Final = 1.0
"""Seconds for which a cancelled call tries to give back a record that it may have taken."""

_SECOND: Final = 1_000_000
_COUNTED: Final = (
    *("fresh", "taken_over", "replays", "in_flight", "reused"),
    *("completed", "failed", "abandoned", "forgotten", "refused_late", "cleaned"),
)


class Idempotency:
    """Idempotency keys and their answers, in a database."""

    def __init__(
        self,
        database: Database,
        *,
        lease: float = 30.0,
        ttl: float = 86400.0,
        max_body: int = 1024 * 1024,
        unscoped: bool = False,
        name: str = "idempotency",
        clock: Clock | None = None,
    ) -> None:
        """Keep answers for `ttl` seconds, with bodies of up to `max_body` bytes.

        A request that has not completed or renewed after `lease` seconds may be taken over.
        `unscoped=True` allows `scope=None`: then every caller that knows a key gets its answer.
        `clock` is used for waiting.
        """
        self.database = checked_database("Idempotency", database)
        self.name = stored_name("name", name)
        self.lease = check.seconds("lease", lease)
        self.ttl = check.seconds("ttl", ttl)
        if self.ttl <= self.lease:
            raise ValueError(f"ttl={ttl!r}: write more than the lease of {lease!r} seconds")
        self.max_body = check.count("max_body", max_body, minimum=0)
        self.unscoped = check.flag("unscoped", unscoped)
        self.terms = KeyTerms(int(lease * _SECOND), int(ttl * _SECOND), max_body)
        self._clock = None if clock is None else check_clock(clock)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._mutex = Mutex()
        self._keeper = LeaseKeeper(
            self.lease, self._renew_uncounted, lambda: self._count("refused_late")
        )
        survives_fork(self)
        registry.enter(self, "idempotency", self.name)

    @property
    def clock(self) -> Clock:
        """The clock for blocking waits."""
        return self._clock or current_clock()

    def __repr__(self) -> str:
        return f"<Idempotency {self.name!r}: lease={self.lease:g}, ttl={self.ttl:g}>"

    def snapshot(self) -> dict[str, int]:
        """Return the counters of this process."""
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
        self, scope: str | None, operation: str, key: str, fingerprint: object, *, wait: float = 0.0
    ) -> KeyState:
        """Take the record of a key, or return why not: its answer, or that it is in flight.

        `scope` is the owner of the key: tenant and principal. `fingerprint` is the payload or
        represents it: bytes, text, or any payload that `Outbox.add` accepts (compared as JSON, in
        any order of members); None disables the comparison. If another request is running, wait up
        to `wait` seconds, or until shortly before the deadline, without holding a connection.
        """
        request = self._key_request(scope, operation, key, fingerprint)
        clock = self.clock
        waiting = KeyWait(wait, clock.now())
        while True:
            found = self.database.run(lambda: records.reserve(request, self.terms))
            pause = waiting.pause(found, clock.now())
            if pause is None:
                return self._count_state(found)
            clock.sleep(pause)

    async def areserve(
        self, scope: str | None, operation: str, key: str, fingerprint: object, *, wait: float = 0.0
    ) -> KeyState:
        """Async twin of `reserve`. If cancelled meanwhile, it has taken nothing."""
        request = self._key_request(scope, operation, key, fingerprint)
        loop = asyncio.get_running_loop()
        waiting = KeyWait(wait, loop.time())
        while True:
            try:
                found = await self.database.arun(lambda: records.reserve(request, self.terms))
            except asyncio.CancelledError:
                # The record may be committed by now, without a caller to complete it: withdraw it.
                # If that does not succeed soon, its lease expires; a cancelled task must end.
                with suppress(Exception), without_deadline():
                    async with asyncio.timeout(WITHDRAW_TIMEOUT):
                        await self.database.arun(lambda: records.withdraw(request))
                raise
            pause = waiting.pause(found, loop.time())
            if pause is None:
                return self._count_state(found)
            await asyncio.sleep(pause)  # noqa: TID251 - the loop's own time, virtual or not

    def _key_request(self, *named: Any, owned: bool = True) -> KeyRequest:
        """Check the arguments that name a record with `key_request`, and return them."""
        return key_request(*named, unscoped=self.unscoped, owned=owned)

    def _count_state(self, found: KeyState) -> KeyState:
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

    # Operations on a claim

    def _complete(self, claim: KeyClaim, answer: object, *, failed: bool = False) -> Steps[bool]:
        """Store the answer (an `Answer`, bytes, or a JSON value) for all repeats.

        Returns False if the claim was taken over: this answer is then refused. A body over
        `max_body` is not stored, but the completion is: no repeat runs. Completing twice has the
        effect of once.
        """
        self._check_claim(claim)
        columns = records.stored(answer, self.terms, failed=check.flag("failed", failed))
        with without_deadline():
            done = yield lambda: records.complete(claim, columns, self.terms)
        return self._count_end("failed" if failed else "completed", done=done)

    complete, acomplete = twins(_complete)

    def _abandon(self, claim: KeyClaim) -> Steps[bool]:
        """Remove the record, so that the next request runs; return False if it was taken over."""
        self._check_claim(claim)
        with without_deadline():
            done = yield lambda: records.abandon(claim)
        return self._count_end("abandoned", done=done)

    abandon, aabandon = twins(_abandon)

    def _renew(self, claim: KeyClaim) -> Steps[bool]:
        """Restart the lease. Returns False if the claim was taken over: stop working then."""
        self._check_claim(claim)
        return self._count_end(None, done=(yield lambda: records.renew(claim, self.terms)))

    renew, arenew = twins(_renew)

    def _renew_uncounted(self, claim: KeyClaim) -> bool:
        return self.database.run(lambda: records.renew(claim, self.terms))

    def keeping(self, claim: KeyClaim) -> AbstractContextManager[None]:
        """Renew the lease of `claim` while the block runs, in a thread shared by all blocks."""
        self._check_claim(claim)
        return self._keeper.keeping(claim)

    def akeeping(self, claim: KeyClaim) -> AbstractAsyncContextManager[None]:
        """Async twin of `keeping`; renews in a task."""
        self._check_claim(claim)
        return akeeping(lambda: self.arenew(claim), self.lease)

    def _count_end(self, what: str | None, *, done: bool) -> bool:
        if not done:
            self._count("refused_late")
        elif what is not None:
            self._count(what)
        return done

    def _check_claim(self, claim: KeyClaim) -> None:
        if not isinstance(claim, KeyClaim):
            raise TypeError(f"claim={claim!r}: pass the claim of a Fresh reservation")

    def _lookup(self, scope: str | None, operation: str, key: str) -> Steps[KeyRecord | None]:
        """Return the record of a key for an operator, with its events; None if there is none.

        The events are those of `Once.answer` and `IdempotentRequest.complete`, while the outbox
        keeps them.
        """
        request = self._key_request(scope, operation, key, None, owned=False)
        record: KeyRecord | None = yield lambda: records.lookup(request)
        return record

    lookup, alookup = twins(_lookup)

    def _forget(self, scope: str | None, operation: str, key: str) -> Steps[bool]:
        """Remove the record of a key, so that the next request runs; False if there is none.

        For operators who know that its effect did not happen or may happen again. Raises
        `KeyInFlight` if the request is running.
        """
        request = self._key_request(scope, operation, key, None, owned=False)
        found: bool | Pending = yield lambda: records.forget(request)
        if isinstance(found, Pending):
            raise KeyInFlight(
                f"{operation!r} is being carried out: ask again when it has ended",
                retry_after=found.retry_after,
            )
        if found:
            self._count("forgotten")
        return found

    forget, aforget = twins(_forget)

    # In the user's transaction, and in one statement

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

        `conn` is the user's connection or session, with an open transaction. Of two transactions
        with one key, the second waits until the first has ended. Then it gets the first one's
        answer, or becomes the first itself after a rollback. Without `wait` it raises `KeyInFlight`
        at once (PostgreSQL), because a waiter occupies a connection. Raises `KeyReused`, or
        `KeyInFlight` if the key was reserved in another way.
        """
        request = self._key_request(scope, operation, key, fingerprint)
        waits = check.flag("wait", wait)
        return Once(self.database.connection(conn), request, self.terms, self._count, wait=waits)

    def _single(
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
    ) -> Steps[Single]:
        """Execute the user's statement with its key and events in one round trip.

        `sql` is an INSERT, UPDATE or DELETE whose RETURNING is the answer for repeats; parameters
        are written as `:name`. The statement is its own transaction (PostgreSQL only), on a
        connection of the database, or on `conn`, which must not be in a transaction.

        If it returns no row, nothing was done, and the key stays free. `events` (each a `NewEvent`)
        are added to `outbox`; they may use columns of the row (`FromRow`). Raises as `once` does.
        """
        request = self._key_request(scope, operation, key, fingerprint, owned=False)
        return single(self, sql, arguments, request, outbox, events, conn)

    single, asingle = twins(_single)

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
        codec: ResultCodec | None = None,
    ) -> Callable[[F], F]:
        """Decorate a function to run once for each key; repeats return the stored result.

        `key` and `scope` name arguments of the function, or are functions of its arguments; the
        defaults are `current_idempotency_key()` and `current_tenant()`. `operation` defaults to the
        function's name. The compared payload is all arguments as JSON, or the result of the
        function `fingerprint`; None disables the comparison.

        Exceptions are not stored, so the next call runs; those of the classes in `keep` are stored,
        and raised again as `RecordedFailure`. Results are stored as JSON, unless there is a `codec`
        (with `dumps` to bytes, and `loads`). The lease is renewed while the function runs.
        """
        return idempotent_function(
            self, operation, key, scope, fingerprint, wait=wait, keep=keep, codec=codec
        )

    # Cleanup

    def _cleanup(self, *, batch: int = 1000, within: float = 10.0) -> Steps[int]:
        """Remove expired records, in batches; return how many were removed.

        It ends after about `within` seconds, finished or not: call it periodically.
        """
        gone = yield from cleaning_steps(batch, within, NamedQuery("idempotency.clean", {}))
        self._count("cleaned", by=gone)
        return gone

    cleanup, acleanup = twins(_cleanup)
