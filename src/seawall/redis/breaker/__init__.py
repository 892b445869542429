"""Breakers that all pods share: `SharedBreakers` implements `BreakerShare` on a `RedisStore`."""

from seawall.redis.breaker.share import SharedBreakers

__all__ = ["SharedBreakers"]
