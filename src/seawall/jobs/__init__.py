"""Work that is done later: queues of jobs, and workers that do them."""

from __future__ import annotations

from seawall.jobs._local import LocalQueue
from seawall.jobs._queue import JobQueue
from seawall.jobs._records import Claim, DeadLetter, DeadLetterDropped, JobStatus
from seawall.jobs._worker import Worker

__all__ = [
    "Claim",
    "DeadLetter",
    "DeadLetterDropped",
    "JobQueue",
    "JobStatus",
    "LocalQueue",
    "Worker",
]
