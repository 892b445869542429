"""Job queues and the workers that process them."""

from seawall.jobs.local_queue import LocalQueue
from seawall.jobs.queue import JobQueue
from seawall.jobs.records import Claim, DeadJob, JobStatus
from seawall.jobs.work_list import WorkItem, WorkPage
from seawall.jobs.worker import Worker

__all__ = [
    "Claim",
    "DeadJob",
    "JobQueue",
    "JobStatus",
    "LocalQueue",
    "WorkItem",
    "WorkPage",
    "Worker",
]
