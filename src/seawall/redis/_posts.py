"""Messages to the store that need no answer, sent one after another, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Final

from seawall.errors import StoreUnavailable

if TYPE_CHECKING:
    from seawall.redis._link import Argument, Link
    from seawall.redis._scripts import Script
    from seawall.runtime.background import Background

MOST: Final = 10_000
"""Maximum number of messages waiting to be sent; more are dropped, and counted."""

LATE: Final = 1.0
"""Seconds after which a message counts as a failure of the store: no caller waits for it."""


class Posts:
    """Messages that wait to be sent by the background thread."""

    def __init__(self, background: Background, link: Callable[[], Link]) -> None:
        """Send through `link()`."""
        self.dropped = 0
        self._background = background
        self._link = link
        self._waiting: deque[tuple[Script, Sequence[str], Sequence[Argument]]] = deque()
        self._asked = False
        self._sender: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Send this after what was added before; from any thread; never raises."""
        if len(self._waiting) >= MOST:
            self.dropped += 1
            return
        self._waiting.append((script, keys, args))
        if not self._asked:
            self._asked = True
            try:
                self._background.submit(self._begin)
            except StoreUnavailable:  # closed
                self._drop()

    def _begin(self) -> None:
        self._asked = False  # what is added from now on submits again
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=Context())

    async def _send(self) -> None:
        try:
            while self._waiting:
                message = self._waiting.popleft()
                try:
                    await self._link().run(*message, LATE)
                except StoreUnavailable:
                    self.dropped += 1
        finally:
            self._sender = None

    async def flush(self) -> None:
        """Send all waiting messages; in the background loop."""
        self._begin()
        while self._sender is not None:
            await asyncio.wait({self._sender})

    def _drop(self) -> None:
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._asked = False

    def after_fork(self) -> object:
        """Forget the parent's messages in a child process; return what must not be closed."""
        parents = self._sender
        self._waiting.clear()
        self._asked = False
        self._sender = None
        return parents
