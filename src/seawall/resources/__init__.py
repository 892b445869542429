"""What calls compete for: pools, channels, executors and data that many change at once.

Each name is imported on first use.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.models.contention import Stripes
    from seawall.models.pooling import CONNECTION_SETTINGS, Advice, pool_advice, pool_size
    from seawall.registry import check_threads
    from seawall.resources.channel import Channel
    from seawall.resources.contention import (
        Serializer,
        aupdate_optimistically,
        update_optimistically,
    )
    from seawall.resources.executors import CpuPool, IoPool
    from seawall.resources.pool import Borrowed, Pool

__all__ = [
    "CONNECTION_SETTINGS",
    "Advice",
    "Borrowed",
    "Channel",
    "CpuPool",
    "IoPool",
    "Pool",
    "Serializer",
    "Stripes",
    "aupdate_optimistically",
    "check_threads",
    "pool_advice",
    "pool_size",
    "update_optimistically",
]

_HOMES = {
    "models.contention": "Stripes",
    "models.pooling": "Advice CONNECTION_SETTINGS pool_advice pool_size",
    "registry": "check_threads",
    "resources.channel": "Channel",
    "resources.contention": "Serializer aupdate_optimistically update_optimistically",
    "resources.executors": "CpuPool IoPool",
    "resources.pool": "Borrowed Pool",
}

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
