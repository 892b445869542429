"""What the tests of calls that are done later share."""

from __future__ import annotations

from typing import Any

from seawall.context import current_idempotency_key, current_tenant
from seawall.durable import Database


class Vendor:
    """A dependency that is down until it is not, and what it has done."""

    def __init__(self, *, down: bool = False) -> None:
        self.down = down
        self.done: list[Any] = []
        self.asked = 0

    async def send(self, order: int, note: str = "") -> str:
        self.asked += 1
        if self.down:
            raise ConnectionError("no route")
        self.done.append((order, note, current_idempotency_key(), current_tenant()))
        return "sent"

    def send_now(self, order: int, note: str = "") -> str:
        self.asked += 1
        if self.down:
            raise ConnectionError("no route")
        self.done.append((order, note, current_idempotency_key(), current_tenant()))
        return "sent"


async def at(database: Database, microseconds: int) -> None:
    """Let it be that time in the database."""
    database._now = str(microseconds)
