"""Task queues are tested with a real broker."""

from __future__ import annotations

from tests.redis.conftest import redis_url

__all__ = ["redis_url"]
