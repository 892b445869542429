"""Outbox delivery: what a failure means, when to retry, and how often to poll.

An aggregate's events are delivered in order, so a failure always concerns its first undelivered
event, and only that event has attempts. `now` and random numbers are passed in; delays are whole
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Literal, NamedTuple

from seawall.models.backoff import Backoff

Poison = Literal["block", "skip"]
"""What to do with an event that has no attempts left: block its aggregate, or skip the event."""

MICROSECONDS: Final = 1_000_000
MOST_ATTEMPTS: Final = 1_000


class OutboxSettings(NamedTuple):
    """Number of attempts, pauses between them, and what to do after the last one."""

    attempts: int
    backoff: Backoff
    poison: Poison


class DeliveryVerdict(NamedTuple):
    """Result of a failure: try again after `delay` microseconds, block, or skip the event."""

    action: Literal["again", "block", "skip"]
    attempts: int
    delay: int


def after_failure(
    settings: OutboxSettings, attempts: int, *, progressed: bool, rng: Callable[[], float]
) -> DeliveryVerdict:
    """Return the verdict on a failure of an event that failed `attempts` times before.

    With `progressed`, other events were delivered first, so this event failed for the first time.
    """
    failed = 1 if progressed else max(0, attempts) + 1
    if failed >= settings.attempts:
        return DeliveryVerdict(settings.poison, failed, 0)
    delays = settings.backoff.delays(rng)
    delay = next(islice(delays, min(failed, MOST_ATTEMPTS) - 1, None))
    return DeliveryVerdict("again", failed, round(delay * MICROSECONDS))


def next_pause(pause: float, *, found: bool, shortest: float, longest: float) -> float:
    """Return the pause before the next poll. It doubles while nothing is found."""
    return shortest if found else min(longest, max(shortest, pause * 2))


def first_failure(ids: list[str], failed: frozenset[str]) -> int:
    """Return how many events of an aggregate were delivered: those before the first failed one."""
    for index, event in enumerate(ids):
        if event in failed:
            return index
    return len(ids)
