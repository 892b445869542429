"""Rules for `Shed` and for queues: which calls are refused under load."""

from seawall.models.shedding.codel import adaptive_lifo, codel
from seawall.models.shedding.rules import (
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    by_queue,
    by_tier,
)

__all__ = [
    "adaptive_lifo",
    "by_chance",
    "by_cost",
    "by_criticality",
    "by_deadline",
    "by_fraction",
    "by_latency",
    "by_queue",
    "by_tier",
    "codel",
]
