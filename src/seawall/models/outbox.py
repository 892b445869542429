"""The rules of delivering: what a failure means, when to try again, how often to look.

An aggregate's events are delivered in order, so a failure is one of its first undelivered event,
and that event alone has attempts. `now` and chance are passed in; delays are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Literal, NamedTuple

from seawall.models.backoff import Backoff

Poison = Literal["block", "skip"]
"""What becomes of an event that failed as often as it may: its aggregate waits, or goes on."""

MICROSECONDS: Final = 1_000_000
MOST_ATTEMPTS: Final = 1_000


class Settings(NamedTuple):
    """How often an event is tried, after which pauses, and what then."""

    attempts: int
    backoff: Backoff
    poison: Poison


class Verdict(NamedTuple):
    """What a failure leads to: try again after `delay` microseconds, block, or skip the event."""

    action: Literal["again", "block", "skip"]
    attempts: int
    delay: int


def after_failure(
    settings: Settings, attempts: int, *, progressed: bool, rng: Callable[[], float]
) -> Verdict:
    """Judge a failure: of the event that failed `attempts` times, or of one after it.

    With `progressed`, others were delivered first, so this event failed for the first time.
    """
    failed = 1 if progressed else max(0, attempts) + 1
    if failed >= settings.attempts:
        return Verdict(settings.poison, failed, 0)
    delays = settings.backoff.delays(rng)
    delay = next(islice(delays, min(failed, MOST_ATTEMPTS) - 1, None))
    return Verdict("again", failed, round(delay * MICROSECONDS))


def next_pause(pause: float, *, found: bool, shortest: float, longest: float) -> float:
    """Return how long to wait before the next look: longer and longer while there is nothing."""
    return shortest if found else min(longest, max(shortest, pause * 2))


def first_failure(ids: list[str], failed: frozenset[str]) -> int:
    """Return how many events of an aggregate count as delivered: those before the first failed."""
    for index, event in enumerate(ids):
        if event in failed:
            return index
    return len(ids)
