"""Timeout policy: limit how long a call may take."""

from seawall.policies.timeout.policy import (
    AdaptiveSeconds,
    Sync,
    Timeout,
    TimeoutBound,
    adaptive_timeout,
)

__all__ = ["AdaptiveSeconds", "Sync", "Timeout", "TimeoutBound", "adaptive_timeout"]
