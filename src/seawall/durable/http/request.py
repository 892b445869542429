"""One request with a key: the decision by its record, its response, and the outcome of its claim.

Promises:

- The end of a response reaches the client only after the record is on disk: a request whose client
  saw a complete response never runs again.
- Small responses are sent when they are complete. A stream (a body in parts, without a declared
  length) passes immediately, except for its end. With a declared length, the last non-empty part is
  held back, because with it the client has everything. In HTTP/1.0 a stream ends with the
  connection, so its end cannot be held back: all of it is, up to the size of a record.
- A client that disconnects changes nothing: the app does not learn of it, runs to its end, and is
  recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Literal

from seawall._failures import described
from seawall.durable.database.database import without_deadline
from seawall.durable.http import responses as answers
from seawall.durable.http.completion import IdempotentRequest, RequestName
from seawall.durable.http.responses import NOTHING_DONE, RequestOutcome, check_sendable
from seawall.durable.idempotency import records
from seawall.durable.idempotency.lease_renewal import LeaseRenewal, uninterrupted
from seawall.errors import LeaseLost, RecordGarbled, Rejected, SeawallError
from seawall.models.idempotency import (
    Answer,
    Fresh,
    Garbled,
    Headers,
    KeyClaim,
    KeyState,
    Mismatch,
    Pending,
    Replay,
)
from seawall.runtime.driver import sleep_async
from seawall.web.asgi_types import Message, Send
from seawall.web.problems import FAILURE, Problem, problem_of, send_problem

if TYPE_CHECKING:
    from seawall.durable.http.middleware import IdempotentRequests

Scope = MutableMapping[str, Any]
Replacement = Callable[[], Awaitable[None]] | None
"""A sender of a response that replaces the app's own; None if the app's own is sent."""

SCOPE_KEY: Final = "seawall.idempotency"
"""The key in the ASGI scope under which the app finds the `IdempotentRequest`."""

PAUSES: Final = (0.1, 0.4, 1.6)
"""Seconds between attempts to record a response while the database is unreachable."""
HIDDEN_EXTENSIONS: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
"""ASGI extensions whose content we would not see and could not record: hidden from the app."""


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
            await self._respond_unreadable(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, none runs without a record
            self._owner._count("store_away")
            self._log(error)
            await send_problem(self._send, answers.store_away(error, 1.0), [])
        else:
            if isinstance(found, Fresh):
                await self._execute(found.claim, scope, body)
            else:
                await self._respond(found)

    async def _reserve(self, wait: float = 0.0) -> KeyState:
        """Reserve the key. If cancelled meanwhile, it has taken nothing."""
        scope, operation, key, fingerprint = self._name
        return await self._idempotency.areserve(scope, operation, key, fingerprint, wait=wait)

    async def _respond(self, found: Replay | Pending | Mismatch) -> None:
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
            await self._respond_unreadable(error)
        else:
            self._owner._count("replays")

    async def _respond_unreadable(self, error: Exception) -> None:
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
            scope["extensions"] = {
                name: offered[name] for name in offered if name not in HIDDEN_EXTENSIONS
            }
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

    async def settle(self, answer: Answer, outcome: RequestOutcome) -> Replacement:
        """Record `answer` or free the key; return a sender of another response, if needed."""
        settled = await self._completed_by_app(answer)
        if settled is not None:
            return settled[0]
        outcome = outcome._replace(rolled_back=self._completion_attempted)
        if self._keeps(outcome):
            return await self._complete(answer, failed=outcome.status >= FAILURE)
        replacement = await self._free()
        return (
            self._sender_of(answers.NOT_DONE) if not replacement and outcome.error else replacement
        )

    def _keeps(self, outcome: RequestOutcome) -> bool:
        """Ask `keep=`, then the default. A `keep=` that raises must not cause a second effect."""
        decision = None
        if self._owner.keep is not None:
            try:
                decision = self._owner.keep(outcome)
            except Exception as error:  # noqa: BLE001 - the user's function; logged
                self._log(error)
                return True
        return answers.keeps(outcome) if decision is None else bool(decision)

    async def _complete(self, answer: Answer, *, failed: bool) -> Replacement:
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
                    return self._sender_of(answers.store_away(error, self._idempotency.lease))
                await sleep_async(pause)
            else:
                break
        self._owner._count("refused_late")
        return self._respond_from_record

    # Completed by the app, in its own transaction

    async def _completed_by_app(self, answer: Answer | None) -> tuple[Replacement] | None:
        """Return the replacement to send; None if the app has not completed the request.

        A call of `IdempotentRequest.complete` is no proof: its transaction may have been rolled
        back, or committed without an answer. Only the record is reliable.
        """
        if self._idempotent is None or not self._idempotent._attempted:
            return None
        try:
            found = await self._completed_state(self._idempotent)
        except TransactionStillOpen:
            raise
        except Exception as error:  # noqa: BLE001 - from any driver; already logged
            self._owner._count("store_away")
            return (self._sender_of(answers.store_away(error, self._idempotency.lease)),)
        if isinstance(found, Pending):  # it was rolled back
            return None
        if found is None:
            self._owner._count("refused_late")
            return (self._respond_from_record,)
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
    def _completion_attempted(self) -> bool:
        return self._idempotent is not None and self._idempotent._attempted

    async def _completed_state(self, request: IdempotentRequest) -> Replay | Pending | None:
        """Return the state of the record once the app's transaction has ended."""
        for pause in (*PAUSES, None):
            open_ = request._is_open()
            # On SQLite the query would wait for that transaction, which may be waiting for us.
            if not (open_ and self._idempotency.database.dialect == "sqlite"):
                try:
                    found = await uninterrupted(self._read_record())
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
        raise TransactionStillOpen(
            f"{self._name.operation}: the transaction in which it was completed is still open when"
            " its answer is sent: commit before you return"
        )

    async def _read_record(self) -> Replay | Pending | None:
        claim = self._claim
        assert claim is not None  # noqa: S101 - an IdempotentRequest has a claim
        with without_deadline():
            return await self._idempotency.database.arun(lambda: records.held(claim))

    async def _stop_renewing(self) -> None:
        """Stop the renewal: work of the app after its response needs no lease."""
        if self._renewal is not None:
            await self._renewal.stop()

    async def _respond_from_record(self) -> None:
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
        await self._respond(found)

    async def abandon(self) -> Replacement:
        """Free the key; return a sender of a response, if there is one after all."""
        settled = await self._completed_by_app(None)
        return await self._free() if settled is None else settled[0]

    async def _free(self) -> Replacement:
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
            if self._completion_attempted:  # it may be committed after all: only the record knows
                self._owner._count("store_away")
                return self._sender_of(answers.store_away(error, self._idempotency.lease))
            # The refusal is correct anyway; the next request has to wait until the lease expires.
        await self._stop_renewing()
        # Perhaps nothing was done because the worker that took over had already done it.
        self._owner._count("abandoned" if held else "refused_late")
        return None if held else self._respond_from_record

    def _sender_of(self, problem: Problem) -> Replacement:
        return lambda: send_problem(self._send, problem, [])

    def _log(self, error: Exception) -> None:
        """Log a failure with a record: with its route, but without data of the caller."""
        log = logging.getLogger("seawall")
        log.error("%s: its record: %s", self._name.operation, described(error))


class TransactionStillOpen(RuntimeError):
    """The app has responded, but the transaction that completes the claim is still open."""


class RecordedExchange:
    """The `receive` and `send` of the app."""

    def __init__(
        self,
        body: bytes,
        send: Send,
        request: RequestExecution,
        max_body: int,
        never: frozenset[bytes],
    ) -> None:
        """Pass `body` to the app, and its response to the client by `send`.

        Up to `max_body` bytes of it are recorded. `request` stores the response or frees the key,
        and may return a sender of another response.
        """
        self._body: bytes | None = body
        self._send_to_client = send
        self._request = request
        self._max_body = max_body
        self._never = never
        self._completed = asyncio.Event()
        self._settled = False
        self._start: Message | None = None
        self._started = False
        """Whether anything has been sent to the client."""
        self._hold_back: Literal["end", "last part", "all"] = "end"
        self._held: list[Message] = []
        self._closes = False
        """Whether the end of the connection marks the end of a body without a length."""
        self._recording = bytearray()
        self._size = 0
        self._disconnected = False
        self._send_error: Exception | None = None

    async def run(
        self, app: Callable[..., Awaitable[None]], scope: MutableMapping[str, Any]
    ) -> None:
        """Run the app; make sure that the claim is settled, unless the task is cancelled."""
        self._closes = scope.get("http_version") == "1.0"
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            if not self._settled:
                await self._fail(error)
            raise
        if not self._settled:
            await self._fail(None)
        if self._send_error is not None:
            raise self._send_error

    # Receiving

    async def receive(self) -> Message:
        """Return the body; then, only after the response is complete, a disconnect."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._completed.wait()
        return {"type": "http.disconnect"}

    # Sending

    async def send(self, message: Message) -> None:
        """Take one message of the response."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._start is not None:
                raise RuntimeError("the answer has started already")
            # Checked here, where an invalid value is an error of the app: later it would look like
            # a failure of the record. Copied, because an iterator can be read only once.
            headers: Headers = [(_checked(n), _checked(v)) for n, v in message.get("headers", ())]
            status = int(message["status"])
            check_sendable(status, headers)
            self._start = {**message, "status": status, "headers": headers}
            if any(name.lower() == b"content-length" for name, _ in headers):
                self._hold_back = "last part"
            elif self._closes:
                self._hold_back = "all"
        elif kind != "http.response.body":
            # for instance early hints, which are not part of the response
            await self._pass(message)
        elif self._start is None or self._settled:
            raise RuntimeError("a body before its answer has started, or after its end")
        else:
            part = bytes(message.get("body", b""))
            self._size += len(part)
            if self._size <= self._max_body:
                self._recording += part
            else:
                self._recording.clear()
            if message.get("more_body"):
                await self._take_part(part)
            else:
                await self._end(message)

    async def _take_part(self, part: bytes) -> None:
        if not part:
            return
        self._held.append({"type": "http.response.body", "body": part, "more_body": True})
        if self._hold_back == "all" and self._size <= self._max_body:
            return
        stay = 0 if self._hold_back == "end" else 1
        while len(self._held) > stay:
            await self._release(self._held.pop(0))

    async def _release(self, message: Message) -> None:
        """Send a message now, after the start of the response."""
        if not self._started and self._start is not None:
            self._started = True
            await self._pass(self._start)
        await self._pass(message)

    async def _pass(self, message: Message) -> None:
        if self._disconnected:
            return
        try:
            await self._send_to_client(message)
        except OSError:  # the client has disconnected
            self._disconnected = True
        except Exception as error:  # noqa: BLE001 - raised when the claim is settled
            self._disconnected, self._send_error = True, error

    # Ending

    async def _end(self, last: Message) -> None:
        """Record the response; then send its end to the client."""
        assert self._start is not None  # noqa: S101 - checked by `send`
        status: int = self._start["status"]
        headers: Headers = self._start["headers"]
        self._settled = True
        try:
            body = bytes(self._recording) if self._size <= self._max_body else None
            answer = answers.recorded(status, headers, body, self._never)
            replacement = await self._request.settle(answer, RequestOutcome(status, headers))
            self._recording.clear()
            if replacement is not None:
                await self._send_replacement(replacement)
            else:
                for message in (*self._held, last):
                    await self._release(message)
        except TransactionStillOpen:
            self._settled = False  # the app must roll back, and gets the exception from `send`
            raise
        finally:
            self._completed.set()

    async def _send_replacement(self, replacement: Callable[[], Awaitable[None]]) -> None:
        if self._started:
            # The client has part of a response that does not count: it must not get the end.
            raise LeaseLost("the answer could not be recorded: another worker may have taken over")
        self._started = True
        if not self._disconnected:
            await replacement()

    async def _fail(self, error: Exception | None) -> None:
        """Settle a request that the app has left without a response, or with an incomplete one."""
        self._settled = True
        if not self._started and means_not_attempted(error):
            replacement = await self._request.abandon()
            if replacement is not None:
                await self._send_replacement(replacement)
            self._completed.set()
            return
        status, headers, body = answers.failure_of(error)
        answer = answers.recorded(status, headers, body, self._never)
        replacement = await self._request.settle(answer, RequestOutcome(status, headers, error))
        if replacement is not None and not self._started:
            await self._send_replacement(replacement)
        elif not self._started:
            self._start = {"type": "http.response.start", "status": status, "headers": headers}
            await self._release({"type": "http.response.body", "body": body})
        self._completed.set()


def _checked(word: object) -> bytes:
    if not isinstance(word, (bytes, bytearray, memoryview)):
        raise TypeError(f"a header with {word!r}: ASGI has names and values as bytes")
    return bytes(word)


def means_not_attempted(error: Exception | None) -> bool:
    """Return whether an error is a refusal (`Rejected`), even wrapped by a vendor's SDK.

    The type decides, not the status sent to the client: a lost lease, an unreachable store, or the
    status of another service may follow an effect.
    """
    if error is None or isinstance(error, SeawallError):
        return isinstance(error, Rejected)
    problem = problem_of(error)
    if problem is None or problem.status not in NOTHING_DONE:
        return False
    # such a status can only come from one of our errors, further in
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SeawallError):
        cause = cause.__cause__
    return isinstance(cause, Rejected)
