"""Pages about the shared store are run with a real one; the site is opened in a real browser."""

from __future__ import annotations

from tests.browser.conftest import browser, complaints, open_page
from tests.redis.conftest import redis_url

__all__ = ["browser", "complaints", "open_page", "redis_url"]
