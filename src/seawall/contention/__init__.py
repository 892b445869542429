"""When many want to change the same thing: try and compare, or take turns.

`update_optimistically` reads, changes, and writes back only if nobody else wrote meanwhile, a
bounded number of times. `Serializer` lets one at a time through for each key, in order; with
stripes (`seawall.models.contention`), any number of keys shares a fixed number of queues.
"""

from seawall.contention._optimistic import aupdate_optimistically, update_optimistically
from seawall.contention._turns import Serializer

__all__ = ["Serializer", "aupdate_optimistically", "update_optimistically"]
