"""The links of a store: one for each event loop, and a new one after each outage.

Connections from before an outage may be dead without anything having noticed, and calls that wait
on them would block the others; so all links start over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from seawall.redis._link import Link

if TYPE_CHECKING:
    from seawall.redis._clients import Clients
    from seawall.redis._health import Health


class Links:
    """Finds or makes the link of the running loop."""

    def __init__(self, clients: Clients, health: Health, timeout: float) -> None:
        """Start empty."""
        self._clients = clients
        self._health = health
        self._timeout = timeout
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._enders: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._latest: tuple[asyncio.AbstractEventLoop | None, Link | None] = (None, None)
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._links)

    def here(self) -> Link:
        """Return the running loop's link."""
        loop = asyncio.get_running_loop()
        known, link = self._latest
        if known is not loop or link is None or link.era != self._health.outages:
            link = self._find(loop)
            self._latest = loop, link
        return link

    def apart(self) -> Link:
        """Return a separate link, which the caller must close."""
        return Link(self._clients, self._health, self._timeout)

    def discard(self, link: Link) -> None:
        """Close an unused link, in a separate task; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _find(self, loop: asyncio.AbstractEventLoop) -> Link:
        link = self._links.get(loop)
        if link is not None and link.era == self._health.outages:
            return link
        fresh = self.apart()
        if link is None:
            for ended in [old for old in list(self._links) if old.is_closed()]:
                self._forget(ended)  # it was not shut down, only closed
            self._end_with(loop)
        else:
            fresh.spawn(link.retire())
        self._links[loop] = fresh
        return fresh

    def _end_with(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the link when its loop shuts down: loops close their async generators."""

        async def until_the_end() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                await self._close(loop)

        ender = until_the_end()
        try:
            ender.__anext__().send(None)  # runs to the yield: from now on the loop tracks it
        except StopIteration:
            pass
        self._enders[loop] = ender

    def _forget(self, loop: asyncio.AbstractEventLoop) -> Link | None:
        self._latest = None, None
        self._enders.pop(loop, None)
        return self._links.pop(loop, None)

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        link = self._forget(loop)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        """Close the running loop's link, and wait for links that are closing in this loop."""
        loop = asyncio.get_running_loop()
        await self._close(loop)
        closing = {task for task in list(self._closing) if task.get_loop() is loop}
        if closing:
            await asyncio.wait(closing)

    def after_fork(self) -> object:
        """Forget all links, which belong to the parent process; return what must not be closed."""
        parents = self._links, self._enders, self._closing
        self._links, self._enders, self._closing = {}, {}, set()
        self._latest = None, None
        return parents
