"""Concurrent changes of the same data: optimistic updates, or one caller at a time.

`update_optimistically` reads, changes, and writes back only if no other caller wrote in between, a
bounded number of times. `Serializer` admits one caller at a time for each key, in order; with
stripes (`seawall.models.contention`), any number of keys shares a fixed number of queues.
"""

from seawall.resources.contention.optimistic import aupdate_optimistically, update_optimistically
from seawall.resources.contention.serializer import Serializer

__all__ = ["Serializer", "aupdate_optimistically", "update_optimistically"]
