"""Retry policy: repeat calls that failed for a transient reason."""

from seawall.models.budget import InFlightRatio, RequestRatio, SuccessDeposit
from seawall.models.pressure import Pressure, RetryThresholds
from seawall.policies.retry.conditions import transient
from seawall.policies.retry.policy import Retry, RetryBudget, adaptive_attempts

__all__ = [
    "InFlightRatio",
    "Pressure",
    "RequestRatio",
    "Retry",
    "RetryBudget",
    "RetryThresholds",
    "SuccessDeposit",
    "adaptive_attempts",
    "transient",
]
