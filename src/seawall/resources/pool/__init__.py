"""A pool of resources that are costly to create: connections, sessions, clients."""

from seawall.resources.pool.borrowed import Borrowed
from seawall.resources.pool.pool import Pool

__all__ = ["Borrowed", "Pool"]
