"""Rate limiters of other libraries, each as its own documentation does it; see `bench.peers`.

All may admit a million calls a second and have a thousand million to spare, so that none is ever
refused, and all are asked about one key. Where a library has several algorithms it is measured with
a token bucket or GCRA; `limits` has none, and is measured with its cheapest, the fixed window.
"""

from __future__ import annotations

from bench.cases import RATE, SPARE

KEY = "bench"
PERIOD = SPARE / RATE


class Refused(Exception):
    """Stands for what a service would answer."""


def token_bucket_limiter(function):
    """Ask token-bucket before the call."""
    import token_bucket

    limiter = token_bucket.Limiter(RATE, SPARE, token_bucket.MemoryStorage())

    def guarded(argument):
        if not limiter.consume(KEY):
            raise Refused
        return function(argument)

    return guarded


def limits_limiter(function):
    """Ask limits before the call."""
    from limits import parse
    from limits.storage import MemoryStorage
    from limits.strategies import FixedWindowRateLimiter

    limiter = FixedWindowRateLimiter(MemoryStorage())
    item = parse(f"{SPARE} per {PERIOD:.0f} second")

    def guarded(argument):
        if not limiter.hit(item, KEY):
            raise Refused
        return function(argument)

    return guarded


def limits_async_limiter(function):
    """Ask the async side of limits before the call."""
    from limits import parse
    from limits.aio.storage import MemoryStorage
    from limits.aio.strategies import FixedWindowRateLimiter

    limiter = FixedWindowRateLimiter(MemoryStorage())
    item = parse(f"{SPARE} per {PERIOD:.0f} second")

    async def guarded(argument):
        if not await limiter.hit(item, KEY):
            raise Refused
        return await function(argument)

    return guarded


def throttled_limiter(function):
    """Use throttled's decorator."""
    from throttled import RateLimiterType, Throttled, per_sec

    quota = per_sec(RATE, burst=SPARE)
    return Throttled(key=KEY, using=RateLimiterType.TOKEN_BUCKET.value, quota=quota)(function)


def throttled_async_limiter(function):
    """Use throttled's async decorator."""
    from throttled.asyncio import RateLimiterType, Throttled, per_sec

    quota = per_sec(RATE, burst=SPARE)
    return Throttled(key=KEY, using=RateLimiterType.TOKEN_BUCKET.value, quota=quota)(function)


def pyrate_limiter(function):
    """Use pyrate-limiter's decorator, which tells a plain function from an async one."""
    from pyrate_limiter import GCRA, Duration, InMemoryStateStore, Limiter, Rate, StateBucket

    rate = Rate(SPARE, int(PERIOD) * Duration.SECOND)
    limiter = Limiter(StateBucket([rate], GCRA(), InMemoryStateStore()))
    return limiter.as_decorator(name=KEY)(function)


def hyx_limiter(function):
    """Use hyx's decorator."""
    from hyx.ratelimit import tokenbucket

    return tokenbucket(max_executions=RATE, per_time_secs=1, bucket_size=SPARE)(function)


def aiolimiter_limiter(function):
    """Hold aiolimiter's limiter around the call."""
    from aiolimiter import AsyncLimiter

    limiter = AsyncLimiter(SPARE, PERIOD)

    async def guarded(argument):
        async with limiter:
            return await function(argument)

    return guarded


def pyresilience_limiter(function):
    """Use pyresilience's decorator, with a rate limit only."""
    from pyresilience import RateLimiterConfig, resilient

    return resilient(rate_limiter=RateLimiterConfig(max_calls=SPARE, period=PERIOD))(function)
