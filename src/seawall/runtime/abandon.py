"""Ending tasks that may refuse to end: cancel, wait for a bounded time, then abandon.

A task may ignore its cancellation, or take minutes over it: for example, a driver that cleans up
after a network that drops all packets. A caller that must be back in time waits for `end`, which is
bounded, and not for the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

LEAVING: Final = 0.5  # seconds that a task has to end after it was cancelled

_left: Final[set[asyncio.Task[Any]]] = set()  # the event loop has only weak references to its tasks


async def end(tasks: Iterable[asyncio.Task[Any]], within: float = LEAVING) -> bool:
    """Cancel `tasks`, wait up to `within` seconds, abandon the rest; return whether all ended."""
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


def is_cancelled() -> bool:
    """Return whether this task is being cancelled; else a CancelledError is that of another one."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def abandon(task: asyncio.Task[Any]) -> None:
    """Let `task` continue unobserved; not even `asyncio.run` waits for it."""
    if not task.done():
        _left.add(task)
        asyncio._unregister_task(task)  # noqa: SLF001 - documented, for code with its own tasks
    task.add_done_callback(_over)


def _over(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # retrieve it, or asyncio would complain that it never was
