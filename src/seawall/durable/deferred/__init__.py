"""Deferred calls: store a call that cannot be done now, and do it when its dependency is back.

`DeferredCalls` is a level of a `Fallback`: it stores the arguments and answers with a
`DeferredCall`. A `DeferredCallWorker` executes the calls, through the same guard without its
fallbacks.
"""

from seawall.durable.deferred.calls import DeferredCall, DeferredCalls
from seawall.durable.deferred.worker import DeferredCallWorker

__all__ = ["DeferredCall", "DeferredCallWorker", "DeferredCalls"]
