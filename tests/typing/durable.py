"""What a type checker makes of `seawall.durable`: checked by mypy, never run."""

from __future__ import annotations

from typing import Any, assert_type

from starlette.responses import JSONResponse

import seawall
import seawall.durable
from seawall.durable import (
    Answer,
    Database,
    DeferredCall,
    DeferredCalls,
    Fresh,
    Idempotency,
    IdempotentRequest,
    Job,
    Jobs,
    KeyInFlight,
    Outbox,
    Pending,
    Replay,
    Reply,
    Single,
    Sqlite,
    idempotent_request,
    migrate,
)


def check_blocking() -> None:
    """Check what is done without an event loop."""
    database = Database(Sqlite("orders.db"))
    assert_type(migrate(database), list[int])
    idempotency = Idempotency(database)
    match idempotency.reserve("acme", "pay", "key", None):
        case Fresh(claim):
            assert_type(idempotency.complete(claim, {"paid": True}), bool)
        case Replay(answer):
            assert_type(answer, Answer)
        case Pending(retry_after):
            assert_type(retry_after, float)
    idempotency.reserve("acme", "pay")  # type: ignore[call-arg]
    jobs = Jobs(database)
    assert_type(jobs.submit(None, "report", scope="acme"), Job)
    jobs.submit(None, "report")  # type: ignore[call-arg]
    Jobs("orders.db")  # type: ignore[arg-type]
    assert_type(DeferredCalls(database, "mail").store(5), DeferredCall)


async def check_awaited(database: Database, connection: Any) -> None:
    """Check what is awaited, in a transaction of the user's."""
    idempotency, outbox = Idempotency(database), Outbox(database)
    named: dict[str, Any] = {"scope": "acme", "operation": "pay", "key": "key", "fingerprint": None}
    async with idempotency.once(connection, **named) as once:
        assert_type(once.first, bool)
        assert_type(await outbox.aadd(connection, "order", "7", "paid", {}), str)
    assert_type(await idempotency.asingle("DELETE", {}, **named), Single)


async def check_completed(request: Any, connection: Any, response: JSONResponse) -> None:
    """Check what a handler gets back: its own response, or a reply."""
    assert_type(idempotent_request(request), IdempotentRequest | None)
    claim = idempotent_request(request, required=True)
    assert_type(claim, IdempotentRequest)
    assert_type(claim.complete(connection, response), JSONResponse)
    assert_type(await claim.acomplete(connection, response), JSONResponse)
    assert_type(claim.complete(connection, {"order": 7}), Reply)
    assert_type(await claim.acomplete(connection, Answer(201, [], b"")), Reply)


def check_decorated(idempotency: Idempotency) -> None:
    """Check that a function keeps its signature."""

    @idempotency.idempotent(key="order")
    def pay(order: str) -> int:
        return len(order)

    assert_type(pay("7"), int)
    pay(7)  # type: ignore[arg-type]


def check_errors(error: KeyInFlight) -> None:
    """Check that errors are the same by all ways, and that a typing mistake is told."""
    assert_type(error.retry_after, float | None)
    assert_type(seawall.errors.KeyInFlight("at work"), KeyInFlight)
    seawall.KeyInFlght  # type: ignore[attr-defined]  # noqa: B018
    seawall.durable.Idempotent  # type: ignore[attr-defined]  # noqa: B018
