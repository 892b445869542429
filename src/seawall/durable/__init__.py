"""Effects that happen once: what is kept in a database (PostgreSQL, or SQLite on one machine).

`Idempotency` makes a request, a function or a transaction safe to repeat; `Outbox` and `Dispatcher`
send what a transaction said, `Inbox` and `FifoReceiver` take each message once; `Jobs` is work that
is answered with 202, `Later` is work for when a dependency is back. All are on a `Database`.
"""

from seawall.durable._jobs_queue import JobNotReady, JobTriedAgain, QueuedJobs
from seawall.durable._jobs_run import JobCancelled, JobFunction, JobHandle
from seawall.durable._jobs_worker import JobWorker
from seawall.durable.asgi import IdempotentRequests, Keyed, keyed
from seawall.durable.database import Database
from seawall.durable.dispatcher import Dispatcher
from seawall.durable.fifo import (
    FifoAck,
    FifoFull,
    FifoGap,
    FifoMessage,
    FifoReceiver,
    FifoSender,
    FifoStateLost,
    Gap,
    Received,
    Skipped,
)
from seawall.durable.idempotency import (
    Answer,
    AnswerNotKept,
    Claim,
    Fresh,
    Idempotency,
    KeyInFlight,
    KeyMissing,
    KeyReused,
    Mismatch,
    Once,
    Pending,
    RecordedFailure,
    RecordGarbled,
    Replay,
    Reservation,
    Single,
    fingerprint_of,
)
from seawall.durable.inbox import Inbox
from seawall.durable.jobs import Job, JobClaim, JobExpired, Jobs
from seawall.durable.jobs_asgi import JobsApi, Reply
from seawall.durable.later import DeadLetter, Later, LaterFull, LaterWorker, Stored
from seawall.durable.migrations import amigrate, migrate
from seawall.durable.outbox import Blocked, Dead, Event, FromRow, NewEvent, Outbox
from seawall.durable.sinks import (
    SIGNATURE_HEADER,
    BadSignature,
    JetStream,
    NotDelivered,
    RedisStream,
    Webhook,
    sign,
    verify,
)
from seawall.durable.sqlite import Sqlite

__all__ = [
    "SIGNATURE_HEADER",
    "Answer",
    "AnswerNotKept",
    "BadSignature",
    "Blocked",
    "Claim",
    "Database",
    "Dead",
    "DeadLetter",
    "Dispatcher",
    "Event",
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
    "JobNotReady",
    "JobTriedAgain",
    "JobWorker",
    "Jobs",
    "JobsApi",
    "KeyInFlight",
    "KeyMissing",
    "KeyReused",
    "Keyed",
    "Later",
    "LaterFull",
    "LaterWorker",
    "Mismatch",
    "NewEvent",
    "NotDelivered",
    "Once",
    "Outbox",
    "Pending",
    "QueuedJobs",
    "Received",
    "RecordGarbled",
    "RecordedFailure",
    "RedisStream",
    "Replay",
    "Reply",
    "Reservation",
    "Single",
    "Skipped",
    "Sqlite",
    "Stored",
    "Webhook",
    "amigrate",
    "fingerprint_of",
    "keyed",
    "migrate",
    "sign",
    "verify",
]
