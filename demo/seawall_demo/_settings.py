"""The settings of the demo in one place: traffic, behaviour of the vendor, and timeouts.

They are chosen so that all processes together keep well below one core busy while nothing is wrong.
"""

from __future__ import annotations

import asyncio
from typing import Final

HOST: Final = "127.0.0.1"
PORT: Final = 8800
"""Port of the page; if it is taken, the next free one is used."""
PODS: Final = 3
EVERY: Final = 0.5
"""Interval of a dashboard in seconds: an open breaker must be visible within two seconds."""

PROTECTED: Final = "protected"
UNPROTECTED: Final = "unprotected"
SIDES: Final = (PROTECTED, UNPROTECTED)

# The users

RATE: Final = 15.0
"""Requests per second for each pod, on either side."""
SURGE: Final = 5.0
"""Factor of the request rate in a surge; the additional requests come from free users only."""
PREMIUM_SHARE: Final = 0.4
FREE_USERS: Final = 12
PREMIUM_USERS: Final = 6
ITEMS: Final = 40
PATIENCE: Final = 4.0
"""Seconds that a user waits for an answer; after that it counts as an error."""

# The vendor

SLOTS: Final = {PROTECTED: 2 * PODS, UNPROTECTED: 2}
"""Number of concurrent requests that the vendor serves for each account: the same for each pod."""
WAITING: Final = 200
"""Number of further requests of each account that may wait; others are refused."""

# The processes

READY_WITHIN: Final = 20.0
"""Timeout in seconds for the start of a process, on a busy machine."""
RESTART_AFTER: Final = 8.0
"""Seconds for which a dead pod is away; by then the others have confirmed its death."""
PAUSED_FOR: Final = 5.0
"""Seconds for which a pod is paused; the others suspect it, but have not confirmed it yet."""
GRACE: Final = 1.0
"""Seconds that a process has to end itself when asked to, or when its parent is gone."""


async def pause(seconds: float) -> None:
    """Sleep in real time: these are real processes."""
    await asyncio.sleep(seconds)  # noqa: TID251 - they run in the machine's time
