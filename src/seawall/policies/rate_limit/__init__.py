"""Rate limit policy: admit calls at a limited rate, locally or shared with other pods."""

from seawall.policies.rate_limit.limit import Limit
from seawall.policies.rate_limit.policy import RateLimit
from seawall.policies.rate_limit.reservation import Quota, Reservation

__all__ = ["Limit", "Quota", "RateLimit", "Reservation"]
