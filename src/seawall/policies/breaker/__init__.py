"""Circuit breaker: stop calling a failing dependency, and try again carefully."""

from seawall.models.breaker.probes import growing, n_of_m, ramp, single_probe, slow_start
from seawall.policies.breaker.policy import Breaker

__all__ = ["Breaker", "growing", "n_of_m", "ramp", "single_probe", "slow_start"]
