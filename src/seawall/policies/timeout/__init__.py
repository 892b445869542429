"""Timeout policy: limit how long a call may take."""

from seawall.models.pooling import timeout_for
from seawall.policies.timeout.policy import Timeout, adaptive_timeout

__all__ = ["Timeout", "adaptive_timeout", "timeout_for"]
