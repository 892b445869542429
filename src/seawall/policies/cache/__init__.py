"""Answer from memory, also with older answers when the call fails."""

from seawall.policies.cache.policy import Cache

__all__ = ["Cache"]
