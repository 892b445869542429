"""`sharing="leased"`: batches of a shared limit, spent in the pod."""

from seawall.redis.limits.leased.share import LeasedLimits

__all__ = ["LeasedLimits"]
