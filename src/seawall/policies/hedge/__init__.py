"""Send a second request when the first is slow, and take whichever answers first."""

from seawall.policies.hedge.policy import Hedge, HedgeBound, quantile

__all__ = ["Hedge", "HedgeBound", "quantile"]
