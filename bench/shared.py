"""What all pods share, against a real Valkey server: decisions and calls a second.

Wall time, since most of it is spent waiting for the server. A decision of a limiter comes from
fifty tasks at once, as in a service; a call through a breaker from one after another. What others
do for a call is done by them as their documentation shows it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from bench.cases import async_work, work
from bench.measure import ARGUMENT
from seawall import Breaker, RateLimit, RedisStore
from tests.redis.support import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SHARED_LIMIT = "shared limiter, 50 tasks"
SHARED_BREAKER = "shared breaker, closed"
EVALSHA = "one EVALSHA a decision, redis-py"
EXACT = "RateLimit, exact"
LEASED = "RateLimit, leased (100)"
OURS = "Breaker"
PURGATORY = "purgatory, Redis"
PYBREAKER = "pybreaker, Redis"

TASKS = 50
TIMEOUT = 5.0  # a busy machine is no failure of the store

# One decision of a token bucket, as anybody would write it.
BUCKET = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local owed = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now) + tonumber(ARGV[1])
if owed - now > tonumber(ARGV[2]) then
  return owed - now - tonumber(ARGV[2])
end
redis.call('SET', KEYS[1], string.format('%.0f', owed), 'PX', 10000)
return 0
"""

Rates = dict[str, dict[str, list[float]]]
"""Calls a second, by table, case and round."""

Run = "Callable[[int], Awaitable[None]]"
"""Makes so many calls."""


class Plan(NamedTuple):
    """How thoroughly to measure."""

    rounds: int = 15
    seconds: float = 0.2
    """How long one case takes in one round, about."""
    seed: int = 1


def _from_tasks(one: Callable[[int], Awaitable[object]]) -> Run:
    async def several(count):
        for _ in range(count):
            await one(ARGUMENT)

    async def run(calls):
        await asyncio.gather(*(several(max(1, calls // TASKS)) for _ in range(TASKS)))

    return run


def _in_a_row(one: Callable[[int], Awaitable[object]]) -> Run:
    async def run(calls):
        for _ in range(calls):
            await one(ARGUMENT)

    return run


async def evalsha(server: Server, stack: AsyncExitStack) -> Run:
    """Ask the server for each decision by itself."""
    from redis.asyncio import Redis

    client = await stack.enter_async_context(Redis(port=server.port))
    sha = await client.script_load(BUCKET)

    async def decide(_argument):
        assert await client.evalsha(sha, 1, "bench", 1, 1_000_000) == 0

    return _from_tasks(decide)


async def exact(server: Server, stack: AsyncExitStack) -> Run:
    """Ask together whoever waits at the same moment."""
    store = await stack.enter_async_context(RedisStore(server.url, timeout=TIMEOUT))
    limit = RateLimit("1M/s", shared=store, name="exact")
    return _from_tasks(limit(async_work))


async def leased(server: Server, stack: AsyncExitStack) -> Run:
    """Spend a hundred at a time."""
    store = await stack.enter_async_context(RedisStore(server.url, timeout=TIMEOUT))
    limit = RateLimit("1M/s", shared=store, name="leased", sharing="leased", batch=100)
    return _from_tasks(limit(async_work))


async def shared_breaker(server: Server, stack: AsyncExitStack) -> Run:
    """Call through a closed breaker that all pods share."""
    store = await stack.enter_async_context(RedisStore(server.url, timeout=TIMEOUT))
    return _in_a_row(Breaker(shared=store, name="bench")(async_work))


async def purgatory_redis(server: Server, _stack: AsyncExitStack) -> Run:
    """Use purgatory's factory with its unit of work on Redis."""
    from purgatory import AsyncCircuitBreakerFactory, AsyncRedisUnitOfWork

    breakers = AsyncCircuitBreakerFactory(uow=AsyncRedisUnitOfWork(server.url))
    await breakers.initialize()
    return _in_a_row(breakers("bench")(async_work))


async def pybreaker_redis(server: Server, stack: AsyncExitStack) -> Run:
    """Use pybreaker's decorator with its storage on Redis; it has no asyncio."""
    from pybreaker import STATE_CLOSED, CircuitBreaker, CircuitRedisStorage
    from redis import Redis

    client = stack.enter_context(Redis(port=server.port))
    guarded = CircuitBreaker(state_storage=CircuitRedisStorage(STATE_CLOSED, client))(work)

    async def run(calls):
        for _ in range(calls):
            guarded(ARGUMENT)

    return run


CASES = {
    SHARED_LIMIT: {EVALSHA: evalsha, EXACT: exact, LEASED: leased},
    SHARED_BREAKER: {
        OURS: shared_breaker,
        PURGATORY: purgatory_redis,
        PYBREAKER: pybreaker_redis,
    },
}


async def _rate(run: Run, calls: int) -> float:
    began = time.perf_counter()
    await run(calls)
    return calls / (time.perf_counter() - began)


async def _measure(plan: Plan, progress: Callable[[str], None], server: Server) -> Rates:
    chance = Random(plan.seed)
    rates: Rates = {table: {name: [] for name in cases} for table, cases in CASES.items()}
    async with AsyncExitStack() as stack:
        runs, calls = {}, {}
        for table, cases in CASES.items():
            for name, make in cases.items():
                run = runs[table, name] = await make(server, stack)
                await run(TASKS)  # connected, and warm
                calls[table, name] = max(TASKS, int(plan.seconds * await _rate(run, TASKS * 20)))
        for number in range(1, plan.rounds + 1):
            progress(f"shared, round {number} of {plan.rounds}")
            for table, name in chance.sample(list(runs), len(runs)):
                rates[table][name].append(await _rate(runs[table, name], calls[table, name]))
    return rates


def measure(plan: Plan, progress: Callable[[str], None]) -> Rates:
    """Measure all cases on one server, interleaved in an order drawn from a seed."""
    server = Server()
    try:
        return asyncio.run(_measure(plan, progress, server))
    finally:
        server.close()
