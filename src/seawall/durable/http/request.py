"""One request with a key: the decision by its record, and the outcome of its claim."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described
from seawall.durable.database.database import without_deadline
from seawall.durable.http import responses as answers
from seawall.durable.http.completion import IdempotentRequest, RequestName
from seawall.durable.http.exchange import UNSEEN, RecordedExchange, StillOpen
from seawall.durable.idempotency import records
from seawall.durable.idempotency.lease_renewal import LeaseRenewal, uninterrupted
from seawall.errors import RecordGarbled
from seawall.models.idempotency import (
    Answer,
    Fresh,
    Garbled,
    KeyClaim,
    KeyState,
    Mismatch,
    Pending,
    Replay,
)
from seawall.runtime.driver import sleep_async
from seawall.web.asgi_types import Send
from seawall.web.problems import FAILURE, Problem, send_problem

if TYPE_CHECKING:
    from seawall.durable.http.middleware import IdempotentRequests

Scope = MutableMapping[str, Any]
Instead = Callable[[], Awaitable[None]] | None
"""A sender of a response that replaces the app's own; None if the app's own is sent."""

SCOPE_KEY: Final = "seawall.idempotency"
"""The key in the ASGI scope under which the app finds the `IdempotentRequest`."""

PAUSES: Final = (0.1, 0.4, 1.6)
"""Seconds between attempts to record a response while the database is unreachable."""


class RequestExecution:
    """One request with a key: the decision by its record, and the outcome of its claim."""

    def __init__(self, owner: IdempotentRequests, name: RequestName, send: Send) -> None:
        self._owner = owner
        self._idempotency = owner.idempotency
        self._name = name
        self._send = send
        self._claim: KeyClaim | None = None
        self._idempotent: IdempotentRequest | None = None
        self._renewal: LeaseRenewal | None = None

    async def serve(self, scope: Scope, body: bytes) -> None:
        """Look up the record, and run the request or send the stored response."""
        try:
            found = await self._reserve(self._owner.wait)
        except RecordGarbled as error:
            await self._tell_unreadable(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, none runs without a record
            self._owner._count("store_away")
            self._log(error)
            await send_problem(self._send, answers.store_away(error, 1.0), [])
        else:
            if isinstance(found, Fresh):
                await self._execute(found.claim, scope, body)
            else:
                await self._tell(found)

    async def _reserve(self, wait: float = 0.0) -> KeyState:
        """Reserve the key. If cancelled meanwhile, it has taken nothing."""
        scope, operation, key, fingerprint = self._name
        return await self._idempotency.areserve(scope, operation, key, fingerprint, wait=wait)

    async def _tell(self, found: Replay | Pending | Mismatch) -> None:
        """Respond without running the request."""
        if isinstance(found, Replay):
            await self._replay(found.answer)
        elif isinstance(found, Mismatch):
            self._owner._count("reused")
            await send_problem(self._send, answers.REUSED, [])
        else:
            self._owner._count("in_flight")
            wait = min(found.retry_after, self._owner.retry_after)
            await send_problem(self._send, answers.in_flight(wait), [])

    async def _replay(self, answer: Answer) -> None:
        """Send the stored response; if it cannot be sent, report that and run nothing."""
        try:
            await answers.send_stored(self._send, answer, self._owner.never, replayed=True)
        except Garbled as error:
            await self._tell_unreadable(error)
        else:
            self._owner._count("replays")

    async def _tell_unreadable(self, error: Exception) -> None:
        self._owner._count("unreadable")
        self._log(error)
        await send_problem(self._send, answers.UNREADABLE, [])

    # Executing

    async def _execute(self, claim: KeyClaim, scope: Scope, body: bytes) -> None:
        owner, idempotency = self._owner, self._idempotency
        self._claim = claim
        self._idempotent = IdempotentRequest(self._name, claim, idempotency, owner.never)
        owner._count("executed")
        if claim.taken_over:
            owner._count("taken_over")
        exchange = RecordedExchange(body, self._send, self, idempotency.max_body, owner.never)
        self._renewal = renewal = LeaseRenewal(idempotency.lease, lambda: idempotency.arenew(claim))
        offered = scope.get("extensions")
        outer = scope.get(SCOPE_KEY)
        scope[SCOPE_KEY] = self._idempotent
        if offered:
            scope["extensions"] = {name: offered[name] for name in offered if name not in UNSEEN}
        try:
            await exchange.run(owner.app, scope)
        finally:
            # The scope itself is changed and restored, because outer middleware may look at it.
            if outer is None:
                scope.pop(SCOPE_KEY, None)
            else:
                scope[SCOPE_KEY] = outer
            if offered:
                scope["extensions"] = offered
            await renewal.stop()

    async def settle(self, answer: Answer, outcome: answers.RequestOutcome) -> Instead:
        """Record `answer` or free the key; return a sender of another response, if needed."""
        settled = await self._completed_by_the_app(answer)
        if settled is not None:
            return settled[0]
        outcome = outcome._replace(rolled_back=self._completion_tried)
        if self._keeps(outcome):
            return await self._complete(answer, failed=outcome.status >= FAILURE)
        instead = await self._free()
        return self._telling(answers.NOT_DONE) if not instead and outcome.error else instead

    def _keeps(self, outcome: answers.RequestOutcome) -> bool:
        """Ask `keep=`, then the default. A `keep=` that raises must not cause a second effect."""
        said = None
        if self._owner.keep is not None:
            try:
                said = self._owner.keep(outcome)
            except Exception as error:  # noqa: BLE001 - the user's function; logged
                self._log(error)
                return True
        return answers.keeps(outcome) if said is None else bool(said)

    async def _complete(self, answer: Answer, *, failed: bool) -> Instead:
        if failed:
            self._owner._count("failed")
        if answers.is_tombstone(answer):
            self._owner._count("dropped_bodies")
        assert self._claim is not None  # noqa: S101 - the request has a claim here
        for pause in (*PAUSES, None):
            try:
                done = self._idempotency.acomplete(self._claim, answer, failed=failed)
                if await uninterrupted(done):
                    await self._stop_renewing()
                    return None
            except Exception as error:  # noqa: BLE001 - from any driver; retried, then reported
                self._log(error)
                if pause is None:
                    self._owner._count("store_away")
                    return self._telling(answers.store_away(error, self._idempotency.lease))
                await sleep_async(pause)
            else:
                break
        self._owner._count("refused_late")
        return self._tell_the_truth

    # Completed by the app, in its own transaction

    async def _completed_by_the_app(self, answer: Answer | None) -> tuple[Instead] | None:
        """Return the replacement to send; None if the app has not completed the request.

        A call of `IdempotentRequest.complete` is no proof: its transaction may have been rolled
        back, or committed without an answer. Only the record is reliable.
        """
        if self._idempotent is None or not self._idempotent._tried:
            return None
        try:
            found = await self._found(self._idempotent)
        except StillOpen:
            raise
        except Exception as error:  # noqa: BLE001 - from any driver; already logged
            self._owner._count("store_away")
            return (self._telling(answers.store_away(error, self._idempotency.lease)),)
        if isinstance(found, Pending):  # it was rolled back
            return None
        if found is None:
            self._owner._count("refused_late")
            return (self._tell_the_truth,)
        await self._stop_renewing()
        self._idempotency._count("failed" if found.failed else "completed")
        if found.failed:
            self._owner._count("failed")
        if answers.is_tombstone(found.answer):
            self._owner._count("dropped_bodies")
        self._idempotent._wake()
        if answer is not None and answer[:3] == found.answer[:3]:
            return (None,)
        self._owner._count("differed")
        log = logging.getLogger("seawall")
        log.warning(
            "%s: was completed in the app's transaction, which then answered otherwise: what is"
            " stored is sent",
            self._name.operation,
        )
        never = self._owner.never
        return (lambda: answers.send_stored(self._send, found.answer, never, replayed=False),)

    @property
    def _completion_tried(self) -> bool:
        return self._idempotent is not None and self._idempotent._tried

    async def _found(self, request: IdempotentRequest) -> Replay | Pending | None:
        """Return the state of the record once the app's transaction has ended."""
        claim = self._claim
        assert claim is not None  # noqa: S101 - an IdempotentRequest has a claim
        for pause in (*PAUSES, None):
            open_ = request._is_open()
            # On SQLite the query would wait for that transaction, which may be waiting for us.
            if not (open_ and self._idempotency.database.dialect == "sqlite"):
                try:
                    with without_deadline():
                        looking = self._idempotency.database.arun(partial(records.held, claim))
                        found: Replay | Pending | None = await uninterrupted(looking)
                except Exception as error:
                    self._log(error)
                    if pause is None:
                        raise
                else:
                    # If it is pending, the connection may just be in a later transaction: look
                    # again.
                    if not isinstance(found, Pending) or not open_:
                        return found
            if pause is not None:
                await sleep_async(pause)
        raise StillOpen(
            f"{self._name.operation}: the transaction in which it was completed is still open when"
            " its answer is sent: commit before you return"
        )

    async def _stop_renewing(self) -> None:
        """Stop the renewal: work of the app after its response needs no lease."""
        if self._renewal is not None:
            await self._renewal.stop()

    async def _tell_the_truth(self) -> None:
        """Respond from the record of the worker that took over, as to a new request."""
        try:
            found = await self._reserve()
        except Exception as error:  # noqa: BLE001 - from any driver; reported
            self._log(error)
            await send_problem(self._send, answers.store_away(error, 1.0), [])
            return
        if isinstance(found, Fresh):  # the worker that took over has abandoned it
            await uninterrupted(self._idempotency.aabandon(found.claim))
            found = Pending(1.0)
        await self._tell(found)

    async def abandon(self) -> Instead:
        """Free the key; return a sender of a response, if there is one after all."""
        settled = await self._completed_by_the_app(None)
        return await self._free() if settled is None else settled[0]

    async def _free(self) -> Instead:
        """Delete the record, so that the next request with its key runs.

        A transaction that completes the request and is still being committed (its client has lost
        the connection) holds a lock on the record: the DELETE waits for it, and then finds nothing.
        """
        assert self._claim is not None  # noqa: S101 - the request has a claim here
        held = True
        try:
            held = await uninterrupted(self._idempotency.aabandon(self._claim))
        except Exception as error:  # noqa: BLE001 - from any driver
            self._log(error)
            if self._completion_tried:  # it may be committed after all: only the record knows
                self._owner._count("store_away")
                return self._telling(answers.store_away(error, self._idempotency.lease))
            # The refusal is correct anyway; the next request has to wait until the lease expires.
        await self._stop_renewing()
        # Perhaps nothing was done because the worker that took over had already done it.
        self._owner._count("abandoned" if held else "refused_late")
        return None if held else self._tell_the_truth

    def _telling(self, problem: Problem) -> Instead:
        return lambda: send_problem(self._send, problem, [])

    def _log(self, error: Exception) -> None:
        """Log a failure with a record: with its route, but without data of the caller."""
        log = logging.getLogger("seawall")
        log.error("%s: its record: %s", self._name.operation, described(error))
