"""Pods that share a breaker, all in this process, each with a store of its own.

Nothing goes on in their background: what they have counted is told to the server when the test says
so, and the server's clock stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event
from typing import Any

import redis

from seawall import Breaker, CircuitOpen
from seawall.clock import SYSTEM, VirtualClock
from seawall.models.breaker.probes import CallVerdict
from seawall.policies.breaker import single_probe
from seawall.redis.breaker.wire import parse_replies
from seawall.redis.store import RedisStore
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED, Wait
from seawall.runtime.policy import bindings_of
from tests.redis.support import FrozenClock
from tests.support import new_guard

START = 1_000_000
"""Where all clocks begin, in seconds."""

OUTCOMES = {CallVerdict.SUCCESS: OK, CallVerdict.FAILURE: FAILED, CallVerdict.NONE: CANCELLED}

names = (f"breaker-{number}" for number in count())
"""Names that no other test has."""


class Silent:
    """A job that never runs."""

    def soon(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


def quiet_store(url: str, **options: Any) -> RedisStore:
    """Return a store in whose background nothing goes on."""
    store = RedisStore(url, **options)
    core: Any = store._core
    core.every = lambda _seconds, _job: Silent()
    core.listen = lambda _channel, _listener: lambda: None
    return store


def entered(gate: Any, now: float) -> Any:
    """Enter a gate, and wait for the store if that has to be; a refusal is returned."""
    try:
        try:
            return gate.enter(now)
        except Wait as wait:
            waiter = wait.waiter
        woken = Event()
        waiter.publish(lambda: woken.set() or True)
        assert woken.wait(30)
        return waiter.claim()
    except CircuitOpen as refused:
        return refused


class Pod:
    """One pod's breaker, driven by hand; a single probe decides, unless the options say more."""

    def __init__(self, store: RedisStore, clock: VirtualClock, name: str, **options: Any) -> None:
        self.store = store
        self.clock = clock
        options = {"probes": single_probe()} | options
        self.breaker = Breaker(**options, shared=store, name=name)
        self.guard = new_guard(self.breaker, clock=clock)
        self.gate: Any = bindings_of(self.breaker)[0].layer("sync")
        self.share: Any = self.breaker._share
        self.share.full_for = 0.0
        self.mirror: Any = self.breaker.model

    @property
    def state(self) -> str:
        """The state that this pod knows of."""
        return self.breaker.state

    def enter(self) -> Any:
        """Offer a call; return its ticket, or the refusal."""
        return entered(self.gate, self.clock.now())

    def leave(self, ticket: Any, verdict: CallVerdict) -> None:
        """End a call."""
        self.gate.leave(ticket, OUTCOMES[verdict], None, self.clock.now())

    def unused(self, ticket: Any) -> None:
        """End a call that was refused further in."""
        self.gate.leave(ticket, UNUSED, None, self.clock.now())

    def call(self, verdict: CallVerdict) -> bool:
        """Make a call, if it is let through."""
        ticket = self.enter()
        if isinstance(ticket, CircuitOpen):
            return False
        self.leave(ticket, verdict)
        return True

    def flush(self, *, notice: bool = False, poll: bool = False) -> None:
        """Tell the store what there is to tell, and take in what it says."""
        if notice:
            self.mirror.notice(self.clock.now())
        if not (poll or self.mirror.dirty):
            return
        self.hear(*self.told())

    def told(self) -> tuple[Any, Any]:
        """Tell the store what there is to tell; return what was told, and the reply."""
        message = self.share.pack([self.mirror])
        return message, self.store._core.call("breaker", message.keys, message.args)

    def hear(self, message: Any, reply: Any) -> None:
        """Take in the reply."""
        self.share.process_replies(message, parse_replies(reply, 1))

    def lose_reply(self) -> None:
        """Tell the store, which does what it is told; its reply never comes."""
        message, _reply = self.told()
        self.share._not_answered(message)


class World:
    """Some pods, one server, and the time."""

    def __init__(self, stores: list[RedisStore], frozen: FrozenClock) -> None:
        self.stores = stores
        self.frozen = frozen
        self.pods: list[Pod] = []
        self.begin()

    def begin(self) -> None:
        """Begin anew, under a name that was never used."""
        self.end()
        self.clock = VirtualClock(START)
        self.frozen.set(START * 1_000_000)
        self.name = next(names)

    def add(self, **options: Any) -> list[Pod]:
        """Let there be a pod on each store, all with these settings."""
        self.pods = [Pod(store, self.clock, self.name, **options) for store in self.stores]
        return self.pods

    def pass_time(self, seconds: float) -> None:
        """Let time pass, here and on the server."""
        self.clock.advance(seconds)
        self.frozen.advance(round(seconds * 1_000_000))

    def flush(self) -> None:
        """Let each pod tell the store all, and hear what it says."""
        for pod in self.pods * 2:
            pod.flush(poll=True)

    def end(self) -> None:
        """Free the names of the guards."""
        for pod in self.pods:
            pod.guard.close()
        self.pods = []


@contextmanager
def quiet_world(redis_url: str, client: redis.Redis, pods: int = 1) -> Iterator[World]:
    """Make a world of so many pods; nothing of it is left afterwards."""
    prefix = f"quiet-{next(names)}"
    stores: list[RedisStore] = [
        quiet_store(redis_url, prefix=prefix, timeout=30.0) for _ in range(pods)
    ]
    frozen = FrozenClock(stores[0], client)
    for store in stores:
        frozen.rule(store)
    world = World(stores, frozen)
    try:
        yield world
    finally:
        world.end()
        for store in stores:
            store.close()
        client.delete(frozen._key)
        for key in client.scan_iter(match=f"{prefix}:*", count=1000):
            client.delete(key)


def eventually(is_so: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until something is so, or fail."""
    until = SYSTEM.now() + seconds
    while not is_so():
        assert SYSTEM.now() < until, "it never was"
        SYSTEM.sleep(0.002)
