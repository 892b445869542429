"""Group commit: statements of many callers in one round trip and one commit.

Promises:

- A single caller is not delayed. While statements with one text are running, further ones with that
  text queue up, and are sent together as soon as one of the running ones ends.
- No caller gets a result before the commit.
- If one statement of a group fails, none is executed, and each is repeated on its own. So a mistake
  affects only its own caller. After a lost connection, too, each caller repeats its statement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall.context import Scope, deadline_scope
from seawall.durable._connections import Rows
from seawall.durable._sql import Arguments, Text
from seawall.runtime.runners import sleep_async

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, Task, TimerHandle

    from seawall.durable.database import Database

UNDER_WAY: Final = 2
"""Maximum running requests per text: two, so that one that hangs does not stop all others."""
MOST: Final = 1000
"""Maximum statements in one group."""
LARGEST: Final = 64 * 1024
"""Approximate maximum bytes of arguments in one group.

asyncpg writes that much at once, and can be cancelled after it.
"""
HOLDING: Final = 0.05
"""Seconds for which a busy queue keeps a connection: others need it too."""
PATIENCE: Final = 0.25
"""Seconds after which a waiter proceeds on its own: the running requests may hang."""
APART: Final = object()
"""Marker result: execute the statement on your own."""

Alone = Callable[[], Awaitable[Rows]]


def gathering(database: Database, together: int, count: Callable[..., None]) -> Together | None:
    """Return a `Together` for groups of up to `together` statements; None if that is 1."""
    if check.count("together", together, maximum=MOST) == 1:
        return None
    if not hasattr(database.source, "acquire"):
        raise TypeError(
            f"together={together!r}: that needs a pool of asyncpg; leave it out for {database!r}"
        )
    if not hasattr(import_module("asyncpg").Connection, "fetchmany"):
        raise TypeError(f"together={together!r}: that needs asyncpg 0.30, or a newer one")
    return Together(database, together, count)


class _Line:
    """The queue of one text: its waiters, and the number of running requests."""

    def __init__(self, sql: str, most: int, loop: AbstractEventLoop) -> None:
        self.sql = sql
        self.loop = loop
        self.waiting: deque[_Waiting] = deque()
        self.under_way = 0
        self.in_flight = 0
        """Number of statements in the running requests."""
        self.most = most
        """Maximum group size: reduced after a failure, because the whole group is repeated."""
        self.sending: set[Task[None]] = set()
        self._timer: TimerHandle | None = None

    def wait(self, waiting: _Waiting) -> None:
        """Queue a waiter, with a time limit."""
        self.waiting.append(waiting)
        if self._timer is None:
            self._timer = self.loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """Release the waiters whose time limit has passed; the queue is in order of arrival."""
        now = self.loop.time()
        while self.waiting and now - self.waiting[0].since >= PATIENCE:
            self.waiting.popleft().tell(APART)
        self._timer = None
        if self.waiting:
            rest = self.waiting[0].since + PATIENCE - now
            self._timer = self.loop.call_later(max(0.0, rest), self._look)

    def take(self) -> list[_Waiting]:
        """Remove and return the next group, without waiters that have gone or are too late.

        A group is a fair share of all statements. Otherwise a caller that returns to an empty queue
        would always go alone.
        """
        taken: list[_Waiting] = []
        size = 0
        share = -(-(len(self.waiting) + self.in_flight) // UNDER_WAY)
        while self.waiting and len(taken) < min(share, self.most):
            size += self.waiting[0].size
            if taken and size > LARGEST:
                break
            one = self.waiting.popleft()
            if one.is_late():
                one.tell(APART)
            elif not one.answer.done():
                taken.append(one)
        return taken

    def break_up(self) -> None:
        """Release all waiters."""
        for one in self.waiting:
            one.tell(APART)
        self.waiting.clear()


class _Waiting:
    __slots__ = ("answer", "arguments", "deadline", "since", "size")

    def __init__(self, arguments: list[Any], loop: AbstractEventLoop) -> None:
        self.arguments = arguments
        self.size = sum(len(given) for given in arguments if isinstance(given, (str, bytes)))
        self.answer: Future[Any] = loop.create_future()
        self.since = loop.time()
        self.deadline: Scope | None = deadline_scope()

    def is_late(self) -> bool:
        return self.deadline is not None and bool(self.deadline[1].now() >= self.deadline[0])

    def tell(self, what: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(what)


class Together:
    """Sends the statements of one event loop on connections of its asyncpg pool."""

    def __init__(self, database: Database, most: int, count: Callable[..., None]) -> None:
        """Group up to `most` statements; report to `count` how many were grouped or not."""
        self._database = database
        self._most = most
        self._count = count
        self._loop: AbstractEventLoop | None = None
        self._lines: dict[str, _Line] = {}

    async def ask(self, text: Text, arguments: Arguments, alone: Alone) -> Rows:
        """Return the one row of a statement, none if it is NULL; or the result of `alone()`."""
        from asyncio import get_running_loop

        loop = get_running_loop()
        if loop is not self._loop:  # waiters of another loop have ended with it
            self._loop, self._lines = loop, {}
        line = self._lines.get(text.sql)
        if line is None:
            line = self._lines[text.sql] = _Line(text.sql, self._most, loop)
        if line.under_way < UNDER_WAY:
            line.under_way += 1
            line.in_flight += 1
            try:
                return await alone()
            finally:
                line.in_flight -= 1
                self._landed(line)
        waiting = _Waiting(text.positional(arguments), loop)
        if waiting.size > LARGEST:
            return await alone()
        line.wait(waiting)
        row = await waiting.answer
        if row is APART:
            self._count("apart")
            return await alone()
        return [] if row[0] is None else [row]

    def _landed(self, line: _Line) -> None:
        """Send the waiters that have queued up meanwhile."""
        line.under_way -= 1
        if line.waiting and not line.loop.is_closed():
            line.under_way += 1
            # An empty context: not the deadline or tenant of the caller that happens to be first.
            task = line.loop.create_task(self._send(line), context=Context())
            line.sending.add(task)
            task.add_done_callback(partial(self._ended, line))
        elif not line.under_way and not line.waiting and self._lines.get(line.sql) is line:
            del self._lines[line.sql]

    def _ended(self, line: _Line, task: Task[None]) -> None:
        """Handle the end of a task, even if it was cancelled before it started."""
        line.sending.discard(task)
        # the event loop ends, or the pool failed
        if task.cancelled() or task.exception() is not None:
            line.break_up()
        self._landed(line)

    async def _send(self, line: _Line) -> None:
        while line.waiting:
            async with self._database.source.acquire() as connection:
                until = line.loop.time() + HOLDING
                while line.loop.time() < until and (taken := line.take()):
                    rows = [APART] * len(taken)
                    try:
                        rows = await self._sent(connection, line, taken)
                    finally:
                        for one, row in zip(taken, rows, strict=True):
                            one.tell(row)
                    if rows[0] is APART:
                        break  # perhaps the connection has failed
                    await sleep_async(0)  # callers that got their result may come again at once

    async def _sent(self, connection: Any, line: _Line, taken: list[_Waiting]) -> list[Any]:
        """Return the result for each waiter."""
        every = [one.arguments for one in taken]
        line.in_flight += len(taken)
        try:
            rows: list[Any] = await self._database.guard.acall(
                connection.fetchmany, line.sql, every
            )
        except Exception:  # noqa: BLE001 - repeating each shows whose it is
            rows = []
        finally:
            line.in_flight -= len(taken)
        if len(rows) == len(taken):
            line.most = min(line.most + 1, self._most)
            if len(taken) > 1:
                self._count("together", by=len(taken))
            return rows
        line.most = max(1, line.most // 2)
        return [APART] * len(taken)
