"""What tests of the middleware for Idempotency-Key need: an app to count, and a time to set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from seawall.durable import Database
from seawall.durable.database.connections import TextQuery
from seawall.durable.http.middleware import IdempotentRequests, idempotent_request
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.web.asgi_types import Send
from tests.durable.conftest import Opening
from tests.web.support import Answer, ask

KEY = ("idempotency-key", '"8e03978e-40d5"')
USER = ("x-user", "ann")


class Shop:
    """An app that counts what it carries out, and answers as it is told."""

    def __init__(
        self, *parts: bytes, status: int = 201, headers: Any = (), more: Any = None
    ) -> None:
        """Answer with these parts, after `more(self)` is done."""
        self.parts = parts or (b'{"order": 1}',)
        self.status = status
        self.headers = list(headers)
        self.more = more
        self.orders: list[bytes] = []
        self.names: list[Any] = []
        self.busy = asyncio.Event()
        """Whether it has begun."""

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Take an order."""
        body = (await receive())["body"]
        self.orders.append(body)
        self.names.append(idempotent_request(scope))
        self.busy.set()
        if self.more is not None:
            await self.more(self)
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        await send(start)
        for part in self.parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": self.parts[-1]})


def user(incoming: Any) -> str | None:
    """Say whose a request is."""
    found: str | None = incoming.header("x-user")
    return found


@asynccontextmanager
async def edge_of(
    opening: Opening, app: Any, *, idempotency: Any = None, **options: Any
) -> AsyncIterator[IdempotentRequests]:
    """Give `app` with the middleware around it, on a fresh database."""
    async with opening() as database:
        options = {"routes": ["/orders", "/orders/{id}/pay"], "scope": user, **options}
        yield IdempotentRequests(app, Idempotency(database, **(idempotency or {})), **options)


async def post(app: Any, path: str = "/orders", *headers: Any, **options: Any) -> Answer:
    """Order something, as ann, with the one key unless told otherwise."""
    options = {"method": "POST", "body": b"book", **options}
    return await ask(app, path, headers=headers or (KEY, USER), **options)


def first(answer: Answer) -> bool:
    """Tell whether this is no replay."""
    return "idempotent-replayed" not in answer.headers


async def set_time(database: Database, seconds: int) -> None:
    """Let the database have a time of the test's own."""
    table = database.names.table("clock")
    if database._now is None:
        await database.arun(lambda: said(f"CREATE TABLE {table} (us bigint)"))
        await database.arun(lambda: said(f"INSERT INTO {table} VALUES (0)"))  # noqa: S608 - our own
        database._now = f"(SELECT us FROM {table})"  # noqa: S608 - our own
    at = 1_000_000 * (1_800_000_000 + seconds)
    await database.arun(lambda: said(f"UPDATE {table} SET us = {at}"))  # noqa: S608 - our own


def said(text: str) -> Any:
    """Ask by a text of the test's own."""
    rows = yield TextQuery(text, {})
    return rows
