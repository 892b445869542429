"""The path of one call through a service with several pods, from the user to the vendor and back.

    shed > user limit > queue timeout > breaker > vendor limit > local limit > semaphore
         > call timeout > vendor > adaptive retry

Run some of them against one Valkey or Redis, with the vendor of this folder:

    uvicorn vendor:app --port 9000
    REDIS_URL=redis://127.0.0.1 VENDOR_URL=http://127.0.0.1:9000 uvicorn service:app --port 8000
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Guard,
    RateLimit,
    RedisStore,
    Retry,
    RetryBudget,
    Shed,
    Timeout,
    transient,
)
from seawall.clients.httpx import AsyncGuardedTransport
from seawall.limits import vegas
from seawall.load.signals import occupancy
from seawall.policies.retry import adaptive_attempts
from seawall.shedding import by_criticality
from seawall.web import RequestLimit, RequestLimits, api_key
from seawall.web.fastapi import protect

store = RedisStore(os.environ["REDIS_URL"], prefix=os.environ.get("PREFIX", "call-flow"))

# --- The path to the vendor: each attempt passes all of it ---

vendor = Guard(
    "vendor",
    Retry(  # adaptive: fewer attempts under pressure, none beyond the budget
        on=transient, attempts=adaptive_attempts(3), backoff=0.05, budget=RetryBudget()
    ),
    Breaker(consecutive=5, break_for=1.0, shared=store, name="vendor"),
    RateLimit("40/s", burst=30, shared=store, name="vendor"),  # the vendor's limit for all pods
    RateLimit("30/s", burst=30),  # maximum of this pod
    Bulkhead(10, max_wait=0.5),  # the semaphore
    Timeout(1.0),  # the call timeout
)
client = httpx.AsyncClient(
    base_url=os.environ["VENDOR_URL"], transport=AsyncGuardedTransport(vendor)
)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Close client and store after the last request."""
    async with client:
        yield
    await store.aclose()


# --- The edge: what a request passes before any work is done ---

app = FastAPI(lifespan=lifespan)
places = AdaptiveLimit(  # 16 or more are served; 16 wait in the queue, until its timeout
    vegas(initial=16, minimum=16), max_wait=0.5, max_waiting=16, order="criticality"
)
edge = protect(
    app,
    timeout=3.0,
    shed=Shed(by_criticality(), load=occupancy(places)),
    limits=RequestLimits(RequestLimit("20/s", burst=10, by=api_key()), shared=store, name="users"),
    concurrency=places,
)


@app.get("/answer")
async def answer(question: str) -> dict[str, str]:
    """Ask the vendor; the edge answers all errors."""
    asked = await client.get("/complete", params={"question": question})
    asked.raise_for_status()
    found: dict[str, str] = asked.json()
    return found


@app.get("/state")
async def state() -> dict[str, object]:
    """Show the state of this pod's guard and edge."""
    return {"vendor": vendor.snapshot(), "edge": edge.snapshot()}
