"""The warehouse: another service with its own database, which receives orders as webhooks.

    POST /events   204; takes a signed event, however often it comes
    GET  /parcels  the parcels to send

An event may come twice. Its id and the parcel are committed together, so there is one parcel.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select
from storage import Storage

from seawall.durable import Inbox, cleaning, verify_webhook
from seawall.web.fastapi import protect

tables = MetaData()
parcels = Table(
    "parcels",
    tables,
    Column("id", Integer, primary_key=True),
    Column("order_id", Integer, nullable=False),
    Column("content", Text, nullable=False),
)
storage = Storage("warehouse")
inbox = Inbox(storage.database)
secret = os.environ["WEBHOOK_SECRET"]


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the tables before the first event, and close after the last."""
    await storage.prepare(tables)
    async with cleaning(inbox):
        yield
    await storage.close()


app = FastAPI(lifespan=lifespan)
edge = protect(app)


@app.post("/events", status_code=204)
async def received(request: Request) -> None:
    """Take an event; after a 2xx it is not sent again.

    A wrong signature raises, and the edge answers 403.
    """
    event = verify_webhook(secret, request.headers, await request.body())
    async with (
        storage.engine.begin() as connection,
        inbox.once(connection, "parcels", event) as first,
    ):
        if first and request.headers["seawall-event"] == "order.placed":
            order = await request.json()
            content = f"{order['quantity']} x {order['item']}"
            await connection.execute(insert(parcels).values(order_id=order["id"], content=content))


@app.get("/parcels")
async def listed() -> dict[str, Any]:
    """Show the parcels to send, and how many repeated events were dropped."""
    async with storage.engine.connect() as connection:
        rows = await connection.execute(select(parcels.c.order_id, parcels.c.content))
        found = [dict(row) for row in rows.mappings()]
    return {"parcels": found, "duplicates": inbox.snapshot()["duplicates"]}
