"""The same operations on every database, by every driver."""

from __future__ import annotations

import asyncio
from typing import Any

from seawall.durable import amigrate
from seawall.durable._connections import AskText
from tests.durable.conftest import Opening


def count() -> Any:
    """Count the steps that were done."""
    rows = yield AskText("SELECT count(*) FROM {versions}", {})
    return rows[0][0]


def test_migrating_is_done_once_by_many(opening: Opening):
    """However many begin at once, each step is done by one of them."""

    async def main() -> None:
        async with opening() as database:
            before = await database.arun(count)
            assert before > 0
            done = await asyncio.gather(*(amigrate(database) for _ in range(8)))
            assert done == [[]] * 8
            assert await database.arun(count) == before

    asyncio.run(main())


def test_what_fails_leaves_nothing(opening: Opening):
    """An operation that raises is rolled back."""

    def failing() -> Any:
        yield AskText("DELETE FROM {versions}", {})
        raise RuntimeError("no")

    async def main() -> None:
        async with opening() as database:
            before = await database.arun(count)
            try:
                await database.arun(failing)
            except RuntimeError:
                pass
            assert await database.arun(count) == before

    asyncio.run(main())
