"""Connection of a demo process to its parent, which ends the process when the parent is gone.

The parent holds the other end of the standard input: each line is a message, and EOF is the end of
the demo, whatever happened to the parent. Then the process has `GRACE` seconds to stop itself. A
thread reads, so that this works while modules are imported and while a loop is stuck.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

from seawall.clock import SYSTEM
from seawall_demo._settings import GRACE

Message = dict[str, Any]


class Lifeline:
    """The channel to the parent and back. Create it before anything slow is imported."""

    def __init__(self) -> None:
        """Start listening; messages are queued until `listen` is called."""
        self._lock = Lock()
        self._kept: list[Message | None] = []
        self._deliver: Callable[[Message | None], object] | None = None
        Thread(target=self._read, name="lifeline", daemon=True).start()

    def listen(self, on_message: Callable[[Message], None], ended: Callable[[], None]) -> None:
        """Pass messages to `on_message`, and call `ended` at the end, in the running event loop."""
        loop = asyncio.get_running_loop()

        def deliver(message: Message | None) -> None:
            try:
                if message is None:
                    loop.call_soon_threadsafe(ended)
                else:
                    loop.call_soon_threadsafe(on_message, message)
            except RuntimeError:
                pass  # the loop is closed: the process is about to end

        with self._lock:
            for message in self._kept:
                deliver(message)
            self._kept.clear()
            self._deliver = deliver

    def send(self, **message: Any) -> None:
        """Send a message to the parent; do nothing if it is gone."""
        try:
            sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            pass  # it is gone, and this process is about to end

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._hand_on(json.loads(line))
        self._hand_on(None)
        SYSTEM.sleep(GRACE)
        os._exit(0)

    def _hand_on(self, message: Message | None) -> None:
        with self._lock:
            if self._deliver is None:
                self._kept.append(message)
            else:
                self._deliver(message)
