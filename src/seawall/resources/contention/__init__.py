"""Concurrent changes of the same data: optimistic updates, or one caller at a time for each key."""

from seawall.resources.contention.optimistic import aupdate_optimistically, update_optimistically
from seawall.resources.contention.serializer import Serializer

__all__ = ["Serializer", "aupdate_optimistically", "update_optimistically"]
