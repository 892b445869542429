"""Pages about the shared store are run with a real one."""

from __future__ import annotations

from tests.redis.conftest import redis_url

__all__ = ["redis_url"]
