"""Stored calls: a level for `Fallback`.

Promises:

- A call that was answered with `DeferredCall` is on disk. It is done at least once, or becomes a
  dead letter, which is reported.
- A call repeated with its idempotency key is stored once, and done with that same key.
- About `max_waiting` calls wait at most, and none for longer than `ttl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall.context import current_idempotency_key, current_tenant
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.transaction_block import named
from seawall.durable.database.twins import transaction_twins, twins
from seawall.errors import DeferredCallsFull
from seawall.jobs import DeadLetter
from seawall.runtime.driver import Steps

WAITING, DONE, DEAD = 0, 1, 2
STATES: Final = ("waiting", "done", "dead")
LONGEST_KEY: Final = 1024

redoing: Final[ContextVar[tuple[str, ...]]] = ContextVar("seawall_redoing", default=())
"""The queues whose calls this context is executing: a failed one is not stored a second time."""


class DeferredCall(NamedTuple):
    """The answer to a call that will be done later. As a placeholder, it is `degraded`."""

    id: str
    queue: str
    state: Literal["waiting", "done", "dead"] = "waiting"
    """Current state of the call: for a repeated key it may be done or dead already."""
    again: bool = False
    """Whether a call with the same key had been stored before."""

    @property
    def degraded(self) -> bool:
        """Always True."""
        return True


class DeferredCalls:
    """A queue of stored calls of one function; a level for `Fallback`."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        ttl: float = 86_400.0,
        delay: float = 1.0,
        max_waiting: int = 10_000,
        max_size: int = 64 * 1024,
        keep_dead: float = 30 * 86_400.0,
        key: Callable[..., str | None] | None = None,
    ) -> None:
        """Store calls under `name`; each is done within `ttl` seconds or given up.

        The first attempt is `delay` seconds after the call was stored. Beyond `max_waiting` waiting
        calls, more are refused (`DeferredCallsFull`); concurrent callers may exceed that limit
        slightly. The arguments must be JSON of at most `max_size` bytes. Dead letters are kept for
        `keep_dead` seconds after the ttl. `key(*args, **kwargs)` returns the idempotency key of the
        call. Without it, the context's idempotency key together with the arguments is used, because
        a request may make several calls under one key.
        """
        self.database = checked_database("DeferredCalls", database)
        self.name = named("name", name)
        self.ttl = check.seconds("ttl", ttl)
        self.delay = check.seconds("delay", delay, zero=True)
        self.max_waiting = check.count("max_waiting", max_waiting, maximum=1_000_000)
        self.max_size = check.count("max_size", max_size)
        self.keep_dead = check.seconds("keep_dead", keep_dead, zero=True)
        self._key = None if key is None else check.plain_function("key", key)
        self._totals = dict.fromkeys(("stored", "again", "refused"), 0)
        registry.enter(self, "deferred_calls", self.name, ask="acounts")

    def __repr__(self) -> str:
        return f"DeferredCalls({self.name!r})"

    # Storing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Store a call: immediately, or as an awaitable if an event loop is running."""
        from asyncio import get_running_loop

        try:
            get_running_loop()
        except RuntimeError:
            return self.store(*args, **kwargs)
        return self.astore(*args, **kwargs)

    def _store(self, *args: Any, **kwargs: Any) -> Steps[DeferredCall]:
        """Store a call with these arguments."""
        storing = self._prepared(args, kwargs)
        stored: DeferredCall = yield lambda: self._storing(storing)
        self._totals["again" if stored.again else "stored"] += 1
        return stored

    store, astore = twins(_store)

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.name in redoing.get():
            raise RuntimeError(f"{self!r}: this is a stored call, which is not stored again")
        try:
            call = json.dumps([args, kwargs], allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self!r}: only a call whose arguments are JSON can be stored: {error}"
            ) from None
        if len(call) > self.max_size:
            raise ValueError(f"{self!r}: the arguments take more than {self.max_size} bytes")
        key = current_idempotency_key() if self._key is None else self._key(*args, **kwargs)
        if key is not None and (not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY):
            raise ValueError(f"key: write 1 to {LONGEST_KEY} characters, not {str(key)[:50]!r}")
        if key is not None and not key.isprintable():
            raise ValueError(f"key: write printable characters, not {key[:50]!r}")
        tenant, named_by = current_tenant(), call if self._key is None else None
        return {
            "queue": self.name,
            "id": uuid4().hex,
            "key_hash": None if key is None else _digest(tenant, key, named_by),
            "call": call,
            "key": key,
            "tenant": tenant,
            "delay": _us(self.delay),
            "ttl": _us(self.ttl),
            "most": self.max_waiting,
        }

    def _storing(self, storing: dict[str, Any]) -> Steps[DeferredCall]:
        for _ in range(2):
            rows = yield NamedQuery("deferred_calls.store", storing)
            if rows:
                return DeferredCall(storing["id"], self.name)
            if storing["key_hash"] is None:
                break
            asked = {"queue": self.name, "key_hash": storing["key_hash"]}
            rows = yield NamedQuery("deferred_calls.of_key", asked)
            if not rows:
                continue
            found, state, expired = rows[0]
            if state != DONE or not expired:
                word: Any = STATES[state]
                return DeferredCall(found, self.name, word, again=True)
            yield NamedQuery("deferred_calls.drop_done", {"id": found})
        self._totals["refused"] += 1
        raise DeferredCallsFull(f"{self!r}: {self.max_waiting} calls are waiting", policy=self.name)

    # Executing

    async def run(self, function: Callable[..., Any], **options: Any) -> None:
        """Execute stored calls with `function` until cancelled, by a `DeferredCallWorker`."""
        from seawall.durable.deferred.worker import DeferredCallWorker

        await DeferredCallWorker(self, function, **options).run()

    # Dead letters, counts and cleanup

    def _dead(self, limit: int = 100) -> Steps[list[DeadLetter]]:
        """Return the dead letters in the order in which they were stored."""
        most = check.count("limit", limit, maximum=10_000)
        rows = yield NamedQuery("deferred_calls.dead_letters", {"queue": self.name, "most": most})
        letters = []
        for found, attempts, call, error in rows:
            arguments = decoded(call)
            payload = None if arguments is None else list(arguments)
            letters.append(DeadLetter(found, payload, attempts, *split_report(error or "")))
        return letters

    dead, adead = transaction_twins(_dead)

    def _retry(self, dead: str) -> Steps[bool]:
        """Queue a dead letter again as if it were stored now; return False if it does not exist."""
        asked = {"queue": self.name, "id": named("id", dead), "ttl": _us(self.ttl)}
        return bool((yield NamedQuery("deferred_calls.revive", asked)))

    retry, aretry = transaction_twins(_retry)

    def _discard(self, stored: str) -> Steps[bool]:
        """Remove a waiting or dead call; return False if it does not exist or is running."""
        asked = {"queue": self.name, "id": named("id", stored)}
        return bool((yield NamedQuery("deferred_calls.discard", asked)))

    discard, adiscard = transaction_twins(_discard)

    def _counts(self) -> Steps[dict[str, Any]]:
        """Return the numbers of waiting, done and dead calls, and the age of the oldest waiting."""
        rows = yield NamedQuery("deferred_calls.counts", {"queue": self.name})
        found = {state: (number, age) for state, number, age in rows}
        counts: dict[str, Any] = {
            word: found.get(state, (0, 0))[0] for state, word in enumerate(STATES)
        }
        counts["oldest"] = max(0, found.get(WAITING, (0, 0))[1]) / 1_000_000
        registry.answered(self, counts)
        return counts

    counts, acounts = transaction_twins(_counts)

    def _cleanup(self, *, batch: int = 1000, within: float = 10.0) -> Steps[int]:
        """Remove finished calls past their retention, in batches; return how many were removed.

        It ends after about `within` seconds, finished or not: call it periodically.
        """
        return cleaning_steps(batch, within, self._removing)

    cleanup, acleanup = twins(_cleanup)

    def _removing(self, batch: int) -> Steps[int]:
        asked = {"queue": self.name, "keep_dead": _us(self.keep_dead), "batch": batch}
        return len((yield NamedQuery("deferred_calls.cleanup", asked)))

    def snapshot(self) -> dict[str, Any]:
        """Return how many calls this process stored, found stored and refused. See `acounts`."""
        return {"queue": self.name, "max_waiting": self.max_waiting, **self._totals}


def decoded(call: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of a stored call; None if the record is not a valid call."""
    try:
        args, kwargs = json.loads(call)
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        return None
    return args, kwargs


def _digest(tenant: str | None, key: str, call: str | None) -> bytes:
    """Return the lookup key of a call: different for each tenant, key and set of arguments."""
    arguments = None if call is None else json.loads(call)
    whole = json.dumps([tenant, key, arguments], sort_keys=True)
    return blake2b(whole.encode(), digest_size=32).digest()


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)
