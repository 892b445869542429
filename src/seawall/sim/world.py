"""A world: services, networks, stores and clients on virtual time, with real guards between them.

    with World(seed=7) as world:
        vendor = world.service("vendor", workers=10, latency=Latency.exponential(0.05))
        guard = Guard.standard("vendor", on=ConnectionError, timeout=0.5)
        world.clients("users", guard(vendor.acall), rate=100)
        world.at(20, vendor.down(), lasts=10)
        result = world.run(minutes=1)
    assert result.recovery() < 5

Promises:
- Guards, edges, queues, pipelines and everything else made inside the block are the very objects of
  production. Their time is the world's, and their names are free in it.
- The same seed and program give the same result, to the byte. Each service, group of clients and
  guard has random numbers of its own: another policy does not change when clients come.
- Nothing is logged and nothing really sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from random import Random
from typing import Any, Final, Self, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import VirtualClock, chance_var, clock_var
from seawall.events import log
from seawall.guard import Guard
from seawall.policies.breaker import Breaker
from seawall.policies.cache import Cache
from seawall.policies.fallback import Fallback
from seawall.policies.slots import SlotPolicy
from seawall.runtime.virtual import VirtualLoop
from seawall.sim.clients import ClientCall, ClientGroup, ClosedUsers, Keys, OpenClients, Rate
from seawall.sim.latency import LatencyLike
from seawall.sim.records import Change, Disturbance, GuardRecord, Steps
from seawall.sim.result import SimulationResult
from seawall.sim.services import Handler, Network, Service, SimulatedStore, pause

T = TypeVar("T")

DRAIN: Final = 10.0  # seconds after the last arrival in which calls in progress may still end

Progress = Callable[[float, float], None]
"""Called with the virtual seconds that have passed, and with their total."""


class World:
    """A place to try settings out; see the module for an example."""

    def __init__(self, seed: int = 1, *, name: str = "world", step: float = 1.0) -> None:
        """Make a world in which chance comes from `seed`, and counts are kept for each `step`."""
        self.seed = check.count("seed", seed, minimum=0)
        self.name = name
        self.clock = VirtualClock()
        self.seconds = 60.0  # how long `run()` lasts by default
        self._step = check.seconds("step", step)
        self._services: dict[str, Service] = {}
        self._groups: dict[str, ClientGroup] = {}
        self._changes: list[tuple[Disturbance, Change]] = []
        self._background: list[Callable[[], Awaitable[Any]]] = []
        self._named: Counter[str] = Counter()
        self._stack = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        self._stack.enter_context(_silence())
        log.changes.reset()
        self._stack.enter_context(registry.emptied())
        self._stack.callback(chance_var.reset, chance_var.set(self._next_rng))
        self._stack.callback(clock_var.reset, clock_var.set(self.clock))
        self._is_open = True
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_open = False
        self._stack.close()

    def __repr__(self) -> str:
        return f"<World {self.name!r}, seed {self.seed}>"

    def rng(self, name: str) -> Random:
        """Return random numbers of their own for whatever is called `name`."""
        return Random(f"{self.seed}/{name}")  # noqa: S311 - it has to be the same again

    def _next_rng(self, name: str) -> Random:
        """Return random numbers for one more object of that name; two of them differ."""
        self._named[name] += 1
        number = self._named[name]
        return self.rng(name if number == 1 else f"{name} {number}")

    # What there is

    def service(
        self,
        name: str,
        *,
        latency: LatencyLike = 0.0,
        workers: int | None = None,
        capacity: float | None = None,
        max_queue: int | None = None,
        network: Network | None = None,
        guard: Guard | None = None,
        handler: Handler | None = None,
        deadlines: bool = False,
        failing: float = 0.0,
    ) -> Service:
        """Add a service.

        It serves at most `workers` calls at the same time, or `capacity` calls a second (neither:
        any number). Further calls wait in a queue, first come first served, up to `max_queue`
        (None: any number), and are refused beyond. Each call takes the time of `latency`, and then
        that of `handler(key)`, an async function that may call other services. `guard` is the
        server's own guard, around its queue and its work. With `deadlines`, the deadline of the
        caller travels with the call. A share `failing` of the calls fails also when the service is
        well.
        """
        if guard is not None:
            self._check_guard(guard)
        service = Service(
            name,
            self.rng(f"service {name}"),
            latency=latency,
            workers=workers,
            capacity=capacity,
            max_queue=max_queue,
            network=network,
            guard=guard,
            handler=handler,
            deadlines=deadlines,
            failing=failing,
        )
        return self._add(self._services, name, service)

    def network(self, name: str = "network", *, delay: LatencyLike = 0.001) -> Network:
        """Make a network for `service(network=)`; `delay` is one way."""
        return Network(name, self.rng(f"network {name}"), delay)

    def store(self, name: str = "store") -> SimulatedStore:
        """Make a store for policies with `shared=`, which can be lost."""
        return SimulatedStore(name, self.clock)

    def clients(
        self,
        name: str,
        call: ClientCall,
        *,
        rate: Rate,
        even: bool = False,
        patience: float | None = None,
        keys: Keys | None = None,
        comes_back: float = 0.0,
        returns: int = 3,
        return_after: LatencyLike = 1.0,
    ) -> OpenClients:
        """Add clients who come whatever happens: `rate` a second, at random or `even` distances.

        `rate` may be a function of the time, such as `ramp(...)`. Each awaits `call()`, or
        `call(key)` with a key from `keys(rng)`, and leaves after `patience` seconds. A share
        `comes_back` of those without a real answer comes again after `return_after` seconds, up to
        `returns` times: as another call.
        """
        self._check_call(call)
        group = OpenClients(
            name,
            call,
            self.rng(f"clients {name}"),
            rate=rate,
            even=even,
            patience=patience,
            keys=keys,
            comes_back=comes_back,
            returns=returns,
            return_after=return_after,
        )
        return self._add(self._groups, name, group)

    def users(
        self,
        name: str,
        call: ClientCall,
        *,
        count: int,
        think: LatencyLike = 1.0,
        patience: float | None = None,
        keys: Keys | None = None,
    ) -> ClosedUsers:
        """Add `count` users, each of whom thinks, calls, waits for the answer and begins again."""
        self._check_call(call)
        group = ClosedUsers(
            name,
            call,
            self.rng(f"users {name}"),
            count=count,
            think=think,
            patience=patience,
            keys=keys,
        )
        return self._add(self._groups, name, group)

    def background(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Run the async function `work` beside the clients: a worker, a pipeline, a member."""
        self._background.append(check.function("work", work))

    def at(self, at: float, change: Change, *, lasts: float | None = None) -> None:
        """Make `change` happen at that second; undo it after `lasts` seconds (None: never)."""
        at = check.seconds("at", at, zero=True)
        if not isinstance(change, Change):
            raise TypeError(f"at({at:g}, {change!r}): give a change, such as vendor.down()")
        if lasts is not None and change.end is None:
            raise ValueError(f"{change.text!r} cannot be undone: leave lasts= out")
        until = inf if lasts is None else at + check.seconds("lasts", lasts)
        if change.end is None:
            until = at
        self._changes.append((Disturbance(at, until, change.text, change.is_load), change))

    # The run

    def run(
        self,
        *,
        seconds: float | None = None,
        minutes: float = 0.0,
        hours: float = 0.0,
        progress: Progress | None = None,
    ) -> SimulationResult:
        """Let time pass, and return what happened; once for each world."""
        check_progress(progress)
        if not self._is_open:
            raise RuntimeError("write `with World(...) as world:` around its guards and its run")
        if self.clock.now():
            raise RuntimeError("this world has had its run: make another one")
        asked = (seconds or 0.0) + 60 * minutes + 3600 * hours
        total = check.seconds("seconds", self.seconds if seconds is None and not asked else asked)
        steps = Steps(self._step, max(1, round(total / self._step)))
        guards = [_WatchedGuard(guard) for guard in registry.guards()]
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self.clock)) as runner:
            runner.run(self._pass(steps, guards, progress))
        return SimulationResult(
            self.name,
            self.seed,
            self._step,
            clients=[group.record for group in self._groups.values()],
            services=[service.record for service in self._services.values()],
            guards=[watched.record for watched in guards],
            disturbances=sorted(one for one, _ in self._changes if one.at < total),
            steps=steps.count,
        )

    async def _pass(
        self, steps: Steps, guards: list[_WatchedGuard], progress: Progress | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._schedule(loop)
        working = [asyncio.ensure_future(work()) for work in self._background]
        for service in self._services.values():
            service.begin(steps)
        collects = _can_degrade()
        for group in self._groups.values():
            group.begin(steps, collects=collects)
        total = steps.count * self._step
        for index in range(steps.count):
            await pause((index + 1) * self._step - loop.time())
            for service in self._services.values():
                service.sample(loop.time())
            for watched in guards:
                watched.sample(loop.time())
            steps.now = index + 1
            if progress is not None:
                progress(loop.time(), total)
        for group in self._groups.values():
            group.stop()
        await pause(DRAIN)
        for group in self._groups.values():
            await group.leave()
        await _stop(working)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        for disturbance, change in self._changes:
            loop.call_at(disturbance.at, change.begin)
            if change.end is not None and disturbance.until < inf:
                loop.call_at(disturbance.until, change.end)

    def _check_call(self, call: Any) -> None:
        guard = getattr(call, "__seawall__", (None,))[0]
        if isinstance(guard, Guard):
            self._check_guard(guard)

    def _check_guard(self, guard: Guard) -> None:
        if guard.clock is not self.clock:
            raise ValueError(
                f"{guard!r} was made outside of this world and has another clock: make it inside"
                " the `with World(...)` block"
            )

    def _add(self, known: dict[str, Any], name: str, thing: T) -> T:
        if name in known:
            raise ValueError(f"{name!r} is in this world already: choose another name")
        known[name] = thing
        return thing


Build = Callable[[World], Any]  # fills a world: `def outage(world): ...`; may set its seconds


def simulate(
    build: Build,
    *,
    seed: int = 1,
    seconds: float | None = None,
    name: str | None = None,
    step: float = 1.0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Make a world, let `build(world)` fill it, and run it."""
    check.plain_function("build", build)
    with World(seed, name=name or name_of(build), step=step) as world:
        build(world)
        return world.run(seconds=seconds, progress=progress)


def name_of(build: Build) -> str:
    """Return the name of the worlds that `build` fills."""
    return str(getattr(build, "__name__", "world"))


class _WatchedGuard:
    """A guard whose breaker and queues are sampled."""

    def __init__(self, guard: Guard) -> None:
        self.record = GuardRecord(guard.name)
        self._breakers = [one for one in guard.policies if isinstance(one, Breaker)]
        self._slots = [one for one in guard.policies if isinstance(one, SlotPolicy)]

    def sample(self, now: float) -> None:
        for breaker in self._breakers[:1]:
            self.record.breaker.append(breaker.state)
        if self._slots:
            self.record.in_flight.append(max(one.in_flight for one in self._slots))
            self.record.waiting.append(sum(one.waiting for one in self._slots))
            self.record.queue_age.append(max(one.queue_wait(now) for one in self._slots))


def _can_degrade() -> bool:
    """Return whether some guard may give a lesser answer."""
    policies = [policy for guard in registry.guards() for policy in guard.policies]
    return any(isinstance(policy, (Fallback, Cache)) for policy in policies)


async def _stop(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel background work; raise the error of work that failed before."""
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            raise error


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what happens in a world out of the log of the process."""
    # A filter of a logger does not hold for those below it.
    names = ("seawall", "seawall.dashboard", "seawall.events")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def check_progress(progress: Callable[..., None] | None) -> None:
    """Refuse what cannot be called with the progress of a run."""
    if progress is not None:
        check.plain_function("progress", progress)
