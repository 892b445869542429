"""Effects that happen once, recorded in a database (PostgreSQL, or SQLite on one machine).

- `Idempotency` makes a request, a function or a transaction safe to repeat.
- `Outbox` and `Dispatcher` publish the events of a transaction; `Inbox` and `FifoReceiver` process
  each message once.
- `Jobs` is background work behind a 202 response; `DeferredCalls` stores calls until a
  dependency is back.

All of them use a `Database`. Each name is imported on first use, so no driver and no web framework
is loaded before it is needed.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.durable.database.cleanup import cleaning
    from seawall.durable.database.database import Database
    from seawall.durable.database.django import DjangoAlias
    from seawall.durable.database.leases import Fence
    from seawall.durable.database.migrations import amigrate, migrate
    from seawall.durable.database.sqlite import Sqlite
    from seawall.durable.deferred import DeferredCall, DeferredCalls, DeferredCallWorker
    from seawall.durable.fifo import (
        FifoAck,
        FifoMessage,
        FifoReceiver,
        FifoSender,
        Gap,
        Received,
        Skipped,
    )
    from seawall.durable.http.completion import IdempotentRequest
    from seawall.durable.http.middleware import IdempotentRequests, idempotent_request
    from seawall.durable.http.responses import Reply, RequestOutcome
    from seawall.durable.idempotency.idempotency import Idempotency
    from seawall.durable.idempotency.once import Once
    from seawall.durable.idempotency.records import KeyEvent, KeyRecord
    from seawall.durable.idempotency.single_statement import Single
    from seawall.durable.inbox import Inbox
    from seawall.durable.jobs.http_api import JobsApi
    from seawall.durable.jobs.jobs import Jobs
    from seawall.durable.jobs.records import Job
    from seawall.durable.jobs.worker import JobFunction, JobHandle, JobWorker
    from seawall.durable.outbox.dispatcher import Dispatcher
    from seawall.durable.outbox.events import (
        BlockedAggregate,
        DeadEvent,
        FromRow,
        NewEvent,
        OutboxEvent,
    )
    from seawall.durable.outbox.outbox import Outbox
    from seawall.durable.outbox.sinks import JetStream, RedisStream, Webhook
    from seawall.durable.webhooks import sign_webhook, verify_webhook
    from seawall.errors import (
        AnswerNotKept,
        BadSignature,
        DeferredCallsFull,
        FifoFull,
        FifoStateLost,
        JobCancelled,
        JobExpired,
        KeyInFlight,
        KeyMissing,
        KeyReused,
        NotDelivered,
        RecordedFailure,
        RecordGarbled,
    )
    from seawall.events import EventDied, FifoGap, OutboxBlocked
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

__all__ = [
    "Answer",
    "AnswerNotKept",
    "BadSignature",
    "BlockedAggregate",
    "Database",
    "DeadEvent",
    "DeferredCall",
    "DeferredCallWorker",
    "DeferredCalls",
    "DeferredCallsFull",
    "Dispatcher",
    "DjangoAlias",
    "EventDied",
    "Fence",
    "FifoAck",
    "FifoFull",
    "FifoGap",
    "FifoMessage",
    "FifoReceiver",
    "FifoSender",
    "FifoStateLost",
    "Fresh",
    "FromRow",
    "Gap",
    "Idempotency",
    "IdempotentRequest",
    "IdempotentRequests",
    "Inbox",
    "JetStream",
    "Job",
    "JobCancelled",
    "JobExpired",
    "JobFunction",
    "JobHandle",
    "JobWorker",
    "Jobs",
    "JobsApi",
    "KeyClaim",
    "KeyEvent",
    "KeyInFlight",
    "KeyMissing",
    "KeyRecord",
    "KeyReused",
    "KeyState",
    "Mismatch",
    "NewEvent",
    "NotDelivered",
    "Once",
    "Outbox",
    "OutboxBlocked",
    "OutboxEvent",
    "Pending",
    "Received",
    "RecordGarbled",
    "RecordedFailure",
    "RedisStream",
    "Replay",
    "Reply",
    "RequestOutcome",
    "Single",
    "Skipped",
    "Sqlite",
    "Webhook",
    "amigrate",
    "cleaning",
    "fingerprint_of",
    "idempotent_request",
    "migrate",
    "sign_webhook",
    "verify_webhook",
]

_HOMES = {
    "durable.database.cleanup": "cleaning",
    "durable.database.database": "Database",
    "durable.database.django": "DjangoAlias",
    "durable.database.leases": "Fence",
    "durable.database.migrations": "amigrate migrate",
    "durable.database.sqlite": "Sqlite",
    "durable.deferred": "DeferredCalls DeferredCallWorker DeferredCall",
    "durable.fifo": "FifoAck FifoMessage FifoReceiver FifoSender Gap Received Skipped",
    "durable.http": "IdempotentRequests IdempotentRequest Reply RequestOutcome idempotent_request",
    "durable.idempotency": "Idempotency KeyEvent KeyRecord Once Single",
    "durable.inbox": "Inbox",
    "durable.jobs": "Job JobFunction JobHandle JobWorker Jobs",
    "durable.jobs.http_api": "JobsApi",
    "durable.outbox": "BlockedAggregate DeadEvent FromRow NewEvent Outbox OutboxEvent",
    "durable.outbox.dispatcher": "Dispatcher",
    "durable.outbox.sinks": "JetStream RedisStream Webhook",
    "durable.webhooks": "sign_webhook verify_webhook",
    "errors": (
        "AnswerNotKept BadSignature FifoFull FifoStateLost JobCancelled JobExpired "
        "KeyInFlight KeyMissing KeyReused DeferredCallsFull NotDelivered RecordGarbled "
        "RecordedFailure"
    ),
    "models.idempotency": "Answer Fresh KeyClaim KeyState Mismatch Pending Replay fingerprint_of",
    "events": "EventDied FifoGap OutboxBlocked",
}
"""The public names by the module that defines them."""

if not TYPE_CHECKING:  # type checkers must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
