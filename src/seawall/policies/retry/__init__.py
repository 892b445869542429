"""Retry policy: repeat calls that failed for a transient reason."""

from seawall.policies.retry.budget import RetryBudget
from seawall.policies.retry.conditions import transient
from seawall.policies.retry.policy import (
    AdaptiveAttempts,
    Retry,
    RetryBound,
    adaptive_attempts,
    switch,
)

__all__ = [
    "AdaptiveAttempts",
    "Retry",
    "RetryBound",
    "RetryBudget",
    "adaptive_attempts",
    "switch",
    "transient",
]
