"""Jobs in a database: submitted within a transaction, executed by workers, with a status."""

from seawall.durable.jobs.jobs import Jobs
from seawall.durable.jobs.records import Job
from seawall.durable.jobs.worker import JobFunction, JobHandle, JobWorker

__all__ = ["Job", "JobFunction", "JobHandle", "JobWorker", "Jobs"]
