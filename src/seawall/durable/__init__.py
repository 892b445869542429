"""Effects that happen once, recorded in a database (PostgreSQL, or SQLite on one machine).

- `Idempotency` makes a request, a function or a transaction safe to repeat.
- `Outbox` and `Dispatcher` publish the events of a transaction; `Inbox` and `FifoReceiver` process
  each message once.
- `Jobs` is background work behind a 202 response; `Later` stores calls until a dependency is back.

All of them use a `Database`. Each name is imported on first use, so no driver and no web framework
is loaded before it is needed.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.durable._cleaning import cleaning
    from seawall.durable._jobs_run import JobFunction, JobHandle
    from seawall.durable._jobs_worker import JobWorker
    from seawall.durable.asgi import IdempotentRequests, Keyed, RequestOutcome, keyed
    from seawall.durable.database import Database
    from seawall.durable.dispatcher import Dispatcher
    from seawall.durable.fifo import (
        FifoAck,
        FifoMessage,
        FifoReceiver,
        FifoSender,
        Gap,
        Received,
        Skipped,
    )
    from seawall.durable.idempotency import (
        Answer,
        Fresh,
        Idempotency,
        KeyClaim,
        KeyEvent,
        KeyRecord,
        KeyState,
        Mismatch,
        Once,
        Pending,
        Replay,
        Single,
        fingerprint_of,
    )
    from seawall.durable.inbox import Inbox
    from seawall.durable.jobs import Job, JobClaim, Jobs
    from seawall.durable.jobs_asgi import JobsApi, Reply
    from seawall.durable.later import DeadLetter, Later, LaterWorker, Stored
    from seawall.durable.leases import Fence
    from seawall.durable.migrations import amigrate, migrate
    from seawall.durable.outbox import (
        BlockedAggregate,
        DeadEvent,
        FromRow,
        NewEvent,
        Outbox,
        OutboxEvent,
    )
    from seawall.durable.sinks import (
        SIGNATURE_HEADER,
        JetStream,
        RedisStream,
        Webhook,
        sign,
        verify,
    )
    from seawall.durable.sqlite import Sqlite
    from seawall.errors import (
        AnswerNotKept,
        BadSignature,
        FifoFull,
        FifoStateLost,
        JobCancelled,
        JobExpired,
        KeyInFlight,
        KeyMissing,
        KeyReused,
        LaterFull,
        NotDelivered,
        RecordedFailure,
        RecordGarbled,
    )
    from seawall.events import EventDied, FifoGap, OutboxBlocked

__all__ = [
    "SIGNATURE_HEADER",
    "Answer",
    "AnswerNotKept",
    "BadSignature",
    "BlockedAggregate",
    "Database",
    "DeadEvent",
    "DeadLetter",
    "Dispatcher",
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
    "IdempotentRequests",
    "Inbox",
    "JetStream",
    "Job",
    "JobCancelled",
    "JobClaim",
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
    "Keyed",
    "Later",
    "LaterFull",
    "LaterWorker",
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
    "Stored",
    "Webhook",
    "amigrate",
    "cleaning",
    "fingerprint_of",
    "keyed",
    "migrate",
    "sign",
    "verify",
]

_HOMES = {
    "durable._cleaning": "cleaning",
    "durable._jobs_run": "JobFunction JobHandle",
    "durable._jobs_worker": "JobWorker",
    "durable.asgi": "IdempotentRequests Keyed RequestOutcome keyed",
    "durable.database": "Database",
    "durable.dispatcher": "Dispatcher",
    "durable.fifo": "FifoAck FifoMessage FifoReceiver FifoSender Gap Received Skipped",
    "durable.idempotency": (
        "Answer Fresh Idempotency KeyClaim KeyEvent KeyRecord KeyState Mismatch Once Pending "
        "Replay Single fingerprint_of"
    ),
    "durable.inbox": "Inbox",
    "durable.jobs": "Job JobClaim Jobs",
    "durable.jobs_asgi": "JobsApi Reply",
    "durable.leases": "Fence",
    "durable.later": "DeadLetter Later LaterWorker Stored",
    "durable.migrations": "amigrate migrate",
    "durable.outbox": "BlockedAggregate DeadEvent FromRow NewEvent Outbox OutboxEvent",
    "durable.sinks": "JetStream RedisStream SIGNATURE_HEADER Webhook sign verify",
    "durable.sqlite": "Sqlite",
    "errors": (
        "AnswerNotKept BadSignature FifoFull FifoStateLost JobCancelled JobExpired "
        "KeyInFlight KeyMissing KeyReused LaterFull NotDelivered "
        "RecordGarbled RecordedFailure"
    ),
    "events": "EventDied FifoGap OutboxBlocked",
}
"""The public names by the module that defines them."""

if not TYPE_CHECKING:  # type checkers must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
