"""Messages without an answer: sent to the store in order, and pushed by other pods."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakMethod

from seawall._failures import described
from seawall._forks import leave_to_parent
from seawall.errors import StoreUnavailable
from seawall.runtime.background import bounded
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.redis.clients import ClientFactory
    from seawall.redis.connections import Argument, LoopConnection, Script
    from seawall.runtime.background import Background

MOST_PENDING: Final = 10_000
"""Maximum number of messages waiting to be sent; more are dropped, and counted."""

LATE: Final = 1.0
"""Seconds after which a message counts as a failure of the store: no caller waits for it."""


class SendQueue:
    """Messages that wait to be sent by the background thread."""

    def __init__(self, background: Background, connection: Callable[[], LoopConnection]) -> None:
        self.dropped = 0
        self._background = background
        self._connection = connection
        self._waiting: deque[tuple[Script, Sequence[str], Sequence[Argument]]] = deque()
        self._asked = False
        self._sender: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Send this after what was added before; from any thread; never raises."""
        if len(self._waiting) >= MOST_PENDING:
            self.dropped += 1
            return
        self._waiting.append((script, keys, args))
        if not self._asked:
            self._asked = True
            try:
                self._background.submit(self._begin)
            except StoreUnavailable:  # closed
                self.dropped += len(self._waiting)
                self._waiting.clear()
                self._asked = False

    def _begin(self) -> None:
        self._asked = False  # what is added from now on submits again
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=Context())

    async def _send(self) -> None:
        try:
            while self._waiting:
                message = self._waiting.popleft()
                try:
                    await self._connection().run(*message, LATE)
                except StoreUnavailable:
                    self.dropped += 1
        finally:
            self._sender = None

    async def flush(self) -> None:
        """Send all waiting messages; in the background loop."""
        self._begin()
        while self._sender is not None:
            await asyncio.wait({self._sender})

    def after_fork(self) -> None:
        """Forget the parent's messages in a child process."""
        leave_to_parent(self._sender)
        self._waiting.clear()
        self._asked = False
        self._sender = None


SILENCE: Final = 5.0
"""Seconds of silence after which the connection is pinged, and then dropped."""

RECONNECT_AFTER: Final = 0.2

LONGEST: Final = 65_536
"""Maximum bytes of a message: longer ones are not ours."""

CLOSE_WITHIN: Final = 1.0
"""Maximum seconds for closing a connection."""

Listener = Callable[[bytes], object]


class Subscriptions:
    """The channels that have listeners.

    Messages are only a shortcut: listeners also poll. After each (re)connection every listener gets
    b"", so that it polls immediately.
    """

    def __init__(self, clients: ClientFactory) -> None:
        self._clients = clients
        self._mutex = Mutex()
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._forget_connection()

    def _forget_connection(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._pubsub: Any = None
        self._subscribed: set[str] = set()
        self._changing: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def add(self, channel: str, listener: Listener) -> None:
        """Call `listener(message)` for each message of `channel`, once `refresh` was called."""
        with self._mutex:
            self._listeners[channel] = (*self._listeners.get(channel, ()), listener)

    def remove(self, channel: str, listener: Listener) -> None:
        """Stop calling `listener`. The garbage collector may call this at any moment."""

        def remove() -> None:
            known = self._listeners.get(channel, ())
            kept = tuple(one for one in known if one is not listener)
            if kept:
                self._listeners[channel] = kept
            else:
                self._listeners.pop(channel, None)

        self._mutex.do(remove)

    def begin(self, channel: str, listener: Listener) -> None:
        """Subscribe to a new channel; a listener of a subscribed one gets b"" now."""
        if channel in self._subscribed:
            self._call(listener, b"")
        self.refresh()

    def wake_all(self) -> None:
        """Make every listener poll: no more messages will come."""
        for listener in [one for known in list(self._listeners.values()) for one in known]:
            self._call(listener, b"")

    def refresh(self) -> None:
        """Subscribe to new channels; in the background loop."""
        loop = asyncio.get_running_loop()
        if self._task is None:
            if self._listeners:
                self._task = loop.create_task(self._run())
        elif self._pubsub is not None and (self._changing is None or self._changing.done()):
            self._changing = loop.create_task(self._change_later())

    async def close(self) -> None:
        """Stop listening."""
        tasks = {task for task in (self._task, self._changing) if task is not None}
        while tasks:  # a client that is just connecting may swallow a cancellation
            for task in tasks:
                task.cancel()
            _done, tasks = await asyncio.wait(tasks, timeout=0.05)

    def after_fork(self) -> None:
        """Forget the connection, which belongs to the parent."""
        leave_to_parent(self._task, self._pubsub, self._changing)
        self._mutex = Mutex()
        self._forget_connection()

    async def _run(self) -> None:
        for attempt in count():
            opened: list[Any] = []
            try:
                opened.append(self._clients.make_listener(SILENCE, attempt))
                opened.append(opened[0].pubsub())
                self._pubsub, self._subscribed = opened[1], set()
                await self._change()
                await self._receive(opened[1])
            except Exception as error:  # noqa: BLE001 - whatever it is, try a new connection
                logging.getLogger("seawall").debug("pushes are heard no more: %s", described(error))
            finally:
                self._pubsub = None
                await bounded(_close_all(opened), CLOSE_WITHIN)
            await asyncio.sleep(RECONNECT_AFTER)

    async def _change_later(self) -> None:
        try:
            await self._change()
        except Exception:  # noqa: BLE001 - `_hear` ends, and `_run` makes another connection
            self._pubsub = None
            logging.getLogger("seawall").debug("a channel cannot be subscribed to")

    async def _change(self) -> None:
        """Subscribe to exactly the channels that have listeners.

        One at a time: two that find the client without a connection would each make one, and
        messages of the first would be lost.
        """
        async with self._turn:
            pubsub = self._pubsub
            while pubsub is self._pubsub and (different := self._subscribed ^ set(self._listeners)):
                fresh = different - self._subscribed
                self._subscribed ^= different
                if fresh:
                    await pubsub.subscribe(*fresh)
                if different - fresh:
                    await pubsub.unsubscribe(*(different - fresh))

    async def _receive(self, pubsub: Any) -> None:
        """Pass messages to the listeners, until there is no sign of life."""
        silent = False
        while pubsub is self._pubsub:
            message = await pubsub.get_message(timeout=SILENCE)
            if message is not None:
                silent = False
                self._dispatch(message)
            elif silent:
                raise TimeoutError("no sign of life")
            else:
                silent = True
                await pubsub.ping()

    def _dispatch(self, message: dict[str, Any]) -> None:
        kind, channel, data = message["type"], message["channel"], message["data"]
        data = b"" if kind == "subscribe" else data
        if kind not in {"message", "subscribe"} or not isinstance(channel, bytes):
            return
        if not isinstance(data, bytes) or len(data) > LONGEST:
            return  # invalid
        for listener in self._listeners.get(channel.decode("utf-8", "replace"), ()):
            self._call(listener, data if kind == "message" else b"")

    def _call(self, listener: Listener, message: bytes) -> None:
        try:
            listener(message)
        except Exception:
            logging.getLogger("seawall").exception("a listener of the store failed")


async def _close_all(opened: list[Any]) -> None:
    for one in reversed(opened):
        try:
            await one.aclose()
        except Exception:  # noqa: BLE001, S110 - it is dropped all the same
            pass


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls `method` for as long as its object lives."""
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        method = weak()
        if method is not None:
            method(*args)

    return call


def weakly_awaited(method: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Return an async twin of `weakly`."""
    weak = WeakMethod(method)

    async def call() -> None:
        method = weak()
        if method is not None:
            await method()

    return call
