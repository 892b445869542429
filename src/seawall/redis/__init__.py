"""State that all pods share, on Redis or Valkey: the store, and what is kept in it.

Each name is imported on first use.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.redis.queue import PriorityQueue
    from seawall.redis.store import RedisStore

__all__ = ["PriorityQueue", "RedisStore"]

_HOMES = {"redis.queue": "PriorityQueue", "redis.store": "RedisStore"}

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
