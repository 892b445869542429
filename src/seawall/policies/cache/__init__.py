"""Cache policy: answer from memory, also with stale answers when the call fails."""

from seawall.policies.cache.policy import Cache

__all__ = ["Cache"]
