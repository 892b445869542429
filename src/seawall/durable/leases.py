"""Leases in a database, and the fence that refuses holders of the past.

A lease is asked about in statements that commit by themselves. So a process that is stopped in the
middle of one holds no lock, and nobody waits behind it. Databases that block, and a `Sqlite`, are
asked by a thread with an event loop of its own; a database that is awaited is asked in the loop of
its pool, which also renews what was taken in it.
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
from seawall.durable._autocommit import aautocommit, autocommit
from seawall.durable._connections import Ask, arequire_transaction, require_transaction
from seawall.durable._missing_tables import TablesMissing
from seawall.durable.sqlite import Sqlite
from seawall.errors import LeaseLost, StoreUnavailable
from seawall.leases.store import Command, Job, Kept, Release, Renew, Take, Withdraw, close_all
from seawall.models.lease import Busy, Granted
from seawall.runtime.abandon import end
from seawall.runtime.asking import Asking
from seawall.runtime.background import OWN_THREAD, Background, Handle
from seawall.runtime.mutex import survives_fork
from seawall.runtime.runners import sleep_async
from seawall.runtime.stepping import Steps

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.durable._connections import Connection
    from seawall.durable.database import Database
    from seawall.runtime.layers import Kind

ANSWER: Final = 2.0
"""Seconds that a caller waits for the database's answer."""

SLACK: Final = 0.5
"""Seconds that a thread waits beyond that: whoever asks the database gives up first."""

LATE: Final = 30.0
"""Seconds that a statement goes on without a caller: what it is granted then is given back."""

UNDER_WAY: Final = 8
"""Statements about one lease at once: of a database that does not answer, no more are asked."""

POLL: Final = 1.0
"""Seconds after which a waiting caller looks again at the latest."""

POSTS: Final = 3
"""How often a release that nobody waits for is tried."""


class DatabaseLease:
    """One lease of a `Database`: a `LeaseShare`."""

    timeout: float = ANSWER

    def __init__(self, database: Database, name: str, desk: LeaseDesk) -> None:
        """Keep the lease called `name` in a row of its own."""
        self._database = database
        self._name = name
        self._desk = desk
        self._working: set[asyncio.Task[Granted | Busy]] = set()
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
        """Return after how many seconds to look again: no database says that a lease is free."""
        return min(POLL, ttl / 5)

    # Questions

    def ask(self, kind: Kind, command: Command, clock: Clock) -> Asking:
        """Return a waiter for the answer to `command`."""
        if kind == "async":
            return Asking(self, command, None, self._add)
        if self._database.is_async:
            raise TypeError(
                f"{self._database!r} is awaited, and so are its leases: write `async with lease`,"
                " or the name that begins with a, such as `await lease.aacquire()`"
            )
        self._desk.refuse_own_thread()
        return Asking(self, command, clock.now() + ANSWER + SLACK, self._add)

    def _add(self, asking: Asking) -> None:
        self._desk.spawn(lambda: self._tell(asking))

    async def _tell(self, asking: Asking) -> None:
        """Ask the database, and hand over the answer, however late it comes.

        A statement is not cut off when a caller gives up: its driver would have to close the
        connection, and a lease that is granted in that moment would be nobody's.
        """
        if asking.over:
            return
        try:
            working = self._begin(asking.item)
            if not await _has_ended(working, ANSWER):
                asking.fail(self._late(ANSWER))
                await _wind_up(working)
            asking.deliver(self._result(working))
        except (StoreUnavailable, TablesMissing) as error:
            asking.fail(error)
        except asyncio.CancelledError:  # the thread of the database ends, a caller's loop does not
            asking.fail(StoreUnavailable(f"the database {self.store_name!r} was closed"))
            raise

    async def call(self, command: Command, patience: float) -> Granted | Busy:
        """Return the answer to `command`, which is waited for as long as `patience`."""
        working = self._begin(command)
        if not await _has_ended(working, patience):
            self._desk.spawn(lambda: _wind_up(working))
            raise self._late(patience)
        return self._result(working)

    def post(self, command: Command) -> None:
        """Carry `command` out in the background; try it a few times."""
        try:
            self._desk.spawn(lambda: self._post(command))
        except StoreUnavailable:
            if not self._database.is_async:  # closed: it has no thread any more
                _start_thread(lambda: asyncio.run(self._post(command)))

    async def _post(self, command: Command) -> None:
        for number in range(POSTS):
            with suppress(StoreUnavailable, TablesMissing):
                await self.call(command, ANSWER)
                return
            await sleep_async(0.1 * 4**number)

    def unwanted(self, item: Command, answer: Granted | Busy) -> None:
        """Give back what was taken for a caller that has gone."""
        if isinstance(item, Take) and isinstance(answer, Granted):
            self.post(Release(answer.token))

    def _begin(self, command: Command) -> asyncio.Task[Granted | Busy]:
        if len(self._working) >= UNDER_WAY:
            raise StoreUnavailable(f"the database {self.store_name!r} has not answered for long")
        working = asyncio.get_running_loop().create_task(self._execute(command))
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return working

    async def _execute(self, command: Command) -> Granted | Busy:
        database = self._database

        def steps() -> Steps[Granted | Busy]:
            return _asked(self._name, command)

        if isinstance(database.source, Sqlite):
            answer = await database.arun(steps)
        elif database.is_async:
            answer = await database.guard.acall(_aonce, database, steps)
        else:
            answer = await _in_thread(lambda: database.guard.call(_once, database, steps))
        if isinstance(command, (Release, Withdraw)) and isinstance(answer, Granted):
            self._desk.ring(self._name)
        return answer

    def _result(self, working: asyncio.Task[Granted | Busy]) -> Granted | Busy:
        """Return what the database answered, or raise what went wrong."""
        if not working.done() or working.cancelled():
            raise self._late(LATE)
        error = working.exception()
        if error is None:
            return working.result()
        if isinstance(error, TablesMissing):
            raise error
        raise StoreUnavailable(f"the database {self.store_name!r}: {described(error)}") from error

    def _late(self, seconds: float) -> StoreUnavailable:
        return StoreUnavailable(
            f"the database {self.store_name!r} did not answer within {seconds:.3g} s"
        )

    def _after_fork(self) -> None:
        """Forget what the parent has under way."""
        _of_parent.append(self._working)
        self._working = set()

    # Jobs, messages, closing

    def start(self) -> None:
        """Start what runs jobs."""
        self._desk.start()

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> Job:
        """Run `job` every `seconds`."""
        return self._desk.every(seconds, job)

    def listen(self, heard: Callable[[], object]) -> Callable[[], None]:
        """Call `heard` when this process gives the lease up, and when the database is closed."""
        return self._desk.listen(self._name, heard)

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Do nothing: whether a database is up is found out by asking it."""
        return lambda: None

    def keep(self, holding: Kept) -> None:
        """End `holding` when the database is closed."""
        self._desk.held.add(holding)

    def forget(self, holding: Kept) -> None:
        """Undo `keep`."""
        self._desk.held.discard(holding)


class LeaseDesk:
    """Where all leases of one database are asked about, renewed, and given back at its end."""

    owner: str = "database"

    def __init__(self, database: Database) -> None:
        """Have a thread of its own, unless the database is awaited."""
        self._is_async = database.is_async
        self._background = Background(lambda: None, self._end, self.owner)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of a database that is awaited: the loop in which it was last asked."""
        self.held: set[Kept] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._handles: set[Handle] = set()
        self._listeners: dict[object, tuple[str, Callable[[], object]]] = {}
        survives_fork(self)

    def start(self) -> asyncio.AbstractEventLoop:
        """Return the loop in which the database is asked."""
        if not self._is_async:
            return self._background.start()
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            raise StoreUnavailable("the event loop of the database has ended")
        return self._loop

    def refuse_own_thread(self) -> None:
        """Raise in the thread that would have to answer."""
        if self._background.thread is threading.current_thread():
            raise RuntimeError(OWN_THREAD)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work()` done as a task; from any thread."""
        loop = self.start()

        def begin() -> None:
            task = loop.create_task(work(), context=Context())
            self._tasks.add(task)  # a loop alone does not hold on to it
            task.add_done_callback(self._tasks.discard)

        try:
            loop.call_soon_threadsafe(begin, context=Context())
        except RuntimeError:  # closed meanwhile
            raise StoreUnavailable("the event loop of the database has ended") from None

    # Jobs: the background's own, or tasks in the loop of the database

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> Job:
        """Run `job` every `seconds`."""
        if not self._is_async:
            return self._background.every(seconds, job)
        handle = Handle(self, seconds, job)
        self._handles.add(handle)
        # Nobody's context: the deadline of the caller is not that of a renewal.
        Context().run(handle.begin)
        return handle

    def submit_if_running(self, callback: Callable[..., object], *args: Any) -> bool:
        """Call `callback` in the loop of the database, soon; False if it has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(callback, *args, context=Context())
        except RuntimeError:
            return False
        return True

    def forget(self, handle: Handle) -> None:
        """Run a job no more."""
        self._handles.discard(handle)
        self.submit_if_running(handle.end)

    # Messages

    def listen(self, name: str, heard: Callable[[], object]) -> Callable[[], None]:
        """Call `heard` at each `ring` for `name`; return its end."""
        key = object()
        self._listeners[key] = name, heard

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop

    def ring(self, name: str | None = None) -> None:
        """Wake those of this process that wait for `name`; without a name, all."""
        for waited_for, heard in list(self._listeners.values()):
            if name is None or name == waited_for:
                heard()

    # The end

    def close(self) -> None:
        """End all holdings and give the leases back; a database that is awaited does so soon."""
        if not self._is_async:
            self._background.stop()()
            self.ring()
            return
        self.ring()
        ended = [holding for holding in list(self.held) if holding.close()]
        for holding in ended:
            with suppress(StoreUnavailable):
                self.spawn(holding.release)

    async def _end(self) -> None:
        self.ring()
        await close_all(self.held)

    def _after_fork(self) -> None:
        """Have no thread, loop or tasks of the parent's."""
        _of_parent.append((self._tasks, self._handles, self._loop))
        self._background.after_fork()
        self._loop = None
        self.held, self._tasks, self._handles, self._listeners = set(), set(), set(), {}


_of_parent: Final[list[object]] = []
"""Tasks of a parent process: they cannot end here, and nobody is to hear that they did not."""


# Statements


def _asked(name: str, command: Command) -> Steps[Granted | Busy]:
    """Carry `command` out, as `LeaseModel` does."""
    rows: list[Any]
    match command:
        case Take(holder, attempt, ttl):
            # A look first: those that wait would write in vain, each time they ask.
            seen = yield from _look(name)
            if seen is not None and seen[0].left and seen[1] != holder:
                return seen[0]
            asked = {"name": name, "holder": holder, "attempt": attempt, "ttl": ttl}
            rows = yield Ask("leases.take", asked)
        case Renew(token, ttl):
            rows = yield Ask("leases.renew", {"name": name, "token": token, "ttl": ttl})
        case Release(token):
            rows = yield Ask("leases.release", {"name": name, "token": token})
        case Withdraw(holder, attempt):
            asked = {"name": name, "holder": holder, "attempt": attempt}
            rows = yield Ask("leases.withdraw", asked)
    if rows:
        return Granted(rows[0][0])
    seen = yield from _look(name)
    return Busy(0, 0) if seen is None else seen[0]


def _look(name: str) -> Steps[tuple[Busy, str] | None]:
    """Return who has the lease; None if nobody ever had it."""
    rows = yield Ask("leases.look", {"name": name})
    if not rows:
        return None
    token, holder, left, behind = rows[0]
    if behind:
        yield Ask("leases.clamp", {"name": name})
    return Busy(token, left), holder


async def _aonce(database: Database, steps: Callable[[], Steps[Granted | Busy]]) -> Granted | Busy:
    async with aautocommit(database) as raw:
        return await database.connection(raw).arun(steps())


def _once(database: Database, steps: Callable[[], Steps[Granted | Busy]]) -> Granted | Busy:
    with autocommit(database) as raw:
        return database.connection(raw).run(steps())


async def _in_thread(work: Callable[[], Granted | Busy]) -> Granted | Busy:
    """Await what blocks: in a thread of its own, which a process that exits does not wait for."""
    answer: Future[Granted | Busy] = Future()

    def do() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to who waits
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


async def _wind_up(working: asyncio.Task[Any]) -> None:
    """Wait for a statement that nobody waits for any more; then cut it off."""
    if not await _has_ended(working, LATE):
        await end([working])


# Fencing


class Fence:
    """Refuses what a holder of the past does: remembers the highest token that came by."""

    def __init__(self, database: Database, resource: str) -> None:
        """Guard what is called `resource`; all that write to it ask the same fence."""
        from seawall.durable.database import Database

        if not isinstance(database, Database):
            raise TypeError(f"Fence({database!r}, ...): pass a Database, such as Database(pool)")
        if not isinstance(resource, str) or not resource:
            raise TypeError(f"Fence(database, {resource!r}): write a name, such as 'reports'")
        self._database = database
        self.resource = resource

    def __repr__(self) -> str:
        return f"<Fence {self.resource!r}>"

    def check(self, conn: Any, token: int) -> None:
        """Raise `LeaseLost` if a higher token was here; call it first in each transaction.

        `conn` is the connection of that transaction: until it ends, nobody with another token
        passes. So what is written after the check is written before any later holder's work.
        """
        asked = self._joined(conn, token)
        if asked.kind.is_async:
            raise TypeError(f"{asked!r} is awaited: write `await fence.acheck(conn, token)`")
        require_transaction(asked, _SO_THAT)
        self._judge(asked.run(self._steps(token)), token)

    async def acheck(self, conn: Any, token: int) -> None:
        """Do the same on a connection that is awaited."""
        asked = self._joined(conn, token)
        if not asked.kind.is_async:
            raise TypeError(f"{asked!r} is not awaited: write `fence.check(conn, token)`")
        await arequire_transaction(asked, _SO_THAT)
        self._judge(await asked.arun(self._steps(token)), token)

    def _joined(self, conn: Any, token: int) -> Connection:
        check.count("token", token, maximum=check.MOST)
        return self._database.connection(conn)

    def _steps(self, token: int) -> Steps[int | None]:
        asked = {"resource": self.resource, "token": token}
        rows = yield Ask("leases.pass_fence", asked)
        if rows:
            return None
        rows = yield Ask("leases.fence", {"resource": self.resource})
        highest: int = rows[0][0]
        return highest

    def _judge(self, highest: int | None, token: int) -> None:
        if highest is not None:
            raise LeaseLost(
                f"the fence {self.resource!r} has seen token {highest}: the lease of token {token}"
                " is over"
            )


_SO_THAT: Final = "the check and what it protects are committed together"
