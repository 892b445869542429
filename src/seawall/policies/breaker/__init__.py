"""Stop calling a dependency that fails, and try again carefully."""

from seawall.policies.breaker.policy import Breaker

__all__ = ["Breaker"]
