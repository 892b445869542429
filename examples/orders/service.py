"""The order service: each order is placed once, however often it is sent.

    POST   /orders                   201; needs an Idempotency-Key
    GET    /orders/{number}          200
    POST   /orders/{number}/invoice  202 with Location; needs an Idempotency-Key
    GET    /jobs/{id}                the state of the invoice; Retry-After says when to poll again
    DELETE /jobs/{id}                cancels it

It writes into its database and nowhere else. Effects elsewhere are committed as an event, which
dispatcher.py delivers, or as a job, which worker.py runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import insert, select
from starlette.exceptions import HTTPException as AnyHTTPException
from storage import OrderStorage, orders, tables

from seawall.durable import IdempotentRequests, JobsApi, NewEvent, idempotent_request
from seawall.web import Incoming, Problem
from seawall.web.fastapi import protect

storage = OrderStorage()
tokens = dict(pair.split("=") for pair in os.environ["TOKENS"].split(","))  # ann-secret=acme,...


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the tables before the first request, and close after the last."""
    await storage.prepare(tables)
    yield
    await storage.close()


# --- The way in: the edge, then the keys, then the app ---


def tenant_of(incoming: Incoming) -> str | None:
    """Return the tenant of a request by its token; None for an unknown one, which sees nothing."""
    return tokens.get((incoming.header("authorization") or "").removeprefix("Bearer "))


app = FastAPI(lifespan=lifespan)
jobs = JobsApi(storage.jobs, scope=tenant_of)
app.mount("/jobs", jobs)
jobs.describe(app, submits=["/orders/{number}/invoice"], required=True)
keys = IdempotentRequests.add_to(
    app,
    storage.idempotency,
    routes=["/orders"],
    scope=tenant_of,
    # All effects of an order are in the transaction that completes its key: without a 201 there is
    # no order, and the key is freed, whatever went wrong.
    keep={201},
)
edge = protect(app)


def the_tenant(request: Request) -> str:
    """Return the tenant of a request, for a route."""
    tenant = jobs.scope_of(request)
    if tenant is None:
        raise HTTPException(403, "Say who you are: Authorization: Bearer ...")
    return tenant


Tenant = Annotated[str, Depends(the_tenant)]


@app.exception_handler(AnyHTTPException)
async def refused(_request: Request, error: AnyHTTPException) -> Response:
    """Answer refusals of the app as the edge answers its own: as problem+json."""
    problem = Problem(error.status_code, HTTPStatus(error.status_code).phrase, str(error.detail))
    headers = {**(error.headers or {}), "Content-Type": "application/problem+json"}
    return Response(problem.body(), problem.status, headers)


@app.exception_handler(RequestValidationError)
async def malformed(request: Request, error: RequestValidationError) -> Response:
    """Say what is wrong with a request, in the same form."""
    wrong = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
    return await refused(request, HTTPException(422, "; ".join(wrong)))


# --- Orders ---


class NewOrder(BaseModel):
    """The body of a new order."""

    item: str = Field(min_length=1, max_length=100)
    quantity: int = Field(ge=1, le=1000)


@app.post("/orders", status_code=201)
async def place(order: NewOrder, request: Request) -> Response:
    """Place an order: its row, event and answer are committed together, or none of them."""
    claim = idempotent_request(request, required=True)
    async with storage.engine.begin() as connection:
        values = {"tenant": claim.scope, **order.model_dump()}
        row = await connection.execute(insert(orders).values(values).returning(orders.c.id))
        placed = {"id": row.scalar_one(), **order.model_dump()}
        number = str(placed["id"])
        return await claim.acomplete(
            connection,
            JSONResponse(placed, 201, {"Location": f"/orders/{number}"}),
            outbox=storage.outbox,
            events=[NewEvent("order", number, "order.placed", placed)],
            notify=True,
        )


@app.get("/orders/{number}")
async def show(number: int, tenant: Tenant) -> dict[str, Any]:
    """Show an order to its tenant."""
    found = select(orders.c.id, orders.c.item, orders.c.quantity)
    async with storage.engine.connect() as connection:
        rows = await connection.execute(found.filter_by(id=number, tenant=tenant))
    row = rows.mappings().first()
    if row is None:
        raise HTTPException(404, "There is no such order.")
    return dict(row)


# --- Invoices: work that takes longer than a request ---


@app.post("/orders/{number}/invoice", status_code=202)
async def invoice(number: int, tenant: Tenant, request: Request) -> Any:
    """Order an invoice. The key is the job's: a repeat gets the same job."""
    order = await show(number, tenant)
    return (await jobs.submitted(request, "invoice", order, required=True)).response()
