"""The store that pods share: Redis or Valkey.

Promises:
- No caller waits longer than `timeout` for it, and none waits at all once it is known to be down.
- It recovers automatically.
- A cancelled caller never disturbs another caller's answer.
- Time is the server's.

Coroutines talk to the store in their own event loop, so that a busy loop does not have to wait for
a thread to get its turn. Callers without a loop, jobs and pushed messages use the background
thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self
from weakref import WeakMethod

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall._forks import survives_fork
from seawall._redaction import printable
from seawall.clock import Clock
from seawall.errors import StoreUnavailable
from seawall.redis.clients import clients_for
from seawall.redis.connections import (
    WHEN_FULL,
    Argument,
    Connections,
    LoopConnection,
    Script,
    compose,
    is_full,
    lua,
)
from seawall.redis.health import StoreHealth
from seawall.redis.keys import make_key, name_part
from seawall.redis.messages import Listener, SendQueue, Subscriptions
from seawall.runtime.background import OWN_THREAD, Background, Handle, run_in
from seawall.runtime.store import BatchedSubject, StoreQuestion

if TYPE_CHECKING:
    from seawall.leases.store import LeaseShare
    from seawall.redis.pods import LivePods
    from seawall.runtime.store import BeatShare, BreakerShare, LimitShare

SLACK: Final = 0.02
"""Seconds that a caller waits beyond the timeout: the connection times out first, with a reason."""

CHECK: Final = 1.0
"""Seconds between two checks whether the store is down and must be healed.

A failure also starts a check immediately, so this matters only if healing itself went wrong.
"""

PAUSE: Final = 0.02
"""Minimum seconds between two attempts to reach a store that is down."""

TRIES: Final = 3
"""Number of answers from a recovering store that are awaited until one comes in time."""

REMEMBERED: Final = 3600.0
"""Seconds for which announced settings are kept without being renewed."""

MOST_LOGGED_DIFFERENCES: Final = 16
"""Maximum number of different settings of other pods that are reported."""


class StoreCore:
    """What the other packages of Seawall see of a store."""

    def __init__(
        self, target: Any, name: str, prefix: str, timeout: float, expected_pods: int
    ) -> None:
        self._clients = clients_for(target)
        self.name = _text("name", name)
        self.prefix = name_part(_text("prefix", prefix))
        self.timeout = check.seconds("timeout", timeout)
        self.health = StoreHealth()
        self.pod = token_hex(8)
        """Id of this process; a child process gets another."""
        self._clock = lua("clock")
        self.closed = False
        """Whether it was closed: then it never comes back."""
        self._closers: list[Callable[[], Callable[[], Awaitable[None]] | None]] = []
        self._connections = Connections(self._clients, self.health, self.timeout)
        self._subscriptions = Subscriptions(self._clients)
        self._background = Background(self._subscriptions.refresh, self._end)
        self._healing = self._background.every(CHECK, self._heal)
        self._send_queue = SendQueue(self._background, self._connection)
        self._expected_pods = check.count("expected_pods", expected_pods)
        self._pods: LivePods | None = None
        self.health.watchers.add(self._on_health)
        survives_fork(self)
        registry.enter(self, "store", name)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        return f"<RedisStore {self.name!r} at {self._clients.place!r}: {state}>"

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the store."""
        return {
            "name": self.name,
            "at": repr(self._clients.place),
            "up": self.up,
            "pod": self.pod,
            "dropped": self._send_queue.dropped,
        }

    def close(self) -> Callable[[], None]:
        """Start to close the store; return a function that waits until that is done."""
        self.closed = True
        return self._background.stop()

    @property
    def pods(self) -> LivePods:
        """The live pods that share this store."""
        if self._pods is None:
            from seawall.redis.pods import LivePods

            self._pods = LivePods(self, self._expected_pods)
        return self._pods

    @property
    def up(self) -> bool:
        """Whether the store answers; while not, shared policies follow `on_store_failure`."""
        return self.health.up and not self.closed

    def answers(self, script: str) -> bool:
        """Return whether calls of that script are sent: a queue works on a full server."""
        health = self.health
        return (health.up or (health.full and script in WHEN_FULL)) and not self.closed

    def key(self, kind: str, name: str, *parts: str) -> str:
        """Return the key of a part of `name`; the parts are plain, or hashed."""
        return make_key(self.prefix, kind, name, *parts)

    def channel(self, kind: str, name: str) -> str:
        """Return the channel on which changes of `name` are pushed."""
        return make_key(self.prefix, kind, name, "pushed")

    def script(self, name: str) -> Script:
        """Return the script called `name`, as the server runs it."""
        return compose(self._clock, lua(name))

    async def acall(
        self,
        script: str,
        keys: Sequence[str],
        args: Sequence[Argument],
        timeout: float | None = None,  # noqa: ASYNC109 - it bounds the wait, not the call
    ) -> Any:
        """Run a script and return its reply, or raise `StoreUnavailable`."""
        wait = self.timeout if timeout is None else timeout
        when_full = script in WHEN_FULL
        connection = self._connection(script)
        return await connection.call(self.script(script), keys, args, wait, when_full=when_full)

    def call(
        self,
        script: str,
        keys: Sequence[str],
        args: Sequence[Argument],
        timeout: float | None = None,
    ) -> Any:
        """Blocking twin of `acall`."""
        self._refuse_if_down(script)
        wait = self.timeout if timeout is None else timeout
        return run_in(self._background, lambda: self.acall(script, keys, args, wait), wait + SLACK)

    async def probe(self) -> bool:
        """Return whether the store can be written to."""
        return bool(await self.acall("probe", [self.key("store", self.pod)], []) == 1)

    def post(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Run a script in the background, after those posted before; never blocks or raises."""
        if self.health.up:
            self._send_queue.add(self.script(script), keys, args)
        else:
            self._send_queue.dropped += 1

    def ask(
        self, kind: Literal["sync", "async"], about: BatchedSubject, item: Any, clock: Clock
    ) -> StoreQuestion:
        """Return a waiter for the answer to `item`; concurrent questions go together.

        In a loop the connection ends the wait in time; a thread also watches its clock, since
        another thread serves it.
        """
        if kind == "async":
            return StoreQuestion(about, item, None, self._add)
        return StoreQuestion(about, item, clock.now() + self.timeout + SLACK, self._add_from_thread)

    def _add(self, question: StoreQuestion) -> None:
        script = question.about.script
        self._connection(script).add(question, self.script(script))

    def _add_from_thread(self, question: StoreQuestion) -> None:
        if self._background.thread is threading.current_thread():
            raise RuntimeError(OWN_THREAD)
        self._refuse_if_down(question.about.script)
        self._background.submit(question.publish_in, self._add)

    def start(self) -> None:
        """Start the background thread, if it does not run: jobs and pushes need it."""
        self._background.start()

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> Handle:
        """Run `job` every `seconds` in the background, once the thread is started."""
        return self._background.every(seconds, job)

    def listen(self, channel: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` in the background for each message of `channel`, and b"" at the start."""
        self._subscriptions.add(channel, listener)
        self._background.submit_if_running(self._subscriptions.begin, channel, listener)

        def stop() -> None:
            self._subscriptions.remove(channel, listener)
            self._background.submit_if_running(self._subscriptions.refresh)

        return stop

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Call `watcher(up, cause)` when the store goes down and when it comes back."""
        return self.health.watchers.add(watcher)

    def at_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Await `closer()` in the background loop before the store is closed.

        A method is held weakly: an unused object has nothing to flush.
        """
        weak = hasattr(closer, "__self__")
        kept = [known for known in self._closers if known() is not None]
        self._closers = [*kept, WeakMethod(closer) if weak else lambda: closer]

    def announce(
        self, kind: str, name: str, settings: str, on_differ: Callable[[str], object]
    ) -> Handle:
        """Compare `settings` with those of other pods periodically; report each difference once."""
        key = self.key(kind, name, "settings")
        logged: set[str] = set()

        async def compare() -> None:
            kept = await self.acall("settings", [key], [settings, int(REMEMBERED * 1000)], 1.0)
            other = kept.decode("utf-8", "replace") if isinstance(kept, bytes) else settings
            if other != settings and other not in logged and len(logged) < MOST_LOGGED_DIFFERENCES:
                logged.add(other)
                on_differ(printable(other, 1000))

        return self.every(REMEMBERED / 4, compare)

    # Inside

    def _refuse_if_down(self, script: str) -> None:
        if self.closed:
            raise StoreUnavailable(f"the store {self.name!r} was closed")
        if not self.answers(script):
            raise StoreUnavailable(f"the store {self.name!r} is down; it is tried again meanwhile")

    def _connection(self, script: str = "") -> LoopConnection:
        """Return the running loop's connection to the store."""
        loop = asyncio.get_running_loop()
        if not self.up and loop is not self._background.loop:
            # What must be flushed at the end is still sent, in the background.
            self._refuse_if_down(script)
        return self._connections.here()

    def _on_health(self, up: bool, cause: str) -> None:  # noqa: FBT001 - the signature of watchers
        log = logging.getLogger("seawall")
        if up:
            log.warning("store %r is back: %s", self.name, cause)
        else:
            log.warning("store %r is down: %s", self.name, cause)
            try:
                self._background.start()
            except StoreUnavailable as error:
                if not self.closed:  # nothing would heal it, so callers keep trying themselves
                    self.health.assume_up(str(error))
            else:
                self._healing.soon()

    async def _heal(self) -> None:
        """Try until the store is up.

        A job of the background: a store that fails again while this ends is recorded by `soon()`
        and makes it run once more, and whatever it raises, it runs again after `CHECK`. Each
        attempt has its own connections, and nothing here waits until they are closed: a hanging
        connection must not delay the next attempt.
        """
        while not self.health.up:
            await asyncio.sleep(max(self.health.left(), PAUSE))
            connection = self._connections.apart()
            full = False
            try:
                cause = await self._try(connection)
            except StoreUnavailable as error:
                cause, full = str(error), is_full(error)
            except Exception as error:
                logging.getLogger("seawall").exception("the store %r: a probe failed", self.name)
                cause = described(error)
            finally:
                self._connections.discard(connection)
            self.health.tried(cause, full=full)

    async def _try(self, connection: LoopConnection) -> str | None:
        """Return what is wrong with the store's answer, or None; raise if there is no answer.

        The quickest of a few answers counts: this thread may be late itself, even if the store is
        not.
        """
        loop = asyncio.get_running_loop()
        key = self.key("store", self.pod)
        for _ in range(TRIES):
            began = loop.time()
            answer = await connection.exchange(self.script("probe"), [key], [])
            if answer != 1:
                return "its answer makes no sense"
            if loop.time() - began <= self.timeout:
                return None
        return "slow to answer"

    async def _end(self) -> None:
        """Close what the background loop holds."""
        self._subscriptions.wake_all()  # waiters for a message learn that none will come
        for closer in [closer for known in self._closers if (closer := known()) is not None]:
            try:
                await closer()
            except StoreUnavailable:
                pass
            except Exception:
                logging.getLogger("seawall").exception("the store %r was closing", self.name)
        await self._send_queue.flush()
        await self._subscriptions.close()
        await self._connections.close()

    def _after_fork(self) -> None:
        """Become another pod, with its own connections; those of the parent are left alone."""
        self._connections.after_fork()
        self._subscriptions.after_fork()
        self._send_queue.after_fork()
        self.pod = token_hex(8)
        self.health.after_fork()
        self._background.after_fork()


class RedisStore:
    """State that pods share, on a Redis or Valkey server, behind Sentinels, or in a cluster."""

    def __init__(
        self,
        target: Any,
        /,
        *,
        name: str = "redis",
        prefix: str = "seawall",
        timeout: float = 0.05,
        expected_pods: int = 1,
    ) -> None:
        """Keep shared state at `target`: a URL, or a client of redis-py.

        Of a client only the settings are used; the store makes its own connections on first use.
        `name` identifies the store in events and messages. Another `prefix` is another store on the
        same server. `timeout` is how many seconds a caller waits for it. `expected_pods`: number of
        pods by which a limit is divided while the store has never been reached, and at least while
        it is away.
        """
        self._core = StoreCore(target, name, prefix, timeout, expected_pods)

    def __repr__(self) -> str:
        return repr(self._core)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store is not for pickling: make one in each process, from the same URL")

    @property
    def name(self) -> str:
        """The name of the store in events and messages."""
        return self._core.name

    @property
    def up(self) -> bool:
        """Whether the store answers; while not, shared policies follow `on_store_failure`."""
        return self._core.up

    @property
    def closed(self) -> bool:
        """Whether it was closed: then it never comes back."""
        return self._core.closed

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the store."""
        return self._core.snapshot()

    def close(self) -> None:
        """Flush pending messages, give back leases, and end the background thread.

        A closed store stays closed: its policies continue as if the store were down.
        """
        self._core.close()()

    async def aclose(self) -> None:
        """Async twin of `close`, which also closes this loop's connections."""
        await asyncio.get_running_loop().run_in_executor(None, self._core.close())
        await self._core._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # The protocols of `runtime.store` and `leases.store`

    def _limits(
        self, name: str, rules: Sequence[Any], *, sharing: str, batch: Any, **how: Any
    ) -> LimitShare:
        if sharing == "exact":
            from seawall.redis.limits.exact import ExactLimits

            return ExactLimits(self._core, name, rules, **how)
        if sharing == "leased":
            from seawall.redis.limits.leased import LeasedLimits

            return LeasedLimits(self._core, name, rules, batch=batch, **how)
        from seawall.redis.limits.split import SplitLimits

        return SplitLimits(self._core, name, rules, **how)

    def _breaker(self, name: str, settings: Any, owner: Any, **how: Any) -> BreakerShare:
        from seawall.redis.breaker import SharedBreakers

        return SharedBreakers(self._core, name, settings, owner, **how)

    def _lease(self, name: str) -> LeaseShare:
        from seawall.redis.lease import RedisLease

        return RedisLease(self._core, name)

    def _heartbeats(self, group: str) -> BeatShare:
        from seawall.redis.pods import SharedHeartbeats

        return SharedHeartbeats(self._core, group)


def core_of(store: RedisStore) -> StoreCore:
    """Return what the other packages of Seawall see of a store."""
    return store._core


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r}: write text, such as {name}='orders'")
    return value
