"""Rate limits of requests, by caller and by route."""

from seawall.web.limits.groups import LimitGrant
from seawall.web.limits.limits import RequestLimit, RequestLimits

__all__ = ["LimitGrant", "RequestLimit", "RequestLimits"]
