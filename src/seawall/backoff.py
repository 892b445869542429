"""Backoff: how long a retry waits before the next attempt."""

from seawall.models.backoff import (
    Backoff,
    constant,
    decorrelated_jitter,
    exponential,
    full_jitter,
    linear,
    plus_minus,
)

__all__ = [
    "Backoff",
    "constant",
    "decorrelated_jitter",
    "exponential",
    "full_jitter",
    "linear",
    "plus_minus",
]
