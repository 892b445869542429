"""The service that the tests write in each framework: what its handlers do, and its edge.

- `/hello` answers "hello".
- `/errors/{kind}` raises `error_of(kind)`.
- `/slow` works for longer than its deadline.
- `/pause` works for a moment.
- `/running` tells how many handlers of `/slow` run and did at once, and how often `/pause` ran.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from seawall import Bulkhead
from seawall.context import check_deadline
from seawall.errors import CircuitOpen, RateLimited, TimedOut
from seawall.web import Incoming, Lifecycle, RequestLimit, user

TIMEOUT: Final = 1.0
"""Seconds that a request has."""

SLOW: Final = 3.0
"""Seconds for which a handler of /slow works, if nobody stops it."""

PLACES: Final = 2
"""Requests of /slow at once."""

ALLOWED: Final = 3
"""Requests a minute of one caller, who is named in the header x-user."""

PAUSE: Final = 0.5
"""Seconds for which a handler of /pause works."""


def own_limit() -> Exception:
    """Return the error of a limit that a caller has exceeded itself."""
    error = RateLimited("request limit", limit="searches", retry_after=2.0)
    error.own_limit = True
    return error


ERRORS: Final[dict[str, Callable[[], Exception]]] = {
    "caller": own_limit,
    "vendor": lambda: CircuitOpen("guard 'vendor': open", retry_after=15.0),
    "late": lambda: TimedOut("guard 'db': 2 s"),
    "upstream": lambda: httpx.ConnectError("no route to vendor"),
    "bug": lambda: ValueError("a bug"),
}


def error_of(kind: str) -> Exception:
    """Return a fresh error of this kind."""
    return ERRORS[kind]()


def _caller(incoming: Incoming) -> str | None:
    return incoming.header("x-user")


def parts() -> dict[str, Any]:
    """Return the settings of the edge."""
    return {
        "timeout": TIMEOUT,
        "limits": RequestLimit(f"{ALLOWED}/min", by=user(_caller), name="callers"),
        "routes": {"/slow": Bulkhead(PLACES)},
        "lifecycle": Lifecycle(delay=0.5, drain_timeout=10.0),
    }


class Running:
    """Counts handlers that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.begun = 0

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.begun += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


SLOW_ONES: Final = Running()
PAUSING: Final = Running()


def running() -> dict[str, int]:
    """Return the answer of /running."""
    return {"running": SLOW_ONES.now, "most": SLOW_ONES.most, "pauses": PAUSING.begun}


async def slow() -> str:
    """Work in an event loop."""
    with SLOW_ONES:
        await asyncio.sleep(SLOW)  # noqa: TID251 - a real server has real time
    return "done"


def blocking_slow() -> str:
    """Work in a thread, which nobody can stop."""
    with SLOW_ONES:
        time.sleep(SLOW)  # noqa: TID251
    return "done"


def checked_slow() -> str:
    """Work in a thread, and look at the deadline now and then, as guards do."""
    with SLOW_ONES:
        until = time.monotonic() + SLOW  # noqa: TID251
        while time.monotonic() < until:  # noqa: TID251
            check_deadline()
            time.sleep(0.02)  # noqa: TID251
    return "done"


async def pause() -> str:
    """Work for a moment in an event loop."""
    with PAUSING:
        await asyncio.sleep(PAUSE)  # noqa: TID251
    return "done"


def blocking_pause() -> str:
    """Work for a moment in a thread."""
    with PAUSING:
        time.sleep(PAUSE)  # noqa: TID251
    return "done"
