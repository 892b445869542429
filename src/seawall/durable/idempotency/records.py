"""Operations on idempotency records as steps, for our own or the user's transaction."""

from __future__ import annotations

from hashlib import blake2b
from os import urandom
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.context import give_up_at
from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.json_values import canonical_json, json_text
from seawall.durable.database.statements import Arguments, TableNames, statements
from seawall.errors import Contended, RecordGarbled
from seawall.models.idempotency import (
    Answer,
    Form,
    Fresh,
    Garbled,
    KeyClaim,
    KeyState,
    Pending,
    Record,
    RecordState,
    Replay,
    check_answer,
    check_key,
    check_name,
    decide,
    fingerprint_of,
    headers_fit,
    headers_text,
    key_digest,
    storable,
)
from seawall.runtime.driver import Steps

UNKNOWN_WAIT: Final = 1.0
"""Seconds for `retry_after` while a transaction is running, whose duration is unknown."""
MOST_READS: Final = 8
"""Maximum number of times that a record may change while one call looks at it."""


MOST_EVENTS: Final = 1000
"""Maximum number of events of one key that are shown to an operator."""

SECOND: Final = 1_000_000
EVENT_STATES: Final = ("pending", "delivered", "dead")

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5
"""Maximum seconds between two looks of a waiter."""


class KeyEvent(NamedTuple):
    """An event that was committed with a key and is still stored."""

    outbox: str
    id: str
    aggregate: str
    aggregate_id: str
    type: str
    state: str
    """One of "pending", "delivered" and "dead"."""


class KeyRecord(NamedTuple):
    """The state of a key, without its answer and its owner."""

    state: str
    """One of "in flight", "given up" (its lease has expired), "succeeded" and "failed"."""
    status: int | None
    """The status of an HTTP response."""
    body_bytes: int | None
    kept: bool
    """False if the answer was too large to store."""
    takeovers: int
    created_at: float
    expires_at: float
    lease_until: float | None
    """This and the two above are seconds since 1970, by the database's clock."""
    events: list[KeyEvent]


class KeyTerms(NamedTuple):
    """How long a record is held and kept (microseconds), and the maximum body of an answer."""

    lease: int
    ttl: int
    max_body: int


class KeyRequest(NamedTuple):
    """The requested record and the new owner."""

    scope: str
    operation: str
    key_hash: bytes
    fingerprint: bytes
    owner: str

    @property
    def name(self) -> dict[str, Any]:
        """Return the arguments that identify the record."""
        return {"scope": self.scope, "operation": self.operation, "key_hash": self.key_hash}


def reserve(request: KeyRequest, terms: KeyTerms) -> Steps[KeyState]:
    """Take the record, or return why that is not possible."""
    return _reserve(request, terms, RecordState.PENDING)


def reserve_once(
    request: KeyRequest, terms: KeyTerms, names: TableNames | None, *, wait: bool
) -> Steps[KeyState]:
    """Take the record in the transaction of the effect: invisible to others until its commit.

    On PostgreSQL (`names` are those of its tables) an advisory lock marks it for callers that do
    not `wait`.
    """
    if names is None:
        return _reserve(request, terms, RecordState.SUCCEEDED)
    where = names.table("idempotency").encode()
    digest = blake2b(where + b"\0" + request.key_hash, digest_size=8).digest()
    lock = {"lock": int.from_bytes(digest, signed=True), "wait": wait}
    return _reserve(request, terms, RecordState.SUCCEEDED, lock)


def _reserve(
    request: KeyRequest, terms: KeyTerms, state: RecordState, lock: Arguments | None = None
) -> Steps[KeyState]:
    times = {"state": int(state), "lease": terms.lease, "ttl": terms.ttl}
    taking = {**request._asdict(), **times, **(lock or {})}
    how, wait = ("", True) if lock is None else ("_once", lock["wait"])
    for _ in range(MOST_READS):
        rows = yield NamedQuery(f"idempotency.take{how}", taking)
        if not rows:
            rows = yield NamedQuery("idempotency.read", request.name)
            found: KeyState | Literal["free"] = decision(rows, request.fingerprint)
            if found != "free":
                return found
            if rows:
                rows = yield NamedQuery(f"idempotency.take_over{how}", taking)
            if not rows and not wait:
                return Pending(UNKNOWN_WAIT)
        if rows:
            epoch, takeovers, rest, *marked = rows[0]
            claim = KeyClaim(*request[:3], request.owner, epoch, takeovers > 0)
            if marked == [False]:
                yield NamedQuery("idempotency.mark", {"lock": taking["lock"]})
            if state is RecordState.PENDING and rest < terms.lease // 2:
                # It waited for another transaction, and its lease began before that wait.
                yield from renew(claim, terms)
            return Fresh(claim)
    raise Contended(
        f"the record of {request.operation!r} changed {MOST_READS} times while looked at"
    )


def decision(rows: list[tuple[Any, ...]], fingerprint: bytes) -> KeyState | Literal["free"]:
    """Return the decision about the rows read; "free" if the record may be taken."""
    try:
        return decide(Record(*rows[0]) if rows else None, fingerprint)
    except Garbled as error:
        raise RecordGarbled(f"the stored record makes no sense: {error}") from None


def value_of(found: Replay) -> Any:
    """Return the stored value, or raise if it is invalid."""
    try:
        return found.value
    except Garbled as error:
        raise RecordGarbled(f"the stored record makes no sense: {error}") from None


def complete(claim: KeyClaim, columns: Arguments, terms: KeyTerms) -> Steps[bool]:
    """Store an answer (encoded by `stored`) if the claim is valid; return whether it was."""
    rows = yield NamedQuery("idempotency.complete", {**_held(claim), **columns, "ttl": terms.ttl})
    if rows:
        return True
    # The same claim may have completed it before, with its answer lost: then confirm it.
    return bool((yield NamedQuery("idempotency.completed", _held(claim))))


def complete_with(
    claim: KeyClaim, columns: Arguments, terms: KeyTerms, members: str, arguments: Arguments
) -> Steps[bool]:
    """Store an answer in a transaction of the user, if the claim is still valid.

    If so, `members` of a WITH clause (PostgreSQL, with their `arguments`) are executed with it;
    their source is `seawall_done`.
    """
    own = statements("postgres", "idempotency")["complete"]
    text = f"WITH seawall_done AS (\n{own}\n),\n{members}\nSELECT 1 FROM seawall_done"
    asked = {**_held(claim), **columns, "ttl": terms.ttl, **arguments}
    rows = yield TextQuery(text, asked) if members else NamedQuery("idempotency.complete", asked)
    return bool(rows)


def held(claim: KeyClaim) -> Steps[Replay | Pending | None]:
    """Return the state of a claim: completed, still open, or None if it was taken over."""
    rows = yield NamedQuery("idempotency.held", _held(claim))
    if not rows:
        return None
    found = decision(rows, b"")
    return found if isinstance(found, Replay) else Pending(0.0)


def set_answer(
    claim: KeyClaim, answer: object, terms: KeyTerms, members: str, arguments: Arguments
) -> Steps[bool]:
    """Store the answer of a record that was created in this same transaction.

    `members` of a WITH clause (PostgreSQL, with their `arguments`) are executed with it.
    """
    text = f"WITH {members}\n{statements('postgres', 'idempotency')['answer']}"
    asked = {**_held(claim), **stored(answer, terms, failed=False), **arguments}
    rows = yield TextQuery(text, asked) if members else NamedQuery("idempotency.answer", asked)
    return bool(rows)


def renew(claim: KeyClaim, terms: KeyTerms) -> Steps[bool]:
    """Restart the lease, if the claim is still valid."""
    arguments = {**_held(claim), "lease": terms.lease, "ttl": terms.ttl}
    return bool((yield NamedQuery("idempotency.renew", arguments)))


def abandon(claim: KeyClaim) -> Steps[bool]:
    """Remove the record if the claim is still valid, so that the next request runs."""
    return bool((yield NamedQuery("idempotency.abandon", _held(claim))))


def forget(request: KeyRequest) -> Steps[bool | Pending]:
    """Remove the record unless it is in flight; return whether there was one."""
    rows = yield NamedQuery("idempotency.forget", request.name)
    if rows:
        return True
    rows = yield NamedQuery("idempotency.read", request.name)
    found = decision(rows, b"")
    return found if isinstance(found, Pending) else False


def lookup(request: KeyRequest) -> Steps[KeyRecord | None]:
    """Return a record for an operator, with the events that were committed with it."""
    rows = yield NamedQuery("idempotency.lookup", request.name)
    if not rows or rows[0][9] <= rows[0][10]:  # it has expired
        return None
    state, owner, epoch, takeovers, status, size, kept, lease, created, expires, now = rows[0]
    if state != RecordState.PENDING:
        word = "succeeded" if state == RecordState.SUCCEEDED else "failed"
    else:
        word = "in flight" if lease > now else "given up"
    pattern = f"{trail_of(owner, epoch)}-%"
    found = yield NamedQuery("outbox.trail", {"pattern": pattern, "most": MOST_EVENTS})
    events = [
        KeyEvent(outbox, id_, aggregate, whose, kind, EVENT_STATES[int(how)])
        for outbox, id_, aggregate, whose, kind, how in found
    ]
    return KeyRecord(
        word,
        status,
        size,
        kept is None or bool(kept),
        takeovers,
        created / SECOND,
        expires / SECOND,
        lease / SECOND if state == RecordState.PENDING else None,
        sorted(events, key=lambda event: int(event.id.rpartition("-")[2])),
    )


def trail_of(owner: str, epoch: int) -> str:
    """Return the prefix of the ids of all events that are committed with a record.

    It changes with each claim: a key that is used again gets new event ids, which no inbox drops.
    """
    named = f"{owner} {epoch}".encode()
    return blake2b(named, digest_size=16, person=b"seawall trail").hexdigest()


def withdraw(request: KeyRequest) -> Steps[bool]:
    """Remove the record if this very request has taken it."""
    arguments = {**request.name, "owner": request.owner}
    return bool((yield NamedQuery("idempotency.withdraw", arguments)))


def clear(request: KeyRequest) -> Steps[bool]:
    """Remove a record that is free to be taken."""
    arguments = {**request.name, "fingerprint": request.fingerprint}
    return bool((yield NamedQuery("idempotency.clear", arguments)))


def read(request: KeyRequest) -> Steps[Any]:
    """Return the state of a record without taking it."""
    rows = yield NamedQuery("idempotency.read", request.name)
    return decision(rows, request.fingerprint)


def _held(claim: KeyClaim) -> dict[str, Any]:
    arguments = claim._asdict()
    del arguments["taken_over"]
    return arguments


def stored(answer: object, terms: KeyTerms, *, failed: bool) -> Arguments:
    """Return the columns of an answer; only the status if it is too large.

    Raises if the answer cannot be stored.
    """
    status: int | None = None
    headers: str | None = None
    kept = True
    match answer:
        case None:
            form, body = Form.NOTHING, None
        case Answer():
            check_answer(answer)
            form, status, body = Form.HTTP, answer.status, bytes(answer.body)
            keep = storable(answer.headers)
            kept = answer.kept and headers_fit(keep)
            headers = headers_text(keep) if kept else None
        case bytes() | bytearray() | memoryview():
            form, body = Form.BYTES, bytes(answer)
        case _:
            form, body = Form.JSON, json_bytes(answer)
    if not kept or (body is not None and len(body) > terms.max_body):
        kept, headers, body = False, None, None
    return {
        "state": int(RecordState.FAILED if failed else RecordState.SUCCEEDED),
        "form": int(form),
        "status": status,
        "headers": headers,
        "body": body,
        "kept": int(kept),
    }


def check_storable(answer: object) -> None:
    """Raise if `answer` cannot be stored."""
    if isinstance(answer, Answer):
        check_answer(answer)
    elif answer is not None and not isinstance(answer, (bytes, bytearray, memoryview)):
        json_bytes(answer)


def json_bytes(value: object) -> bytes:
    """Return a value as JSON, or raise an error that says what can be stored."""
    try:
        return json_text(value).encode()
    except TypeError as error:
        raise TypeError(
            f"{type(value).__name__} cannot be stored ({error}): give what JSON has, Decimal, UUID,"
            " datetime, date, a dataclass or a pydantic model, bytes or an Answer"
        ) from error


def key_request(
    scope: str | None,
    operation: str,
    key: str,
    fingerprint: object,
    *,
    unscoped: bool,
    owned: bool = True,
) -> KeyRequest:
    """Check the arguments that name a record and return them, with a new owner if `owned`."""
    if scope is None and unscoped:
        scope = ""
    elif scope is None:
        raise TypeError(
            "scope=None: write whose key it is (tenant and principal); or, where everybody may"
            " have everybody's answers, Idempotency(..., unscoped=True)"
        )
    else:
        check_name("scope", scope)
    check_name("operation", operation)
    hashed = key_digest(scope, operation, check_key(key))
    payload = b"" if fingerprint is None else fingerprint_of(payload_of(fingerprint))
    return KeyRequest(scope, operation, hashed, payload, urandom(16).hex() if owned else "")


def payload_of(fingerprint: object) -> bytes | str:
    """Return the part of a payload that is compared, or raise."""
    if isinstance(fingerprint, (bytes, bytearray, memoryview)):
        return bytes(fingerprint)
    if isinstance(fingerprint, str):
        return fingerprint
    try:
        return canonical_json(fingerprint)
    except TypeError as error:
        raise TypeError(
            f"fingerprint: {error}: write bytes, text or what JSON has (also with Decimal, UUID,"
            " dates, dataclasses and models); or None, to compare nothing"
        ) from None


class KeyWait:
    """The schedule of a waiter's looks."""

    def __init__(self, wait: float, now: float) -> None:
        """Wait up to `wait` seconds, but not beyond the current deadline."""
        until, self._late = give_up_at(now, check.seconds("wait", wait, zero=True))
        self._until = now if until is None else until
        self._pause = FIRST_PAUSE

    def pause(self, found: KeyState, now: float) -> float | None:
        """Return the number of seconds until the next look; None if there is none."""
        left = self._until - now
        if not isinstance(found, Pending) or left <= 0:
            return None
        if self._late and left <= self._pause:
            return None  # a look at the deadline would leave no time to report the result
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        return min(pause, left)
