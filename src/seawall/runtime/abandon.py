"""Ending tasks that may not want to end: cancelled, waited for so long, and then left alone.

A task may ignore its cancellation, or take minutes over it: a driver that cleans up after a network
that drops all packets, say. Whoever has to be back in time waits for `end`, and for no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

LEAVING: Final = 0.5
"""Seconds that a task has to end after it was cancelled."""

_left: Final[set[asyncio.Task[Any]]] = set()
"""Tasks that nobody waits for. The event loop itself holds only weak references to its tasks."""


async def end(tasks: Iterable[asyncio.Task[Any]], within: float = LEAVING) -> bool:
    """Cancel `tasks` and wait for them, `within` seconds at most; abandon those that go on.

    Return whether all of them have ended.
    """
    going = {task for task in tasks if not task.done()}
    for task in going:
        task.cancel()
    try:
        if going:
            _ended, going = await asyncio.wait(going, timeout=within)
    finally:
        for task in going:
            abandon(task)
    return not going


def abandon(task: asyncio.Task[Any]) -> None:
    """Let `task` go on by itself; nobody waits for it, and nobody looks at how it ends.

    `asyncio.run` does not wait for it either: it would, for ever if need be, for any task that is
    registered.
    """
    if not task.done():
        _left.add(task)
        asyncio._unregister_task(task)  # noqa: SLF001 - documented, for those who have own tasks
    task.add_done_callback(_over)


def _over(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # seen: or asyncio would complain that nobody has
