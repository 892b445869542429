"""Circuit breaker: stop calling a failing dependency, and try again carefully."""

from seawall.policies.breaker.policy import Breaker

__all__ = ["Breaker"]
