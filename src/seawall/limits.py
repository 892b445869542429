"""Parts of limits: rates and reservations of `RateLimit`, algorithms of `AdaptiveLimit`."""

from seawall.models.concurrency.algorithms import aimd, gradient2, vegas
from seawall.policies.rate_limit import Limit, Quota, Reservation

__all__ = ["Limit", "Quota", "Reservation", "aimd", "gradient2", "vegas"]
