"""What is over is removed while an app or a consumer lives, without anybody asking for it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Idempotency, IdempotentRequests, Inbox, cleaning
from seawall.testing import run_virtual
from tests.durable.conftest import opening_by
from tests.durable.http.support import set_time, user
from tests.support import let_pass


class Store:
    """What has something that is over."""

    def __init__(self) -> None:
        self.cleaned = 0
        self.fails = False

    async def acleanup(self) -> int:
        """Remove it."""
        self.cleaned += 1
        if self.fails:
            raise ConnectionRefusedError("away\nparameters: secret")
        return 1


def test_cleaning_goes_on_while_the_block_runs(caplog: pytest.LogCaptureFixture):
    """Every so often, whatever fails: that is logged by its first line; and no more afterwards."""

    async def main() -> None:
        one, two = Store(), Store()
        one.fails = True
        async with cleaning(one, two, every=10.0):
            assert (one.cleaned, two.cleaned) == (0, 0)
            await let_pass(25)
            assert (one.cleaned, two.cleaned) == (2, 2)
        await let_pass(25)
        assert (one.cleaned, two.cleaned) == (2, 2)

    with caplog.at_level(logging.ERROR, "seawall"):
        run_virtual(main())
    assert "ConnectionRefusedError: away" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("every", [20.0, None])
def test_the_middleware_cleans_while_its_app_lives(tmp_path: Path, every: float | None):
    """From the app's start until it is told to end, and not when it closes its database."""

    async def main() -> None:
        seen: list[tuple[str, int]] = []
        messages = asyncio.Queue[dict[str, Any]]()
        store = Store()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            for _ in range(2):
                message = await receive()
                await let_pass(100 if message["type"] == "lifespan.shutdown" else 0)
                seen.append((message["type"], store.cleaned))
                await send({"type": f"{message['type']}.complete"})

        async def send(_message: Any) -> None: ...

        async with opening_by("sqlite", None, tmp_path)() as database:  # type: ignore[arg-type]
            records = Idempotency(database)
            records.acleanup = store.acleanup  # type: ignore[method-assign, assignment]
            around = IdempotentRequests(
                app, records, routes=["/orders"], scope=user, clean_every=every
            )
            living = asyncio.ensure_future(around({"type": "lifespan"}, messages.get, send))
            messages.put_nowait({"type": "lifespan.startup"})
            await let_pass(50)
            messages.put_nowait({"type": "lifespan.shutdown"})
            await living
        cleaned = 0 if every is None else 2
        assert seen == [("lifespan.startup", 0), ("lifespan.shutdown", cleaned)]

    run_virtual(main())


def test_records_and_noted_messages_are_removed(tmp_path: Path):
    """An `Idempotency` and an `Inbox` are cleaned by it as they are by hand."""

    async def main() -> None:
        async with opening_by("sqlite", None, tmp_path)() as database:  # type: ignore[arg-type]
            await set_time(database, 0)
            records, inbox = Idempotency(database), Inbox(database, ttl=10.0)
            await records.areserve("ann", "pay", "k", None)
            with database.transaction() as conn, inbox.once(conn, "mail", "1"):
                pass
            await set_time(database, 100_000)
            async with cleaning(records, inbox, every=0.001):
                while await inbox.aseen("mail", "1") or not records.snapshot()["cleaned"]:
                    pass

    asyncio.run(main())
