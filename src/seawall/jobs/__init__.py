"""Job queues and the workers that process them."""

from __future__ import annotations

from seawall.jobs._local import LocalQueue
from seawall.jobs._queue import JobQueue
from seawall.jobs._records import Claim, DeadLetter, JobStatus
from seawall.jobs._work_list import WorkItem, WorkPage
from seawall.jobs._worker import Worker

__all__ = [
    "Claim",
    "DeadLetter",
    "JobQueue",
    "JobStatus",
    "LocalQueue",
    "WorkItem",
    "WorkPage",
    "Worker",
]
