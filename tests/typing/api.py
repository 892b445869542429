"""What a type checker makes of Seawall: checked by mypy, never run.

Each `type: ignore` marks a use that must be an error; mypy complains about one that is not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any, assert_type

import httpx
import httpx2
import requests
from fastapi import Depends, FastAPI

from seawall import (
    AdaptiveLimit,
    Batch,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    Criticality,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    RedisStore,
    Result,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    criticality,
    current_deadline,
    deadline,
    full_jitter,
    get_guard,
    guards,
    guards_from_toml,
    static,
    subscribe,
    transient,
    web,
)
from seawall.clients import grpc as grpc_clients
from seawall.clients import httpx as seawall_httpx
from seawall.clients import httpx2 as seawall_httpx2
from seawall.clients import llm
from seawall.clients.requests import GuardedAdapter
from seawall.clients.upstreams import HealthCheck, Outliers, Upstreams
from seawall.context import Deadline, current_tenant, current_tier, tenant, tier
from seawall.events import BreakerChanged, Event
from seawall.limits import Limit, Quota, Reservation, aimd, gradient2, vegas
from seawall.load import LoopWatchdog, ServiceLevel, ServiceLevels, signals
from seawall.policies.breaker import growing, n_of_m
from seawall.policies.hedge import quantile
from seawall.policies.retry import adaptive_attempts
from seawall.policies.timeout import adaptive_timeout
from seawall.resources import (
    Channel,
    CpuPool,
    IoPool,
    Pool,
    Serializer,
    Stripes,
    aupdate_optimistically,
    update_optimistically,
)
from seawall.shedding import (
    adaptive_lifo,
    by_cost,
    by_criticality,
    by_latency,
    by_queue,
    by_tier,
    codel,
)
from seawall.testing import ScriptedService, answer, run_virtual
from seawall.web import checks
from seawall.web.fastapi import guarded, protect
from seawall.web.fastapi import limited as limited_route
from seawall.web.grpc import ServerInterceptor

vendor = Guard(
    "vendor",
    Fallback(static("try later"), on=(ConnectionError, TimeoutError)),
    Retry(on=ConnectionError, attempts=3, backoff=full_jitter(0.1, cap=2.0), budget=RetryBudget()),
    Breaker(failure_ratio=0.5, break_for=growing(5.0), probes=n_of_m(2, 3)),
    Bulkhead(20, max_wait=0.5, order="criticality"),
    Timeout(adaptive_timeout(floor=0.1, cap=2.0)),
)


# --- Decorators keep signatures ---


@vendor
def plain(user: str, *, limit: int = 10) -> list[str]:
    """Return names."""
    return [user] * limit


@vendor
async def later(user: str, *, limit: int = 10) -> list[str]:
    """Return names."""
    return [user] * limit


@vendor
def items(user: str) -> Generator[int, str, bytes]:
    """Yield numbers."""
    sent = yield len(user)
    return sent.encode()


@vendor
async def later_items(user: str) -> AsyncGenerator[int, str]:
    """Yield numbers."""
    yield len(user)


@vendor(idempotent=False)
def charge(cents: int) -> bool:
    """Take money."""
    return cents > 0


@Retry(on=ConnectionError)
def alone(x: int) -> int:
    """Return it."""
    return x


class Client:
    """A client whose methods are guarded."""

    @vendor
    def get(self, path: str) -> bytes:
        """Get."""
        return path.encode()

    @vendor
    async def aget(self, path: str) -> bytes:
        """Get."""
        return path.encode()

    @staticmethod
    @vendor
    def parse(text: str) -> int:
        """Parse."""
        return int(text)

    @classmethod
    @vendor
    def make(cls, text: str) -> Client:
        """Make."""
        return cls() if text else Client()


def check_decorated() -> None:
    """Check that guarded functions take and return what they did."""
    assert_type(plain("ann", limit=3), list[str])
    assert_type(items("ann"), Generator[int, str, bytes])
    assert_type(later_items("ann"), AsyncGenerator[int, str])
    assert_type(charge(5), bool)
    assert_type(alone(5), int)
    assert_type(Client().get("/"), bytes)
    assert_type(Client.parse("5"), int)
    assert_type(Client.make("5"), Client)
    plain(5)  # type: ignore[arg-type]
    plain("ann", nonsense=3)  # type: ignore[call-arg]
    charge("5")  # type: ignore[arg-type]
    alone()  # type: ignore[call-arg]
    Client().get(5)  # type: ignore[arg-type]
    vendor(5)  # type: ignore[call-overload]
    vendor()  # type: ignore[call-overload]


async def check_decorated_async() -> None:
    """Check the same for what is awaited."""
    assert_type(await later("ann", limit=3), list[str])
    assert_type(await Client().aget("/"), bytes)
    async for number in later_items("ann"):
        assert_type(number, int)
    await later(5)  # type: ignore[arg-type]
    later("ann").upper()  # type: ignore[attr-defined]


# --- call, acall, attempt, aattempt ---


def _size(text: str, *, twice: bool = False) -> int:
    return len(text) * (1 + twice)


async def _asize(text: str, *, twice: bool = False) -> int:
    return len(text) * (1 + twice)


def check_calls() -> None:
    """Check that values and results have the function's type, and arguments are checked."""
    assert_type(vendor.call(_size, "a", twice=True), int)
    result = vendor.attempt(_size, "a")
    assert_type(result, Result[int])
    assert_type(result.value, int | None)
    assert_type(result.error, Exception | None)
    assert_type(result.unwrap(), int)
    assert_type(result.level, int)
    assert_type(result.reason, str | None)
    vendor.call(_size, 5)  # type: ignore[arg-type]
    vendor.call(_size)  # type: ignore[call-arg]
    vendor.call(_size, "a", thrice=True)  # type: ignore[call-arg]
    vendor.attempt(_size, 5)  # type: ignore[arg-type]


async def check_async_calls() -> None:
    """Check the same for what is awaited."""
    assert_type(await vendor.acall(_asize, "a", twice=True), int)
    result = await vendor.aattempt(_asize, "a")
    assert_type(result, Result[int])
    assert_type(result.unwrap(), int)
    await vendor.acall(_asize, 5)  # type: ignore[call-overload]
    await vendor.aattempt(_asize)  # type: ignore[call-overload]
    assert_type(vendor.map(_size, ["a"]), Batch[str, int])
    assert_type(vendor.map(_size, ["a"]).ok, list[tuple[str, int]])
    assert_type(await vendor.amap(_asize, ["a"], concurrency=3), Batch[str, int])
    assert_type((await vendor.amap(_asize, ["a"])).unwrap(), list[int])
    hosts = Guard.family("host", lambda _key: [Bulkhead(1)])
    assert_type(hosts.map(_size, ["a"], by=len), Batch[str, int])
    assert_type(await hosts.amap(_asize, ["a"]), Batch[str, int])
    assert_type(hosts["a"], Guard)
    assert_type(hosts(by="text")(_size)("a", twice=True), int)
    hosts(by=len)(_size)(5)  # type: ignore[arg-type]
    hosts(by=5)  # type: ignore[arg-type]
    Guard.family("bad", lambda _key: [Bulkhead])  # type: ignore[list-item]
    vendor.map(_size, [5])  # type: ignore[arg-type]
    assert_type(await vendor.acall(_size, "a"), int)  # in a thread, by a ThreadBulkhead
    with vendor.hold() as held:
        held.failed("status 503")
        held.failed(ConnectionError())
        held.ignore()
        held.failed(503)  # type: ignore[arg-type]
    async with vendor.hold():
        pass
    async for attempt in vendor.attempts("key"):
        assert_type(attempt.number, int)
        async with attempt as own:
            own.failed("status 503")
        with attempt:  # type: ignore[attr-defined]
            pass
    for plain in vendor.attempts():
        with plain as held_plain:
            held_plain.failed(ConnectionError())
            held_plain.ignore()
        async with plain:  # type: ignore[attr-defined]
            pass
    async with deadline(2.0) as given:
        assert_type(given, Deadline)


# --- Policies ---


def check_policies() -> None:
    """Check that settings are checked where they are written."""
    Retry()  # type: ignore[call-arg]
    Retry(on="OSError")  # type: ignore[arg-type]
    Retry(on=KeyboardInterrupt)  # type: ignore[arg-type]
    Retry(on=OSError, attempts="3")  # type: ignore[arg-type]
    Retry(on=OSError, budget=0.2)  # type: ignore[arg-type]
    Retry(on=[OSError, _is_retryable], attempts=adaptive_attempts(4))
    Retry(on=_is_retryable, backoff=[0.1, 0.2])
    Retry(on=OSError, backoff=_pause)
    Timeout("2")  # type: ignore[arg-type]
    Timeout(2.0, sync="process")  # type: ignore[arg-type]
    Bulkhead(2.5)  # type: ignore[arg-type]
    Bulkhead(2, order="random")  # type: ignore[arg-type]
    Bulkhead(2, mode="on")  # type: ignore[arg-type]
    ThreadBulkhead("2")  # type: ignore[arg-type]
    Breaker(0.5)  # type: ignore[call-arg]
    Breaker(probes=3)  # type: ignore[arg-type]
    Cache(60, key="user")  # type: ignore[arg-type]
    Fallback("later")  # type: ignore[arg-type]
    Fallback(static(1), on=KeyboardInterrupt)  # type: ignore[arg-type]
    Guard(Timeout(2.0))  # type: ignore[arg-type]
    Guard("other", Timeout)  # type: ignore[arg-type]
    Guard("other", 5)  # type: ignore[arg-type]
    Guard.standard("other", timeout=2.0)  # type: ignore[call-arg]
    assert_type(Guard.standard("other", on=OSError, timeout=2.0), Guard)
    criticality(2)  # type: ignore[arg-type]
    with criticality(Criticality.CRITICAL) as level:
        assert_type(level, Criticality)


def _is_retryable(error: Exception | None, value: Any) -> bool:
    return error is not None or value is None


def _pause(attempt: int) -> float:
    return 0.1 * attempt


# --- Policies against scarcity ---

scarce = Guard(
    "scarce",
    Shed(by_criticality(), by_tier({"free": 0.5}), by_cost(len, most=9.0), load=lambda: 0.5),
    Hedge(quantile(0.95), most=2, cap=0.05, budget=RetryBudget(), dispose=print),
    Throttle(k={Criticality.CRITICAL: 4.0}, on=(ConnectionError, TimeoutError)),
    RateLimit("60/s", Limit("10k/day", key=current_tenant, name="tenant"), max_wait=0.5),
    AdaptiveLimit(vegas(), partitions={"live": 0.6}, is_drop=_is_retryable, shed=codel()),
    Bulkhead(20, max_wait=0.5, shed=adaptive_lifo()),
    Chaos(0.1, latency=(0.1, 0.5), error=ConnectionError),
)
store = RedisStore("redis://localhost:6379")
shared = Guard(
    "shared",
    Breaker(shared=store, name="shared"),
    RateLimit("60/s", shared=store, name="shared"),
)


@RateLimit("60/s", key=lambda user: user, cost=len, settle=len)
def limited(user: str) -> list[str]:
    """Return names."""
    return [user]


@AdaptiveLimit(aimd(slow_after=0.5))
async def adapted(user: str) -> list[str]:
    """Return names."""
    return [user]


@Hedge(0.1)
async def hedged_items(user: str) -> AsyncGenerator[int, None]:
    """Yield numbers."""
    yield len(user)


async def check_scarcity() -> None:
    """Check that policies against scarcity keep signatures, and have their settings checked."""
    assert_type(limited("ann"), list[str])
    assert_type(await adapted("ann"), list[str])
    assert_type(hedged_items("ann"), AsyncGenerator[int, None])
    limited(5)  # type: ignore[arg-type]
    await adapted()  # type: ignore[call-arg]
    limit = RateLimit("60/s", burst=5, algorithm="leaky_bucket")
    assert_type(limit.peek("ann"), Quota)
    assert_type(limit.peek().left, int)
    assert_type(limit.peek().retry_after, float | None)
    assert_type(limit.reserve("ann", cost=3), Reservation)
    limit.reserve().settle(2)
    limit.reserve().settle("2")  # type: ignore[arg-type]
    RateLimit(60)  # type: ignore[arg-type]
    RateLimit("60/s", algorithm="bucket")  # type: ignore[arg-type]
    RateLimit("60/s", cost="1")  # type: ignore[arg-type]
    Limit("60/s", burst=1.5)  # type: ignore[arg-type]
    Shed(0.5)  # type: ignore[arg-type]
    Shed(by_queue(5, of=Bulkhead(1)), by_latency(0.5), mode="on")  # type: ignore[arg-type]
    Throttle(k={"critical": 2.0})  # type: ignore[dict-item]
    AdaptiveLimit(20)  # type: ignore[arg-type]
    AdaptiveLimit(gradient2(), order="random")  # type: ignore[arg-type]
    AdaptiveLimit(partitions={"live": "0.5"})  # type: ignore[dict-item]
    aimd()  # type: ignore[call-arg]
    Hedge()  # type: ignore[call-arg]
    Hedge(0.1, sync="process")  # type: ignore[arg-type]
    Chaos(0.1, error=ConnectionError())  # type: ignore[arg-type]
    Bulkhead(2, shed=0.005)  # type: ignore[arg-type]
    with Chaos(0.1, hang=True).on() as chaos:
        assert_type(chaos, Chaos)


# --- Pools, channels, executors ---


class Connection:
    """Something that is costly to make."""

    def ping(self) -> bool:
        """Tell whether it is alive."""
        return True


async def _connect() -> Connection:
    return Connection()


async def _validate(connection: Connection) -> bool:
    return connection.ping()


def check_pool() -> None:
    """Check that a pool lends what its factory makes."""
    pool = Pool(Connection, name="plain", max_size=2, validate=Connection.ping)
    assert_type(pool, Pool[Connection])
    with pool.borrow() as connection:
        assert_type(connection, Connection)
    with pool as same:
        assert_type(same, Pool[Connection])
    assert_type(pool.close(), bool)
    assert_type(pool.advice().size, int)
    Pool(Connection, max_size=2)  # type: ignore[call-overload]
    Pool(Connection, name="bad", max_size="2")  # type: ignore[call-overload]
    Pool(Connection, name="bad", max_size=2, validate=_size)  # type: ignore[arg-type]
    Pool(Connection, name="bad", max_size=2, when_exhausted="panic")  # type: ignore[call-overload]


async def check_async_pool() -> None:
    """Check the same where the factory is async."""
    pool = Pool(_connect, name="async", max_size=2, validate=_validate)
    assert_type(pool, Pool[Connection])
    async with pool.borrow() as connection:
        assert_type(connection, Connection)
    async with pool as same:
        assert_type(same, Pool[Connection])
    assert_type(await pool.aclose(), bool)


async def check_channel() -> None:
    """Check that a channel gives what may be put into it."""
    channel: Channel[int] = Channel(5, when_full="drop_oldest", on_drop=print)
    assert_type(channel.put(1), bool)
    assert_type(await channel.aput(1), bool)
    assert_type(channel.get(), int)
    assert_type(await channel.aget(timeout=1.0), int)
    assert_type(await channel.adrain(), list[int])
    assert_type([item for item in channel], list[int])  # noqa: C416 - what iterating gives
    assert_type([item async for item in channel], list[int])
    channel.put("1")  # type: ignore[arg-type]
    await channel.aput(None)  # type: ignore[arg-type]
    Channel(5, when_full="panic")  # type: ignore[arg-type]


async def check_executors() -> None:
    """Check that executors take a function's own arguments, and return what it does."""
    with CpuPool("cpu", kind="thread") as cpu, IoPool("io", throughput=9.0, latency=0.1) as io:
        assert_type(cpu, CpuPool)
        assert_type(cpu.map(_size, ["a"]), Batch[str, int])
        assert_type(cpu.run(_size, "a", twice=True), int)
        assert_type(await io.arun(_size, "a"), int)
        assert_type(io.close(), bool)
        cpu.run(_size, 5)  # type: ignore[arg-type]
        cpu.run(_size)  # type: ignore[call-arg]
        await io.arun(_size, "a", thrice=True)  # type: ignore[call-arg]
        CpuPool("cpu", kind="fiber")  # type: ignore[arg-type]
    async with LoopWatchdog() as watchdog:
        assert_type(watchdog, LoopWatchdog)


# --- Contention, levels, signals ---


async def _read() -> tuple[int, str]:
    return 1, "version"


async def _write(value: int, version: str) -> bool:
    return bool(value and version)


async def check_contention() -> None:
    """Check that values and versions go through, and that turns keep a function's type."""
    assert_type(update_optimistically(lambda: (1, "v"), lambda n: n + 1, lambda _n, _v: 1), int)
    assert_type(await aupdate_optimistically(_read, lambda n: n + 1, _write), int)
    update_optimistically(lambda: 1, abs, lambda _n, _v: 1)  # type: ignore[arg-type,return-value]
    serializer = Serializer(max_wait=1.0)
    assert_type(serializer.run("key", _size, "a"), int)
    assert_type(await serializer.arun("key", _asize, "a"), int)
    with serializer.hold("key"):
        pass
    async with serializer.hold(("a", 1)):
        pass
    stripes = Stripes(8, list[int])
    assert_type(stripes["key"], list[int])
    assert_type(stripes.index("key"), int)
    Stripes("8", dict)  # type: ignore[arg-type]


def check_levels() -> None:
    """Check that rungs keep what a function returns, and that levels compare."""
    levels = ServiceLevels(
        "shop", load=signals.smoothed(signals.process_cpu()), depends_on={vendor: "cached"}
    )
    assert_type(levels.level, ServiceLevel)
    assert_type(levels.allows("cached"), bool)
    assert_type(levels.at("static", _size)("a"), int)
    Guard("shop", Fallback(levels.at("cached", _size)), levels.gate(), Timeout(1.0))
    assert_type(signals.highest(lambda: 0.5, signals.loop_lag())(), float)
    assert_type(signals.in_flight(Bulkhead(1)), signals.Signal)
    signals.latched(0.5)  # type: ignore[arg-type]
    with tenant("acme"), tier("free"):
        assert_type(current_tenant(), str | None)
        assert_type(current_tier(), str | None)
    tenant(5)  # type: ignore[arg-type]


# --- The edges ---


async def _asgi(_scope: Any, _receive: Any, _send: Any) -> None: ...


def _user_of(incoming: web.Incoming) -> str | None:
    return incoming.header("x-user")


def check_the_servers_edge() -> None:
    """Check the parts of the edge, and that a wrong part is an error."""
    trust = web.Trust(proxies=["10.0.0.0/8"], callers=["10.1.0.0/16"])
    limits = web.RequestLimits(
        web.RequestLimit("600/min", by="address"),
        web.RequestLimit("60/min", by=web.user(_user_of), tiers={"paid": "600/min"}, soft=True),
        web.RequestLimit("9/s", by=web.api_key(known={"right"}.__contains__), cost=lambda _: 2),
        web.RequestLimit("9k/min", by=None),
    )
    life = web.Lifecycle(drain_timeout=20.0)
    health = web.Health(lifecycle=life)
    edge = web.Edge(
        _asgi,
        inbound=web.Inbound(trust=trust, timeout=10.0),
        shed=Shed(by_criticality()),
        limits=limits,
        routes={"/reports/{id}": Bulkhead(4), "/search": AdaptiveLimit()},
        loop_admission=web.LoopAdmission(),
        concurrency=AdaptiveLimit(),
        websockets=Bulkhead(1000),
        health=health,
        lifecycle=life,
    )
    assert_type(edge.snapshot(), dict[str, Any])
    assert_type(web.problem_of(OSError()), web.Problem | None)
    assert_type(health.add("db", _pings), Callable[[], bool])
    health.add("disk", checks.Disk("/"), level="deep")
    health.add("disk", checks.Disk("/"), level="never")  # type: ignore[call-overload]
    web.Edge(_asgi, loop_admission=Bulkhead(1))  # type: ignore[arg-type]
    web.Edge(_asgi, limits=web.RequestLimit("5/s", by=None))  # type: ignore[arg-type]
    web.RequestLimits("600/min")  # type: ignore[arg-type]
    web.RequestLimit("600/min")  # type: ignore[call-arg]
    web.Inbound(max_criticality="critical")  # type: ignore[arg-type]
    web.Inbound(classify=lambda incoming: "free" if incoming.route else Criticality.SHEDDABLE)
    web.Inbound(classify=lambda _: web.Rank(Criticality.SHEDDABLE, tier="free"))
    web.Inbound(classify=lambda _: 0.5)  # type: ignore[arg-type,return-value]


def _pings() -> bool:
    return True


def check_fastapi(app: FastAPI) -> None:
    """Check the one line, and what routes depend on."""
    edge = protect(app, limits=web.RequestLimit("600/min", by="address"), concurrency=None)
    assert_type(edge, web.Edge)
    Depends(limited_route(web.RequestLimit("10/min", by="address")))
    Depends(guarded(vendor))
    protect(_asgi)  # type: ignore[arg-type]
    guarded(Bulkhead(1))  # type: ignore[arg-type]


async def check_clients() -> None:
    """Check transports, adapters and interceptors in the places where libraries take them."""
    httpx.Client(transport=seawall_httpx.GuardedTransport(vendor, retry_at="edge"))
    httpx.AsyncClient(transport=seawall_httpx.AsyncGuardedTransport(vendor, statuses={503}))
    httpx.AsyncClient(transport=seawall_httpx.GuardedTransport(vendor))  # type: ignore[arg-type]
    httpx2.Client(transport=seawall_httpx2.GuardedTransport(vendor))
    seawall_httpx.GuardedTransport(vendor, retry_at="nowhere")  # type: ignore[arg-type]
    seawall_httpx.GuardedTransport(Bulkhead(1))  # type: ignore[arg-type]
    requests.Session().mount("https://", GuardedAdapter(vendor, generate_keys=True))
    Guard.standard("api", on=transient, timeout=2.0)
    grpc_clients.aio_interceptors(vendor, idempotent={"/shop.Orders/Get"})
    grpc_clients.GuardedInterceptor(vendor, idempotent=lambda method: method.endswith("Get"))
    ServerInterceptor(vendor, timeout="2")  # type: ignore[arg-type]


async def check_upstreams() -> None:
    """Check that a host is chosen, and a set of them is a transport."""
    hosts = Upstreams("vendor", ["http://a", "http://b"], health=HealthCheck("/health/ready"))
    with hosts.pick() as picked:
        assert_type(picked.url, str)
    async with hosts.pick(tried=set()) as picked:
        assert_type(picked.url, str)
    httpx.Client(transport=seawall_httpx.GuardedTransport(vendor, hosts.transport()))
    Upstreams("vendor", ["http://a"], health="/health/ready")  # type: ignore[arg-type]
    Upstreams("vendor", ["http://a"], outliers=Outliers(consecutive="5"))  # type: ignore[arg-type]


async def check_models() -> None:
    """Check limits in tokens, and models to fall back on."""
    limits = llm.TokenLimits(requests="500/min", tokens="200k/min", max_wait=10.0)
    Guard("vendor", Retry(on=transient), limits)
    limits.settle(limits.reserve({"max_tokens": 5}), llm.Usage(3, 4))
    assert_type(llm.usage_of({}), llm.Usage)
    models = llm.Models(llm.Model("large", _asize, guard=vendor), llm.Model("small", _asize))
    assert_type(models.attempt("a"), Result[Any])
    assert_type(models.names, tuple[str, ...])
    llm.Models("large")  # type: ignore[arg-type]
    llm.TokenLimits(tokens=200_000)  # type: ignore[arg-type]


# --- The rest ---


def check_the_rest() -> None:
    """Check registry, context, events, settings and helpers for tests."""
    assert_type(guards(), list[Guard])
    assert_type(get_guard("vendor"), Guard)
    assert_type(get_guard("vendor", lambda: vendor), Guard)
    Breaker(is_failure=ConnectionError)
    Breaker(is_failure=(ConnectionError, TimeoutError))
    Breaker(is_failure=KeyboardInterrupt)  # type: ignore[arg-type]
    Breaker(is_failure=_asize)  # type: ignore[arg-type]
    assert_type(guards_from_toml(""), dict[str, Guard])
    assert_type(current_deadline(), Deadline | None)
    assert_type(vendor.snapshot(), dict[str, Any])
    assert_type(subscribe(_listen, BreakerChanged), Callable[[], None])
    subscribe(_listen, int)  # type: ignore[type-var,arg-type]
    assert_type(run_virtual(_asize("a")), int)
    run_virtual(_size("a"))  # type: ignore[arg-type]
    ScriptedService(answer(5), 5)  # type: ignore[arg-type]
    with deadline(2.0) as given:
        assert_type(given.split(2), list[Deadline])


def _listen(event: Event) -> None:
    assert_type(event.fields(), dict[str, Any])


def check_iterators(plain_iterator: Iterator[int], async_iterator: AsyncIterator[int]) -> None:
    """Check that what is no function is refused."""
    vendor(plain_iterator)  # type: ignore[call-overload]
    vendor(async_iterator)  # type: ignore[call-overload]
