"""Ready scenarios: what commonly goes wrong, each without protection and with it.

Each scenario is a pair of worlds that differ in their policies only: the same services, clients and
random numbers. `seawall simulate outage` runs both and prints them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from seawall.guard import Guard
from seawall.models.budget import RequestRatio
from seawall.models.shedding.codel import codel
from seawall.policies.breaker import Breaker
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.cache import Cache
from seawall.policies.rate_limit import RateLimit
from seawall.policies.retry import Retry, RetryBudget
from seawall.policies.timeout import Timeout
from seawall.sim.clients import zipf
from seawall.sim.latency import Latency
from seawall.sim.records import Change
from seawall.sim.services import Service
from seawall.sim.world import Build, World

Fill = TypeVar("Fill", bound=Callable[..., None])

TRANSIENT: Final = (ConnectionError, TimeoutError)


class Scenario(NamedTuple):
    """What goes wrong, and the worlds in which it does: the first without protection."""

    about: str
    variants: Mapping[str, Build]


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(about: str, bare: str, guarded: str) -> Callable[[Fill], Fill]:
    """Add the scenario that the decorated function builds, and name its two worlds."""

    def add(build: Fill) -> Fill:
        builds = {bare: partial(build, protected=False), guarded: partial(build, protected=True)}
        SCENARIOS[build.__name__.strip("_").replace("_", "-")] = Scenario(about, builds)
        return build

    return add


def _plain_retries(name: str, timeout: float) -> Guard:
    """Retry three times without a budget: what is commonly written by hand."""
    retry = Retry(on=TRANSIENT, attempts=4, backoff=0.1, budget=None)
    return Guard(name, retry, Timeout(timeout))


@scenario("A vendor is down for 30 s.", "three retries", "recommended guard")
def _outage(world: World, *, protected: bool) -> None:
    world.seconds = 120
    vendor = world.service("vendor", workers=10, latency=Latency.exponential(0.05))
    guard = (
        Guard.standard("vendor", on=TRANSIENT, timeout=1.0, limit=50)
        if protected
        else _plain_retries("vendor", 1.0)
    )
    world.clients("users", guard(vendor.acall), rate=60, patience=5.0)
    world.at(30, vendor.down(), lasts=30)


@scenario(
    "A vendor is 50 times slower for 30 s; half of the requests do not need it.",
    "long timeout",
    "bulkhead, breaker and short timeout",
)
def _slow_dependency(world: World, *, protected: bool) -> None:
    world.seconds = 120
    vendor = world.service("vendor", latency=Latency.lognormal(median=0.05, p99=0.3))
    if protected:
        limit = Bulkhead(15, max_wait=0.05)
        retry = Retry(on=TRANSIENT, attempts=2, backoff=0.05, budget=RetryBudget())
        breaker = Breaker(slow_after=0.5, slow_ratio=0.5, break_for=2.0)
        call = Guard("vendor", retry, breaker, limit, Timeout(0.5))(vendor.acall)
    else:
        call = Guard("vendor", Timeout(10.0))(vendor.acall)

    async def handle(page: Any) -> None:
        if page == "order":
            await call()

    api = world.service("api", workers=40, latency=Latency.exponential(0.02), handler=handle)

    def page(name: str) -> Any:
        async def visit() -> None:
            await api.acall(name)

        return visit

    world.clients("orders", page("order"), rate=50, patience=3.0)
    world.clients("pages", page("home"), rate=50, patience=3.0)
    world.at(30, vendor.slow(50), lasts=30)


@scenario(
    "A database is four times slower for 20 s, behind two services that retry.",
    "three retries each",
    "budgets, breakers, bounded queue",
)
def _retry_storm(world: World, *, protected: bool) -> None:
    world.seconds = 120
    database = world.service(
        "database",
        workers=5,
        latency=Latency.exponential(0.04),
        guard=Guard("database", Bulkhead(5, max_wait=0.5)) if protected else None,
    )

    def guarded(name: str, inner: Service) -> Any:
        budget = RetryBudget() if protected else None
        attempts = 2 if protected else 4
        retry = Retry(on=TRANSIENT, attempts=attempts, backoff=0.05, budget=budget)
        stack = [retry, Breaker(), Timeout(1.0)] if protected else [retry, Timeout(1.0)]
        return Guard(name, *stack)(inner.acall)

    middle = world.service("middle", handler=guarded("middle to database", database))
    front = world.service("front", handler=guarded("front to middle", middle))
    world.clients("users", front.acall, rate=80, patience=3.0)
    world.at(30, database.slow(4), lasts=20)


@scenario(
    "A server at 93 % of its capacity stands still for 10 s.",
    "three retries",
    "success-deposit budget, expired work dropped",
)
def _metastable(world: World, *, protected: bool) -> None:
    world.seconds = 120
    guard = Guard("server", Bulkhead(1, max_wait=inf, max_waiting=10**6)) if protected else None
    latency = Latency.exponential(0.01)
    server = world.service("server", workers=1, latency=latency, guard=guard, deadlines=protected)
    budget = RetryBudget() if protected else None
    retry = Retry(on=TRANSIENT, attempts=4, backoff=0.1, budget=budget)
    client = Guard("client", retry, Timeout(1.0))
    world.clients("users", client(server.acall), rate=93)
    world.at(20, server.stall(), lasts=10)


@scenario(
    "Popular pages expire in a cache, and their callers go to the origin.",
    "hand-made cache",
    "Cache, one call for each key",
)
def _thundering_herd(world: World, *, protected: bool) -> None:
    world.seconds = 120
    origin = world.service("origin", workers=5, latency=Latency.exponential(0.5))
    fetch = Guard("origin", Timeout(5.0))(origin.acall)
    call = Guard("cache", Cache(20.0))(fetch) if protected else _handmade_cache(world, fetch, 20.0)
    world.clients("users", call, rate=100, keys=zipf(3), patience=2.0)


def _handmade_cache(world: World, fetch: Any, ttl: float) -> Any:
    """Return a cache as it is often written: whoever finds nothing fetches it."""
    known: dict[Any, tuple[float, Any]] = {}

    async def call(key: Any) -> Any:
        at, value = known.get(key, (-inf, None))
        if world.clock.now() - at >= ttl:
            value = await fetch(key)
            known[key] = world.clock.now(), value
        return value

    return call


SHARDS: Final = 8
BAD_SHARD: Final = 3


@scenario("One shard of eight hangs for 30 s.", "one bulkhead for all", "a guard for each shard")
def _bad_shard(world: World, *, protected: bool) -> None:
    world.seconds = 120
    database = world.service("database", latency=Latency.exponential(0.02))

    async def read(key: int) -> Any:
        return await database.acall(key)

    if protected:
        shards = Guard.family(
            "shard", lambda _shard: (Breaker(), Bulkhead(10, max_wait=0.1), Timeout(1.0))
        )
        call = shards(by=_shard_of)(read)
    else:
        call = Guard("database", Bulkhead(40, max_wait=0.1), Timeout(5.0))(database.acall)
    world.clients("users", call, rate=200, keys=zipf(1000, 0.2), patience=3.0)
    world.at(30, database.down(hangs=True, when=lambda key: _shard_of(key) == BAD_SHARD), lasts=30)


def _shard_of(key: int) -> int:
    return key % SHARDS


@scenario("Every second call wants the same key for 30 s.", "no cache", "cache of one second")
def _hot_key(world: World, *, protected: bool) -> None:
    world.seconds = 120
    latency = Latency.exponential(0.05)
    shards = [world.service(f"shard {one}", workers=2, latency=latency) for one in range(SHARDS)]

    async def read(key: int) -> Any:
        return await shards[key % SHARDS].acall(key)

    call = Guard("shards", Timeout(1.0))(read)
    if protected:
        call = Guard("cache", Cache(1.0, max_entries=10_000))(call)
    is_hot = False

    def choose(rng: Random) -> int:
        return BAD_SHARD if rng.random() < is_hot / 2 else rng.randrange(100_000)

    def heat(hot: bool) -> None:  # noqa: FBT001
        nonlocal is_hot
        is_hot = hot

    world.clients("users", call, rate=240, keys=choose, patience=3.0)
    begin, end = partial(heat, True), partial(heat, False)  # noqa: FBT003
    world.at(30, Change("every second call wants the same key", begin, end), lasts=30)


@scenario(
    "The store of a shared rate limit is lost for 30 s.",
    "closed without the store",
    "local without the store",
)
def _store_loss(world: World, *, protected: bool) -> None:
    world.seconds = 120
    store = world.store("redis")
    vendor = world.service("vendor", workers=3, latency=Latency.exponential(0.05))
    lost: Any = "local" if protected else "closed"
    limit = RateLimit("50/s", burst=10, shared=store, name="vendor", on_store_failure=lost)
    guard = Guard("vendor", limit, Timeout(1.0))
    world.clients("users", guard(vendor.acall), rate=40, patience=3.0)
    world.at(30, store.lost(), lasts=30)


PODS: Final = 4


@scenario("Four pods restart one after another.", "no retries", "retries with a budget")
def _rolling_restart(world: World, *, protected: bool) -> None:
    world.seconds = 120
    latency = Latency.exponential(0.05)
    pods = [world.service(f"pod {one}", workers=4, latency=latency) for one in range(PODS)]
    balanced = list(pods)
    rng = world.rng("balancer")

    async def call() -> Any:
        return await rng.choice(balanced).acall()

    retry = Retry(on=TRANSIENT, attempts=3, backoff=0.05, budget=RetryBudget(RequestRatio(0.3)))
    guard = Guard("pods", *([retry] if protected else []), Timeout(1.0))
    world.clients("users", guard(call), rate=120, patience=3.0)
    for number, pod in enumerate(pods):
        at = 30 + 12 * number
        world.at(at, pod.crash(), lasts=8)
        out, back = partial(balanced.remove, pod), partial(balanced.append, pod)
        world.at(at + 2, Change(f"the balancer leaves {pod.name} out", out, back), lasts=8)


@scenario("Ten times the usual calls for 20 s.", "unbounded queue", "bulkhead with CoDel")
def _surge(world: World, *, protected: bool) -> None:
    world.seconds = 120
    limit = Bulkhead(10, max_wait=0.5, max_waiting=1000, shed=codel())
    guard = Guard("server", limit) if protected else None
    server = world.service("server", workers=10, latency=Latency.exponential(0.1), guard=guard)
    users = world.clients(
        "users", server.acall, rate=60, patience=1.0, comes_back=0.5, return_after=2.0
    )
    world.at(30, users.surge(10), lasts=20)
