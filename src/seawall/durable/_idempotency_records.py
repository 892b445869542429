"""What is done to records, as steps: for a transaction of our own, or inside the user's."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

from seawall.durable._connections import Ask, AskText
from seawall.durable._json import json_text
from seawall.durable._sql import Arguments, Names, statements
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
    Replay,
    State,
    check_answer,
    decide,
    headers_fit,
    headers_text,
    storable,
)
from seawall.runtime.stepping import Steps

COME_AGAIN: Final = 1.0
"""Seconds after which to ask again, where a transaction is at work: nobody knows how long."""
LOOKS: Final = 8
"""How often a record may change under who looks at it, within one asking."""


MOST_EVENTS: Final = 1000
"""Events of one key that an operator is shown."""

SECOND: Final = 1_000_000
EVENT_STATES: Final = ("pending", "delivered", "dead")


class KeyEvent(NamedTuple):
    """An event that was committed with a key, as far as it is still stored."""

    outbox: str
    id: str
    aggregate: str
    aggregate_id: str
    type: str
    state: str
    """"pending", "delivered" or "dead"."""


class KeyRecord(NamedTuple):
    """What is known of a key: never what was answered, nor who asked."""

    state: str
    """"in flight", "given up" (its lease is over), "succeeded" or "failed"."""
    status: int | None
    """The status of an HTTP answer."""
    body_bytes: int | None
    kept: bool
    """False where the answer was too large to be kept."""
    takeovers: int
    created_at: float
    expires_at: float
    lease_until: float | None
    """All three in seconds since 1970, by the database's clock."""
    events: list[KeyEvent]


class Terms(NamedTuple):
    """How long a record is held and kept (microseconds), and how much of an answer."""

    lease: int
    ttl: int
    max_body: int


class Wanted(NamedTuple):
    """The record that is asked for, by whom."""

    scope: str
    operation: str
    key_hash: bytes
    fingerprint: bytes
    owner: str

    @property
    def name(self) -> dict[str, Any]:
        """Return the arguments that name it."""
        return {"scope": self.scope, "operation": self.operation, "key_hash": self.key_hash}


def reserve(wanted: Wanted, terms: Terms, state: State = State.PENDING) -> Steps[KeyState]:
    """Take the record, or tell why not."""
    taking = {**wanted._asdict(), "state": int(state), "lease": terms.lease, "ttl": terms.ttl}
    return (yield from _reserve(wanted, terms, state, taking, "", wait=True))


def reserve_once(
    wanted: Wanted, terms: Terms, names: Names | None, *, wait: bool
) -> Steps[KeyState]:
    """Do so in a transaction that commits the record with the effect: nobody sees it before that.

    On PostgreSQL (`names` are those of its tables) it is marked for those who do not `wait`.
    """
    state = State.SUCCEEDED
    taking = {**wanted._asdict(), "state": int(state), "lease": terms.lease, "ttl": terms.ttl}
    if names is None:
        return (yield from _reserve(wanted, terms, state, taking, "", wait=True))
    where = names.table("idempotency").encode()
    lock = blake2b(where + b"\0" + wanted.key_hash, digest_size=8).digest()
    taking |= {"lock": int.from_bytes(lock, signed=True), "wait": wait}
    return (yield from _reserve(wanted, terms, state, taking, "_once", wait=wait))


def _reserve(
    wanted: Wanted, terms: Terms, state: State, taking: Arguments, how: str, *, wait: bool
) -> Steps[KeyState]:
    for _ in range(LOOKS):
        rows = yield Ask(f"idempotency.take{how}", taking)
        if not rows:
            rows = yield Ask("idempotency.read", wanted.name)
            found: KeyState | Literal["free"] = decision(rows, wanted.fingerprint)
            if found != "free":
                return found
            if rows:
                rows = yield Ask(f"idempotency.take_over{how}", taking)
            if not rows and not wait:
                return Pending(COME_AGAIN)
        if rows:
            epoch, takeovers, rest, *marked = rows[0]
            claim = KeyClaim(*wanted[:3], wanted.owner, epoch, takeovers > 0)
            if marked == [False]:
                yield Ask("idempotency.mark", {"lock": taking["lock"]})
            if state is State.PENDING and rest < terms.lease // 2:
                # It waited for another transaction, and its lease began before that.
                yield from renew(claim, terms)
            return Fresh(claim)
    raise Contended(f"the record of {wanted.operation!r} changed {LOOKS} times while looked at")


def decision(rows: list[tuple[Any, ...]], fingerprint: bytes) -> KeyState | Literal["free"]:
    """Return what is to be done with what was read; "free" where it may be taken."""
    try:
        return decide(Record(*rows[0]) if rows else None, fingerprint)
    except Garbled as error:
        raise RecordGarbled(f"the stored record makes no sense: {error}") from None


def value_of(found: Replay) -> Any:
    """Return what was stored, or raise where it makes no sense."""
    try:
        return found.value
    except Garbled as error:
        raise RecordGarbled(f"the stored record makes no sense: {error}") from None


def complete(claim: KeyClaim, said: Arguments, terms: Terms) -> Steps[bool]:
    """Store an answer (as `stored` has it), if the claim is still good; tell whether it is."""
    rows = yield Ask("idempotency.complete", {**_held(claim), **said, "ttl": terms.ttl})
    if rows:
        return True
    # The same claim may have completed it: then the word of that was lost, and it is said again.
    rows = yield Ask("idempotency.completed", _held(claim))
    return bool(rows)


def complete_with(
    claim: KeyClaim,
    said: Arguments,
    terms: Terms,
    members: str = "",
    arguments: Arguments | None = None,
) -> Steps[bool]:
    """Store an answer in a transaction of the user's, if the claim is still good.

    `members` of a WITH clause (PostgreSQL's, with their `arguments`) are done with it, if it is:
    they are written for the source `seawall_done`.
    """
    asked = {**_held(claim), **said, "ttl": terms.ttl, **(arguments or {})}
    if members:
        own = statements("postgres", "idempotency")["complete"]
        text = f"WITH seawall_done AS (\n{own}\n),\n{members}\nSELECT 1 FROM seawall_done"
        rows = yield AskText(text, asked)
    else:
        rows = yield Ask("idempotency.complete", asked)
    return bool(rows)


def held(claim: KeyClaim) -> Steps[Replay | Pending | None]:
    """Tell what has become of a claim: completed, still open, or (None) somebody else's."""
    rows = yield Ask("idempotency.held", _held(claim))
    if not rows:
        return None
    found = decision(rows, b"")
    return found if isinstance(found, Replay) else Pending(0.0)


def set_answer(
    claim: KeyClaim,
    answer: object,
    terms: Terms,
    members: str = "",
    arguments: Arguments | None = None,
) -> Steps[bool]:
    """Store the answer of a record that this same transaction has made.

    `members` of a WITH clause (PostgreSQL's, with their `arguments`) are done with it.
    """
    said = {**_held(claim), **stored(answer, terms, failed=False), **(arguments or {})}
    if members:
        own = statements("postgres", "idempotency")["answer"]
        rows = yield AskText(f"WITH {members}\n{own}", said)
    else:
        rows = yield Ask("idempotency.answer", said)
    return bool(rows)


def renew(claim: KeyClaim, terms: Terms) -> Steps[bool]:
    """Let the lease begin anew, if the claim is still good."""
    said = {**_held(claim), "lease": terms.lease, "ttl": terms.ttl}
    rows = yield Ask("idempotency.renew", said)
    return bool(rows)


def abandon(claim: KeyClaim) -> Steps[bool]:
    """Remove the record, if the claim is still good: the next one runs."""
    rows = yield Ask("idempotency.abandon", _held(claim))
    return bool(rows)


def forget(wanted: Wanted) -> Steps[bool | Pending]:
    """Remove the record unless it is in flight; tell whether there was one."""
    rows = yield Ask("idempotency.forget", wanted.name)
    if rows:
        return True
    rows = yield Ask("idempotency.read", wanted.name)
    found = decision(rows, b"")
    return found if isinstance(found, Pending) else False


def lookup(wanted: Wanted) -> Steps[KeyRecord | None]:
    """Tell an operator what is known of a record, and of the events committed with it."""
    rows = yield Ask("idempotency.lookup", wanted.name)
    if not rows or rows[0][9] <= rows[0][10]:  # its time is over
        return None
    state, owner, epoch, takeovers, status, size, kept, lease, created, expires, now = rows[0]
    if state != State.PENDING:
        word = "succeeded" if state == State.SUCCEEDED else "failed"
    else:
        word = "in flight" if lease > now else "given up"
    pattern = f"{trail_of(owner, epoch)}-%"
    found = yield Ask("outbox.trail", {"pattern": pattern, "most": MOST_EVENTS})
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
        lease / SECOND if state == State.PENDING else None,
        sorted(events, key=lambda event: int(event.id.rpartition("-")[2])),
    )


def trail_of(owner: str, epoch: int) -> str:
    """Return what the ids of the events begin with that are committed with a record.

    It changes with each claim: a key that is used again has other events, which no inbox drops.
    """
    named = f"{owner} {epoch}".encode()
    return blake2b(named, digest_size=16, person=b"seawall trail").hexdigest()


def withdraw(wanted: Wanted) -> Steps[bool]:
    """Remove the record if it was taken by this very asking."""
    rows = yield Ask("idempotency.withdraw", {**wanted.name, "owner": wanted.owner})
    return bool(rows)


def clear(wanted: Wanted) -> Steps[bool]:
    """Remove a record that may be taken."""
    said = {**wanted.name, "fingerprint": wanted.fingerprint}
    rows = yield Ask("idempotency.clear", said)
    return bool(rows)


def read(wanted: Wanted) -> Steps[Any]:
    """Tell what asking would give, without taking anything."""
    rows = yield Ask("idempotency.read", wanted.name)
    return decision(rows, wanted.fingerprint)


def clean(batch: int) -> Steps[int]:
    """Remove so many records whose time is over; return how many there were."""
    rows = yield Ask("idempotency.clean", {"batch": batch})
    return len(rows)


def _held(claim: KeyClaim) -> dict[str, Any]:
    said = claim._asdict()
    del said["taken_over"]
    return said


def stored(answer: object, terms: Terms, *, failed: bool) -> Arguments:
    """Return an answer as the columns have it; of one that is too large only the status.

    Raises where it is nothing that could be given again.
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
        "state": int(State.FAILED if failed else State.SUCCEEDED),
        "form": int(form),
        "status": status,
        "headers": headers,
        "body": body,
        "kept": int(kept),
    }


def check_storable(answer: object) -> None:
    """Raise if `answer` is nothing that can be stored."""
    if isinstance(answer, Answer):
        check_answer(answer)
    elif answer is not None and not isinstance(answer, (bytes, bytearray, memoryview)):
        json_bytes(answer)


def json_bytes(value: object) -> bytes:
    """Return a value as JSON, or raise and say what can be stored."""
    try:
        return json_text(value).encode()
    except TypeError as error:
        raise TypeError(
            f"{type(value).__name__} cannot be stored ({error}): give what JSON has, Decimal, UUID,"
            " datetime, date, a dataclass or a pydantic model, bytes or an Answer"
        ) from error
