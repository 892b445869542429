"""Hedge policy: send a second request when the first is slow, and use the first answer."""

from seawall.policies.hedge.policy import Hedge, quantile

__all__ = ["Hedge", "quantile"]
