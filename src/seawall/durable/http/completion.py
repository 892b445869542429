"""Completion of a request by its handler, in the transaction of its effect.

Promises:

- Effect, events and answer are committed together, or none of them.
- If the claim was taken over meanwhile, the statement that stores the answer is refused, so that
  the transaction has no effect.
- A call of `complete` counts only once it is committed. To find out, the middleware reads the
  record.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from seawall.durable.database.connections import Connection, still_open
from seawall.durable.http.responses import Reply, check_sendable, recorded
from seawall.durable.idempotency import Idempotency, records
from seawall.durable.idempotency.once import KeyEvents
from seawall.durable.outbox.events import FromRow
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import LeaseLost
from seawall.models.idempotency import Answer, Headers, KeyClaim, check_answer
from seawall.runtime.driver import Steps
from seawall.web.problems import FAILURE

TOGETHER: Final = "the answer is committed with what was done"
_LENGTH: Final = b"content-length"
_JSON: Final = (b"content-type", b"application/json")


class RequestName(NamedTuple):
    """The identity of a request's record: owner, operation, key and payload."""

    scope: str | None
    operation: str
    key: str
    fingerprint: bytes


class AnyResponse(Protocol):
    """A Starlette or FastAPI response that has its body, so not a stream."""

    status_code: int
    body: bytes | memoryview

    @property
    def raw_headers(self) -> Any:
        """The headers in ASGI form."""
        ...


class EventsOfAnswer(TypedDict, total=False):
    """The options of `IdempotentRequest.complete`."""

    outbox: Outbox | None
    events: Iterable[Any]
    notify: bool


R = TypeVar("R", bound=AnyResponse)


class IdempotentRequest:
    """A request with a key that is being executed: its identity, and its completion."""

    def __init__(
        self, name: RequestName, claim: KeyClaim, idempotency: Idempotency, never: frozenset[bytes]
    ) -> None:
        """Create it for a request; only the middleware does so. See `idempotent_request`."""
        self.scope, self.operation, self.key, self.fingerprint = name
        self._name = name
        self._claim = claim
        self._idempotency = idempotency
        self._never = never
        self._connection: Connection | None = None
        """The connection of the last completion, whose transaction may have been rolled back."""
        self._outbox: Outbox | None = None

    def __repr__(self) -> str:
        return f"<IdempotentRequest {self.operation!r}>"

    def part(self, name: str) -> dict[str, Any]:
        """Return the identity of one effect of several, as arguments for `Idempotency.once`.

        It always differs from the request's own identity, which the middleware's record has.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: write what this part does, such as 'charge'")
        return {**self._name._asdict(), "operation": f"{self.operation} > {name}"}

    @overload
    def complete(self, conn: Any, answer: R, **events: Unpack[EventsOfAnswer]) -> R: ...

    @overload
    def complete(self, conn: Any, answer: object, **events: Unpack[EventsOfAnswer]) -> Reply: ...

    def complete(
        self,
        conn: Any,
        answer: Any,
        *,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        notify: bool = False,
    ) -> Any:
        """Store the answer in the transaction of `conn`, and return the response to return.

        `answer` is the response to this request and to its repeats: a Starlette or FastAPI
        response, which is returned as it is; or an `Answer` or a JSON value (with status 200),
        which is returned as a `Reply`. `events` are added to `outbox` with it; with `notify`,
        listening dispatchers are notified at the commit.

        Raises `LeaseLost` if another worker took over, or if the request is already completed: let
        the exception propagate, so that the transaction is rolled back. Commit before you return.
        """
        added = self._checked_events(outbox, events, notify=notify)
        back, said = self._checked_answer(answer)
        own = self._idempotency.database.connection(conn)
        own.join(self._completing(own, said, added), TOGETHER)
        return back

    @overload
    async def acomplete(self, conn: Any, answer: R, **events: Unpack[EventsOfAnswer]) -> R: ...

    @overload
    async def acomplete(
        self, conn: Any, answer: object, **events: Unpack[EventsOfAnswer]
    ) -> Reply: ...

    async def acomplete(
        self,
        conn: Any,
        answer: Any,
        *,
        outbox: Outbox | None = None,
        events: Iterable[Any] = (),
        notify: bool = False,
    ) -> Any:
        """Async twin of `complete`."""
        added = self._checked_events(outbox, events, notify=notify)
        back, said = self._checked_answer(answer)
        own = self._idempotency.database.connection(conn)
        await own.ajoin(self._completing(own, said, added), TOGETHER)
        return back

    def _checked_answer(self, answer: object) -> tuple[Any, dict[str, Any]]:
        """Return the handler's return value, and its stored form; or raise."""
        back, (status, headers, body) = response_of(answer)
        terms = self._idempotency.terms
        kept = recorded(status, headers, body if len(body) <= terms.max_body else None, self._never)
        return back, records.stored(kept, terms, failed=status >= FAILURE)

    def _checked_events(
        self, outbox: Outbox | None, events: Iterable[Any], *, notify: bool
    ) -> KeyEvents:
        names = self._idempotency.database.names
        added = KeyEvents.checked(outbox, events, names, notify=notify)
        for event in added.events:
            if isinstance(event.aggregate_id, FromRow) or isinstance(event.payload, FromRow):
                raise TypeError(f"{event!r}: there is no row here: write the values themselves")
        return added

    def _completing(self, own: Connection, said: dict[str, Any], events: KeyEvents) -> Steps[None]:
        # From here on it may be committed, even if no answer arrives.
        self._connection, self._outbox = own, events.outbox
        storing = partial(records.complete_with, self._claim, said, self._idempotency.terms)
        if not (yield from events.commit_with(storing, self._claim, own.dialect, "seawall_done")):
            raise LeaseLost(
                f"{self.operation!r} cannot be completed here: somebody took over, or it is"
                " completed already. Let this out, so that the transaction is rolled back"
            )

    # For the middleware

    @property
    def _attempted(self) -> bool:
        """Whether `complete` was called, in a transaction that may be committed."""
        return self._connection is not None

    def _is_open(self) -> bool:
        """Return whether that connection is in a transaction, possibly a later one."""
        assert self._connection is not None  # noqa: S101 - called only after `complete`
        try:
            # psycopg reports a transaction even on a broken connection, where it has ended.
            gone = getattr(self._connection.raw, "closed", False) is True
            return not gone and still_open(self._connection)
        except Exception:  # noqa: BLE001 - from any driver, if it was returned to its pool
            return False

    def _wake(self) -> None:
        """Wake the dispatchers of this process: the events are committed."""
        if self._outbox is not None:
            self._outbox.wake()


def response_of(answer: object) -> tuple[Any, tuple[int, Headers, bytes]]:
    """Return the handler's return value, and the response that the client gets; or raise."""
    back = answer
    is_response = hasattr(answer, "status_code") and hasattr(answer, "raw_headers")
    if isinstance(answer, Answer) or not is_response:
        if isinstance(answer, (Answer, Reply)):
            check_answer(Answer(*answer[:3]))
            status, headers, body = answer[0], list(answer[1]), bytes(answer[2])
        else:
            status, headers, body = 200, [_JSON], _json(answer)
        own = [pair for pair in headers if pair[0].lower() != _LENGTH]
        back = Reply(status, own, body)
        headers = [*own, (_LENGTH, str(len(body)).encode())]
    else:
        response = cast("AnyResponse", answer)
        if not isinstance(getattr(response, "body", None), (bytes, memoryview)):
            raise TypeError(
                f"answer={answer!r} is a stream, which has no end before it is sent: pass a"
                " response with its body, such as JSONResponse(...)"
            )
        status, headers = response.status_code, list(response.raw_headers)
        body = bytes(response.body)
        check_answer(Answer(status, headers, body))
    check_sendable(status, headers)
    return back, (status, headers, body)


def _json(answer: object) -> bytes:
    if not isinstance(answer, (bytes, bytearray, memoryview)):
        return records.json_bytes(answer)
    raise TypeError("answer: bytes have no type: pass Answer(200, [(b'content-type', ...)], data)")
