"""A service to deploy: it accepts orders for reports, and its workers write them.

    POST /reports     202 with Location; a JSON object with "months"
    GET  /jobs/{id}   the state of the report
    GET  /metrics/    for Prometheus
    GET  /health/live, /health/ready, /health/deep

    uvicorn app:app                      serves
    seawall worker app:workers           writes the reports

Both read DATABASE_URL and REDIS_URL; the service also DRAIN_DELAY.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import make_asgi_app, start_http_server
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import create_async_engine

from seawall.durable import Database, JobHandle, Jobs, JobsApi, JobWorker, amigrate
from seawall.redis import RedisStore
from seawall.telemetry import Refresher, export_prometheus
from seawall.web import Health, Lifecycle, RequestLimit, RequestLimits
from seawall.web.checks import DatabaseRead, RedisPing
from seawall.web.fastapi import protect

DRAIN_TIMEOUT = 25.0
"""Seconds from SIGTERM to the end: the grace period of the platform must be longer."""

engine = create_async_engine(os.environ["DATABASE_URL"], pool_pre_ping=True)
database = Database(engine, name="reports")
jobs = Jobs(database)
store = RedisStore(os.environ["REDIS_URL"])


# --- The service ---


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the tables before the first request, and close after the last."""
    await amigrate(database)
    yield
    await close()


async def close() -> None:
    """Close the connections of this module."""
    await engine.dispose()
    database.close()
    await store.aclose()


app = FastAPI(lifespan=lifespan)
jobs_api = JobsApi(jobs, scope=lambda _incoming: "everyone")  # put your callers' names here
app.mount("/jobs", jobs_api)
app.mount("/metrics", make_asgi_app())
export_prometheus()

lifecycle = Lifecycle(
    name="reports",
    drain_timeout=DRAIN_TIMEOUT,
    delay=float(os.environ.get("DRAIN_DELAY", "0")),
)
health = Health(name="reports", lifecycle=lifecycle)
# Neither makes a pod unready: all pods share them, so none would be left.
health.add("database", DatabaseRead(engine.connect), critical=False)
health.add("store", RedisPing(store), critical=False)
protect(
    app,
    name="reports",
    lifecycle=lifecycle,
    health=health,
    limits=RequestLimits(
        RequestLimit("200/s", by=None), shared=store, name="reports", on_store_failure="local"
    ),
)


class NewReport(BaseModel):
    """The body of a request for a report."""

    months: int = Field(ge=1, le=120)


@app.post("/reports", status_code=202)
async def order(report: NewReport, request: Request) -> Any:
    """Accept an order; a repeat with the same Idempotency-Key gets the same job."""
    return (await jobs_api.submitted(request, "report", report.model_dump())).response()


# --- The workers ---


async def make_report(job: JobHandle) -> dict[str, int]:
    """Return a result in place of real work."""
    return {"pages": job.payload["months"] * 2}


@asynccontextmanager
async def workers() -> AsyncIterator[JobWorker]:
    """Yield the worker that `seawall worker` runs; its metrics have their own port."""
    await amigrate(database)
    served, _ = start_http_server(int(os.environ.get("METRICS_PORT", "9100")))
    async with Refresher(every=15.0):  # the number of waiting jobs is part of the load
        yield JobWorker(jobs, {"report": make_report})
    served.shutdown()
    await close()
