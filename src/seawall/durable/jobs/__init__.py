"""Jobs in a database: submitted within a transaction, executed by workers, with a status."""

from seawall.durable.jobs.jobs import Jobs
from seawall.durable.jobs.records import Job, JobClaim
from seawall.durable.jobs.worker import JobFunction, JobHandle, JobWorker

__all__ = ["Job", "JobClaim", "JobFunction", "JobHandle", "JobWorker", "Jobs"]
