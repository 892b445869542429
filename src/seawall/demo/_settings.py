"""The numbers of the demo, in one place: how much traffic, how bad the vendor, how long each wait.

Chosen so that all of it together keeps well below one core busy while nothing is wrong.
"""

from __future__ import annotations

import asyncio
from typing import Final

HOST: Final = "127.0.0.1"
PORT: Final = 8800
"""Where the page is, or at the next port that is free."""
PODS: Final = 3
EVERY: Final = 0.5
"""Seconds between two looks of a dashboard: a breaker is to be seen open within two seconds."""

PROTECTED: Final = "protected"
UNPROTECTED: Final = "unprotected"
SIDES: Final = (PROTECTED, UNPROTECTED)

# The users

RATE: Final = 15.0
"""Requests a second for each pod, on either side."""
SURGE: Final = 5.0
"""So many times as much in a surge; what comes on top is of free users alone."""
PREMIUM_SHARE: Final = 0.4
FREE_USERS: Final = 12
PREMIUM_USERS: Final = 6
ITEMS: Final = 40
PATIENCE: Final = 4.0
"""Seconds that a user waits for an answer; then it counts as an error."""

# The vendor

SLOTS: Final = {PROTECTED: 2 * PODS, UNPROTECTED: 2}
"""How many requests of each account the vendor works on at once: as many for each pod."""
WAITING: Final = 200
"""How many more of each account wait for that; others are turned away."""

# The processes

READY_WITHIN: Final = 20.0
"""Seconds that a process may take to start, on a machine that is busy."""
RESTART_AFTER: Final = 8.0
"""Seconds for which a pod that died is away: the others have confirmed its death by then."""
PAUSED_FOR: Final = 5.0
"""Seconds for which a pod is stopped: the others suspect it, and have not confirmed it yet."""
GRACE: Final = 1.0
"""Seconds that a process has to end by itself when it is told to, or when nobody is left to."""


async def pause(seconds: float) -> None:
    """Let real time pass: these are real processes."""
    await asyncio.sleep(seconds)  # noqa: TID251 - they live in the time of the machine
