"""Leases in a database, and the fence that refuses earlier holders.

Each question about a lease is a statement that commits on its own. So a process that is suspended
in the middle of one holds no lock that others would wait for. A blocking database and a `Sqlite`
are asked by a thread with its own event loop; an async database is asked in the loop of its pool,
which also renews the leases acquired in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._failures import described
from seawall._forks import survives_fork
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import aautocommit, autocommit, checked_database
from seawall.durable.database.driver_errors import TablesMissing
from seawall.durable.database.sqlite import Sqlite
from seawall.errors import LeaseLost, StoreUnavailable
from seawall.leases.lease import LeaseHolding
from seawall.leases.store import (
    Command,
    PeriodicJob,
    Release,
    Renew,
    Take,
    Withdraw,
    close_all,
)
from seawall.models.lease import Busy, LeaseGranted
from seawall.runtime.abandon import end
from seawall.runtime.background import OWN_THREAD, Background, Handle
from seawall.runtime.driver import Steps, sleep_async
from seawall.runtime.store import StoreQuestion

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.durable.database.database import Database
    from seawall.runtime.layers import Kind

ANSWER_TIMEOUT: Final = 2.0
"""Number of seconds that a caller waits for the database's answer."""

THREAD_SLACK: Final = 0.5
"""Extra seconds that a thread waits, so that the database's own timeout ends first."""

LATE_TIMEOUT: Final = 30.0
"""Seconds that a statement may run on without its caller. A lease granted then is released."""

MOST_STATEMENTS: Final = 8
"""Maximum number of concurrent statements about one lease. It bounds a hanging database."""

LONGEST_POLL: Final = 1.0
"""Maximum number of seconds between two questions of a waiter."""

POST_ATTEMPTS: Final = 3
"""Number of attempts of a command that runs in the background."""


class DatabaseLease:
    """One lease of a `Database`; implements `LeaseShare`."""

    timeout: float = ANSWER_TIMEOUT

    def __init__(self, database: Database, name: str, desk: LeaseDesk) -> None:
        """Keep the lease `name` in its own row."""
        self._database = database
        self._name = name
        self._desk = desk
        self._statements: set[asyncio.Task[LeaseGranted | Busy]] = set()
        survives_fork(self)

    @property
    def store_name(self) -> str:
        """The name of the database."""
        return self._database.name

    @property
    def closed(self) -> bool:
        """Whether the database was closed."""
        return self._database.closed

    def longest_poll(self, ttl: float) -> float:
        """Return the seconds until the next look: a database does not announce a free lease."""
        return min(LONGEST_POLL, ttl / 5)

    # Questions

    def ask(self, kind: Kind, command: Command, clock: Clock) -> StoreQuestion:
        """Return a waiter for the answer to `command`."""
        if kind == "async":
            return StoreQuestion(self, command, None, self._add)
        if self._database.is_async:
            raise TypeError(
                f"{self._database!r} is awaited, and so are its leases: write `async with lease`,"
                " or the name that begins with a, such as `await lease.aacquire()`"
            )
        if self._desk.background.thread is threading.current_thread():
            raise RuntimeError(OWN_THREAD)
        return StoreQuestion(self, command, clock.now() + ANSWER_TIMEOUT + THREAD_SLACK, self._add)

    def _add(self, question: StoreQuestion) -> None:
        self._desk.spawn(lambda: self._deliver_answer(question))

    async def _deliver_answer(self, question: StoreQuestion) -> None:
        """Ask the database and deliver the answer, however late it comes.

        A statement is not cancelled when its caller gives up: the driver would have to close the
        connection, and a lease granted at that moment would have no holder.
        """
        if question.over:
            return
        try:
            statement = self._start_statement(question.item)
            if not await _has_ended(statement, ANSWER_TIMEOUT):
                question.fail(self._timed_out(ANSWER_TIMEOUT))
                await _wait_out(statement)
            question.deliver(self._result(statement))
        except (StoreUnavailable, TablesMissing) as error:
            question.fail(error)
        except asyncio.CancelledError:  # the database's thread ends, not a caller's loop
            question.fail(StoreUnavailable(f"the database {self.store_name!r} was closed"))
            raise

    async def call(self, command: Command, patience: float) -> LeaseGranted | Busy:
        """Return the answer to `command`; wait for it at most `patience` seconds."""
        statement = self._start_statement(command)
        if not await _has_ended(statement, patience):
            self._desk.spawn(lambda: _wait_out(statement))
            raise self._timed_out(patience)
        return self._result(statement)

    def post(self, command: Command) -> None:
        """Execute `command` in the background, with up to `POST_ATTEMPTS` attempts."""
        try:
            self._desk.spawn(lambda: self._post(command))
        except StoreUnavailable:
            if not self._database.is_async:  # closed: its thread has ended
                _start_thread(lambda: asyncio.run(self._post(command)))

    async def _post(self, command: Command) -> None:
        for number in range(POST_ATTEMPTS):
            with suppress(StoreUnavailable, TablesMissing):
                await self.call(command, ANSWER_TIMEOUT)
                return
            await sleep_async(0.1 * 4**number)

    def unwanted(self, item: Command, answer: LeaseGranted | Busy) -> None:
        """Release a lease that was granted after its caller stopped waiting."""
        if isinstance(item, Take) and isinstance(answer, LeaseGranted):
            self.post(Release(answer.token))

    def _start_statement(self, command: Command) -> asyncio.Task[LeaseGranted | Busy]:
        if len(self._statements) >= MOST_STATEMENTS:
            raise StoreUnavailable(f"the database {self.store_name!r} has not answered for long")
        statement = asyncio.get_running_loop().create_task(self._execute(command))
        self._statements.add(statement)
        statement.add_done_callback(self._statements.discard)
        return statement

    async def _execute(self, command: Command) -> LeaseGranted | Busy:
        database, name = self._database, self._name
        if isinstance(database.source, Sqlite):
            answer = await database.arun(lambda: _command_steps(name, command))
        elif database.is_async:
            answer = await database.guard.acall(_aonce, database, name, command)
        else:
            answer = await _in_thread(lambda: database.guard.call(_once, database, name, command))
        if isinstance(command, (Release, Withdraw)) and isinstance(answer, LeaseGranted):
            self._desk.wake_waiters(self._name)
        return answer

    def _result(self, statement: asyncio.Task[LeaseGranted | Busy]) -> LeaseGranted | Busy:
        """Return the database's answer or raise the failure."""
        if not statement.done() or statement.cancelled():
            raise self._timed_out(LATE_TIMEOUT)
        error = statement.exception()
        if error is None:
            return statement.result()
        if isinstance(error, TablesMissing):
            raise error
        raise StoreUnavailable(f"the database {self.store_name!r}: {described(error)}") from error

    def _timed_out(self, seconds: float) -> StoreUnavailable:
        return StoreUnavailable(
            f"the database {self.store_name!r} did not answer within {seconds:.3g} s"
        )

    def _after_fork(self) -> None:
        """Forget the statements of the parent process."""
        _parent_tasks.append(self._statements)
        self._statements = set()

    # Jobs, messages, closing

    def start(self) -> None:
        """Start the thread or loop that runs jobs."""
        self._desk.start()

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> PeriodicJob:
        """Run `job` every `seconds`."""
        return self._desk.every(seconds, job)

    def listen(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` when this process releases the lease, and when the database is closed."""
        return self._desk.listen(self._name, callback)

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Do nothing: the state of a database is only known by asking it."""
        return lambda: None

    def keep(self, holding: LeaseHolding) -> None:
        """End `holding` when the database is closed."""
        self._desk.held.add(holding)

    def forget(self, holding: LeaseHolding) -> None:
        """Undo `keep`."""
        self._desk.held.discard(holding)


class LeaseDesk:
    """Asks about, renews and (on close) releases all leases of one database."""

    owner: str = "database"

    def __init__(self, database: Database) -> None:
        """Use a background thread, unless the database is async."""
        self._is_async = database.is_async
        self.background = Background(lambda: None, self._end, self.owner)
        self._loop: asyncio.AbstractEventLoop | None = None
        """For an async database: the event loop that last used it."""
        self.held: set[LeaseHolding] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._handles: set[Handle] = set()
        self._listeners: dict[object, tuple[str, Callable[[], object]]] = {}
        survives_fork(self)

    def start(self) -> asyncio.AbstractEventLoop:
        """Return the event loop in which the database is asked."""
        if not self._is_async:
            return self.background.start()
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            raise StoreUnavailable("the event loop of the database has ended")
        return self._loop

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work()` as a task. Callable from any thread."""
        loop = self.start()

        def begin() -> None:
            task = loop.create_task(work(), context=Context())
            self._tasks.add(task)  # the event loop holds only a weak reference
            task.add_done_callback(self._tasks.discard)

        try:
            loop.call_soon_threadsafe(begin, context=Context())
        except RuntimeError:  # closed in the meantime
            raise StoreUnavailable("the event loop of the database has ended") from None

    # Jobs: run by the background thread, or as tasks in the loop of an async database

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> PeriodicJob:
        """Run `job` every `seconds`."""
        if not self._is_async:
            return self.background.every(seconds, job)
        handle = Handle(self, seconds, job)
        self._handles.add(handle)
        # An empty context: the deadline of the caller must not apply to renewals.
        Context().run(handle.begin)
        return handle

    def submit_if_running(self, callback: Callable[..., object], *args: Any) -> bool:
        """Call `callback` in the loop of the database soon; return False if the loop has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(callback, *args, context=Context())
        except RuntimeError:
            return False
        return True

    def forget(self, handle: Handle) -> None:
        """Stop running the job of `handle`."""
        self._handles.discard(handle)
        self.submit_if_running(handle.end)

    # Messages

    def listen(self, name: str, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` at each `wake_waiters(name)`; return a function that unsubscribes it."""
        key = object()
        self._listeners[key] = name, callback

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop

    def wake_waiters(self, name: str | None = None) -> None:
        """Wake the waiters of this process for `name`; without a name, all of them."""
        for waited_for, callback in list(self._listeners.values()):
            if name is None or name == waited_for:
                callback()

    # Closing

    def close(self) -> None:
        """End all holdings and release their leases; for an async database, in its loop, soon."""
        if not self._is_async:
            self.background.stop()()
            self.wake_waiters()
            return
        self.wake_waiters()
        ended = [holding for holding in list(self.held) if holding.close()]
        for holding in ended:
            with suppress(StoreUnavailable):
                self.spawn(holding.release)

    async def _end(self) -> None:
        self.wake_waiters()
        await close_all(self.held)

    def _after_fork(self) -> None:
        """Drop the thread, loop and tasks of the parent process."""
        _parent_tasks.append((self._tasks, self._handles, self._loop))
        self.background.after_fork()
        self._loop = None
        self.held, self._tasks, self._handles, self._listeners = set(), set(), set(), {}


_parent_tasks: Final[list[object]] = []
"""Tasks of a parent process. They cannot end here; a reference keeps asyncio from warning."""


# Statements


def _command_steps(name: str, command: Command) -> Steps[LeaseGranted | Busy]:
    """Execute `command` by the rules of `LeaseModel`."""
    rows: list[Any]
    match command:
        case Take(holder, attempt, ttl):
            # Read first: otherwise each waiter would attempt a useless write at every poll.
            seen = yield from _look(name)
            if seen is not None and seen[0].left and seen[1] != holder:
                return seen[0]
            arguments = {"name": name, "holder": holder, "attempt": attempt, "ttl": ttl}
            rows = yield NamedQuery("leases.take", arguments)
        case Renew(token, ttl):
            rows = yield NamedQuery("leases.renew", {"name": name, "token": token, "ttl": ttl})
        case Release(token):
            rows = yield NamedQuery("leases.release", {"name": name, "token": token})
        case Withdraw(holder, attempt):
            arguments = {"name": name, "holder": holder, "attempt": attempt}
            rows = yield NamedQuery("leases.withdraw", arguments)
    if rows:
        return LeaseGranted(rows[0][0])
    seen = yield from _look(name)
    return Busy(0, 0) if seen is None else seen[0]


def _look(name: str) -> Steps[tuple[Busy, str] | None]:
    """Return the current state and holder of the lease; None if it was never taken."""
    rows = yield NamedQuery("leases.look", {"name": name})
    if not rows:
        return None
    token, holder, left, behind = rows[0]
    if behind:
        yield NamedQuery("leases.clamp", {"name": name})
    return Busy(token, left), holder


async def _aonce(database: Database, name: str, command: Command) -> LeaseGranted | Busy:
    async with aautocommit(database) as raw:
        return await database.connection(raw).arun(_command_steps(name, command))


def _once(database: Database, name: str, command: Command) -> LeaseGranted | Busy:
    with autocommit(database) as raw:
        return database.connection(raw).run(_command_steps(name, command))


async def _in_thread(work: Callable[[], LeaseGranted | Busy]) -> LeaseGranted | Busy:
    """Await blocking work in a daemon thread, which does not delay the exit of the process."""
    answer: Future[LeaseGranted | Busy] = Future()

    def do() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - passed on to the waiter
            with suppress(InvalidStateError):
                answer.set_exception(error)
        else:
            with suppress(InvalidStateError):
                answer.set_result(result)

    _start_thread(do)
    return await asyncio.wrap_future(answer)


def _start_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=Context().run, args=(work,), name="seawall-lease", daemon=True).start()


async def _has_ended(task: asyncio.Task[Any], seconds: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return bool(done)


async def _wait_out(statement: asyncio.Task[Any]) -> None:
    """Wait for a statement without a waiter for up to `LATE_TIMEOUT` seconds; then cancel it."""
    if not await _has_ended(statement, LATE_TIMEOUT):
        await end([statement])


# Fencing


class Fence:
    """Refuses writes of earlier lease holders: it remembers the highest token it has seen."""

    def __init__(self, database: Database, resource: str) -> None:
        """Protect `resource`; all its writers must check the same fence."""
        self._database = checked_database("Fence", database)
        if not isinstance(resource, str) or not resource:
            raise TypeError(f"Fence(database, {resource!r}): write a name, such as 'reports'")
        self.resource = resource

    def __repr__(self) -> str:
        return f"<Fence {self.resource!r}>"

    def check(self, conn: Any, token: int) -> None:
        """Raise `LeaseLost` if a higher token was seen; call it first in each transaction.

        `conn` is the connection of that transaction. Until it ends, the fence blocks every other
        token. So what is written after the check is written before any work of a later holder.
        """
        own = self._database.connection(conn)
        if own.kind.is_async:
            raise TypeError(f"{own!r} is awaited: write `await fence.acheck(conn, token)`")
        own.join(self._steps(token), TOGETHER)

    async def acheck(self, conn: Any, token: int) -> None:
        """Async twin of `check`."""
        own = self._database.connection(conn)
        if not own.kind.is_async:
            raise TypeError(f"{own!r} is not awaited: write `fence.check(conn, token)`")
        await own.ajoin(self._steps(token), TOGETHER)

    def _steps(self, token: int) -> Steps[None]:
        check.count("token", token, maximum=check.MOST)
        arguments = {"resource": self.resource, "token": token}
        if (yield NamedQuery("leases.pass_fence", arguments)):
            return
        rows = yield NamedQuery("leases.fence", {"resource": self.resource})
        raise LeaseLost(
            f"the fence {self.resource!r} has seen token {rows[0][0]}: the lease of token {token}"
            " is over"
        )


TOGETHER: Final = "the check and what it protects are committed together"
