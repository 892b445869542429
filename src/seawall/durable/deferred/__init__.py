"""Deferred calls: store a call that cannot be done now, and do it when its dependency is back.

`Later` is a level of a `Fallback`: it stores the arguments and answers with `Stored`. A
`LaterWorker` executes the calls, through the same guard without its fallbacks.
"""

from seawall.durable.deferred.calls import DeadLetter, Later, Stored
from seawall.durable.deferred.worker import LaterWorker

__all__ = ["DeadLetter", "Later", "LaterWorker", "Stored"]
