"""Connections to the store: a set for each event loop, and a new one after each outage.

No waiting caller touches a connection: each script call is a separate task, which continues when
its caller gives up or is cancelled. So a connection never returns another call's reply, and a slow
answer does not immediately cost the connection. A late call does not block others: they go past it.

Connections from before an outage may be dead without anything having noticed, and calls that wait
on them would block the others; so all loops start over with new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall._failures import described
from seawall._forks import leave_to_parent
from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.runtime.background import bounded
from seawall.runtime.store import BatchedSubject, StoreQuestion

if TYPE_CHECKING:
    from seawall.redis.clients import ClientFactory
    from seawall.redis.health import StoreHealth


class Script(NamedTuple):
    """A script's text, and the hash by which the server caches it."""

    text: str
    sha: str


@cache
def lua(name: str) -> str:
    """Return the text of `lua/<name>.lua`."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")


@cache
def compose(clock: str, text: str) -> Script:
    """Return the script that consists of `clock` and `text`."""
    whole = f"{clock}\n{text}"
    return Script(whole, sha1(whole.encode(), usedforsecurity=False).hexdigest())


ABANDON_AFTER: Final = 1.0
"""Seconds without an answer after which the connection is dropped; its callers have long gone."""

CONNECTING: Final = 0.25
"""Seconds for the first answer, during which a new connection's silence is no failure of the store.

Callers do not wait for it. A process that is starting, or has lost its connections, shares the
processor with others in the same state: finding a primary and signing in takes a while then.
"""

CLOSING: Final = 1.0
"""Maximum seconds for closing the connections."""

MOST_CONCURRENT: Final = 32
"""Maximum number of concurrent calls, not counting late ones; more wait for their turn."""

MOST_QUEUES: Final = 256
"""Number of queues from which idle ones are dropped."""

SECOND_LOOK: Final = 0.002
"""Seconds between a timer and its action: a loop that was busy first reads what has arrived."""

_UNFIT: Final = ("NOREPLICAS", "MISCONF", "MASTERDOWN", "CLUSTERDOWN")

_OWN: Final = ("WRONGTYPE", "CROSSSLOT", "FULL")
"""Errors of one call only; FULL is the script's own: this call needs memory, others may not."""

WHEN_FULL: Final = frozenset({"queue", "streams"})
"""Scripts that run while the server is full: they free memory, and answer FULL if they need it.

All other shared state has to be written, so it does without a server that is full.
"""

CLOSED: Final = "the store was closed"


@contextmanager
def valid_reply(about: str = "") -> Iterator[None]:
    """Read a reply of the store, or raise `StoreUnavailable`: a store may answer anything."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise StoreUnavailable(f"the store's answer{about} makes no sense") from None


Argument = str | int | float | bytes


class LoopConnection:
    """The connections of one event loop, used only in the thread of that loop."""

    def __init__(self, clients: ClientFactory, health: StoreHealth, timeout: float) -> None:
        self.era = health.outages
        """Number of outages before this connection was made."""
        self.health = health
        self._timeout = timeout
        self._patience = max(ABANDON_AFTER, 2 * timeout)
        self._clients = clients
        self._client: Any = None
        self.room = asyncio.Semaphore(MOST_CONCURRENT)
        self.warm = False
        """Whether the store has ever answered here: until then a call also has to connect."""
        self._queues: dict[Any, _QuestionQueue] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        late: float,
        wanted: Callable[[], bool] | None = None,
        *,
        when_full: bool = False,
    ) -> Any:
        """Return the reply of one script call; raise `StoreUnavailable` on any failure.

        An answer that takes longer than `late` seconds counts as a failure of the store, even if it
        comes. Waiting for a turn is not the store's fault; a call that is no longer `wanted` when
        its turn comes is not sent. With `when_full` it is sent even while the server is full.
        """
        await self.room.acquire()
        watch = _CallTimer(self, late)
        try:
            self.refuse_while_down(wanted, when_full=when_full)
            reply = await self.exchange(script, keys, args)
        except StoreUnavailable as error:
            if not watch.blamed:
                self._judge(error)
            raise
        finally:
            watch.end()
        if not watch.late:
            self.health.ok()
        return reply

    def _judge(self, error: StoreUnavailable) -> None:
        """Report a failure to the store's health, unless it concerns only one call."""
        cause = error.__cause__
        if cause is None:
            return  # it was not sent
        if _is_of_this_call(cause):
            self.health.note(str(error))
        else:
            full = is_full(error)
            self.health.failed(str(error), certain=_admitted(cause), full=full)

    async def exchange(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script now, whether the store is known to be down or not.

        A script that the server does not know is sent whole, in the same call.
        """
        from redis.exceptions import NoScriptError

        try:
            async with asyncio.timeout(self._patience):
                if self._client is None:  # here, so that what it raises is a failure of the store
                    self._client = self._clients.make(self._patience)
                try:
                    reply = await self._client.evalsha(script.sha, len(keys), *keys, *args)
                except NoScriptError:
                    reply = await self._client.eval(script.text, len(keys), *keys, *args)
                self.warm = True
                return reply
        except Exception as error:  # invalid replies may make a client raise any type
            raise StoreUnavailable(f"the store failed: {described(error)}") from error

    def refuse_while_down(
        self, wanted: Callable[[], bool] | None = None, *, when_full: bool = False
    ) -> None:
        """Raise while the store is known to be down, or if the answer is no longer `wanted`.

        `when_full`: not if the store is only full.
        """
        if not (self.health.up or (when_full and self.health.full)):
            raise StoreUnavailable("the store is down; it is tried again in the background")
        if wanted is not None and not wanted():
            raise StoreUnavailable("nobody waits for it any more")

    async def call(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        wait: float,
        *,
        when_full: bool = False,
    ) -> Any:
        """Return the reply of one script call, if it comes within `wait` seconds."""
        self.refuse_while_down(when_full=when_full)
        waits = [True]
        asked = self.run(script, keys, args, wait, lambda: bool(waits), when_full=when_full)
        task = self.spawn(asked)
        try:
            done, _pending = await asyncio.wait({task}, timeout=wait)
        finally:
            waits.clear()
        if not done:
            raise StoreUnavailable(f"the store did not answer within {wait:g} s")
        if task.cancelled():
            raise StoreUnavailable(CLOSED)
        return task.result()

    def add(self, question: StoreQuestion, script: Script) -> None:
        """Let `question` be answered together with all questions about the same object."""
        queue = self._queues.get(question.about)
        if queue is None or queue.script is not script:
            if len(self._queues) >= MOST_QUEUES:
                self._queues = {about: queue for about, queue in self._queues.items() if queue.busy}
            queue = self._queues[question.about] = _QuestionQueue(
                self, question.about, script, self._timeout
            )
        queue.add(question)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a separate task, in an empty context."""
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its waiters get it too; mark it as retrieved

    async def retire(self) -> None:
        """Close once the calls in progress have ended: this connection is no longer used."""
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel calls in progress and close the connections, within `CLOSING` seconds.

        A task or a connection that does not end by then is abandoned.
        """
        await bounded(self._close(), CLOSING)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING / 2)
        if self._client is None:
            return
        try:
            await self._client.aclose()
        except Exception as error:  # noqa: BLE001 - they are dropped, whatever the client raises
            logging.getLogger("seawall").debug("connections closed: %s", described(error))


class _CallTimer:
    """Times one call: a late one is a failure of the store, and must not block others."""

    def __init__(self, connection: LoopConnection, limit: float) -> None:
        self._connection = connection
        self._limit = limit
        self._began = SYSTEM.now()
        self.late = False
        """Whether it took too long, so that the next call went past it."""
        self.blamed = False
        """Whether that counts as a failure of the store."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit, self._look_again)

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(SECOND_LOOK, self._give_up)

    def _give_up(self) -> None:
        if not self.late:
            self.late = True
            self._connection.room.release()
        if self._connection.warm or self._limit >= CONNECTING:
            self.blamed = True
            self._connection.health.late(self._limit, self._began)
        else:
            rest, self._limit = CONNECTING - self._limit, CONNECTING
            self._timer = self._loop.call_later(rest, self._look_again)

    def end(self) -> None:
        """Let the next call go, unless that has already happened."""
        self._timer.cancel()
        if not self.late:
            self._connection.room.release()


class _QuestionQueue:
    """The waiters for the same script: those that gather during a call go as the next call.

    All have the same maximum wait, so the first to come is due first, and one timer is enough.
    """

    def __init__(
        self, connection: LoopConnection, about: BatchedSubject, script: Script, timeout: float
    ) -> None:
        self.script = script
        self._connection = connection
        self._about = about
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[StoreQuestion] = deque()
        self._asked: list[StoreQuestion] = []
        self._sender: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a caller waits here."""
        return self._sender is not None

    def add(self, question: StoreQuestion) -> None:
        question.due = self._loop.time() + self._timeout
        self._waiting.append(question)
        if self._timer is None:
            self._timer = self._loop.call_at(question.due, self._look_again)
        if self._sender is None:
            self._sender = self._connection.spawn(self._serve())

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(SECOND_LOOK, self._give_up)

    def _give_up(self) -> None:
        """Fail waiters whose time is over; a call in progress continues, and is passed by."""
        self._timer = None
        now = self._loop.time()
        for question in [*self._asked, *self._waiting]:
            if question.over:
                continue
            if question.due > now:
                self._timer = self._loop.call_at(question.due, self._look_again)
                break
            question.fail(StoreUnavailable(f"the store did not answer within {self._timeout:g} s"))
        if self._asked and all(question.over for question in self._asked):
            self._asked = []
            self._sender = self._connection.spawn(self._serve()) if self._waiting else None

    async def _serve(self) -> None:
        """Send the waiting questions, one call after another, until passed by."""
        me = asyncio.current_task()
        try:
            while self._sender is me and self._waiting:
                most = min(len(self._waiting), self._about.most)
                batch = [self._waiting.popleft() for _ in range(most)]
                batch = [question for question in batch if not question.over]
                if batch:
                    self._asked = batch
                    await self._ask(batch)
        finally:
            if self._sender is me:
                self._sender, self._asked = None, []
                while self._waiting:  # only if this task was cancelled: the loop is closing
                    self._waiting.popleft().fail(StoreUnavailable(CLOSED))

    async def _ask(self, batch: list[StoreQuestion]) -> None:
        about, items = self._about, [question.item for question in batch]
        answers: Sequence[Any] = ()
        failure = CLOSED
        try:
            keys, args = about.pack(items)
            reply = await self._connection.run(
                self.script,
                keys,
                args,
                self._timeout,
                lambda: not all(question.over for question in batch),
                when_full=about.script in WHEN_FULL,
            )
            answers = about.unpack(reply, items)
            if len(answers) != len(items):
                failure = f"{len(answers)} answers to {len(items)} questions"
        except StoreUnavailable as error:
            failure = str(error)
        except Exception as error:
            logging.getLogger("seawall").exception("the store's answer makes no sense")
            failure = f"the store's answer makes no sense: {described(error)}"
        finally:
            if len(answers) == len(batch):
                for question, answer in zip(batch, answers, strict=True):
                    question.deliver(answer)
            else:
                for question in batch:
                    question.fail(StoreUnavailable(failure))


def _is_of_this_call(error: BaseException) -> bool:
    """Return whether only this call is to blame: what it sent, or what it found in its own keys.

    The server works, so other calls need not do without it. Problems of the server itself have
    their own code, in capitals: BUSY, NOAUTH, CLUSTERDOWN and so on.
    """
    from redis.exceptions import DataError, ResponseError

    if isinstance(error, (DataError, UnicodeError)):
        return True
    text = str(error)
    code = text.partition(" ")[0]
    mistake = code in _OWN or ("script" in text and not code.isupper())
    return type(error) is ResponseError and mistake  # its subclasses are about the server


def is_full(error: StoreUnavailable) -> bool:
    """Return whether the server reported that it is out of memory."""
    from redis.exceptions import OutOfMemoryError

    return isinstance(error.__cause__, OutOfMemoryError)


def _admitted(error: BaseException | None) -> bool:
    """Return whether a server reported itself that it cannot be written to now.

    Scripts that only read may still be answered; that is no sign of health.
    """
    from redis.exceptions import ReadOnlyError

    return isinstance(error, ReadOnlyError) or str(error).startswith(_UNFIT)


class Connections:
    """Finds or makes the connection of the running loop."""

    def __init__(self, clients: ClientFactory, health: StoreHealth, timeout: float) -> None:
        self._clients = clients
        self._health = health
        self._timeout = timeout
        self._connections: dict[asyncio.AbstractEventLoop, LoopConnection] = {}
        self._enders: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._connections)

    def here(self) -> LoopConnection:
        """Return the running loop's connection."""
        return self._find(asyncio.get_running_loop())

    def apart(self) -> LoopConnection:
        """Return a separate connection, which the caller must close."""
        return LoopConnection(self._clients, self._health, self._timeout)

    def discard(self, connection: LoopConnection) -> None:
        """Close an unused connection, in a separate task; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _find(self, loop: asyncio.AbstractEventLoop) -> LoopConnection:
        connection = self._connections.get(loop)
        if connection is not None and connection.era == self._health.outages:
            return connection
        fresh = self.apart()
        if connection is None:
            for ended in [old for old in list(self._connections) if old.is_closed()]:
                self._forget(ended)  # it was not shut down, only closed
            self._end_with(loop)
        else:
            fresh.spawn(connection.retire())
        self._connections[loop] = fresh
        return fresh

    def _end_with(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connection when its loop shuts down: loops close their async generators."""

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

    def _forget(self, loop: asyncio.AbstractEventLoop) -> LoopConnection | None:
        self._enders.pop(loop, None)
        return self._connections.pop(loop, None)

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        connection = self._forget(loop)
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close the running loop's connection, and wait for others that are closing here."""
        loop = asyncio.get_running_loop()
        await self._close(loop)
        closing = {task for task in list(self._closing) if task.get_loop() is loop}
        if closing:
            await asyncio.wait(closing)

    def after_fork(self) -> None:
        """Forget all connections, which belong to the parent."""
        leave_to_parent(self._connections, self._enders, self._closing)
        self._connections, self._enders, self._closing = {}, {}, set()
