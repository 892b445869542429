"""Guarded pools for engines of SQLAlchemy: checking out a connection passes a guard.

    engine = create_engine(url, poolclass=guarded_pool(Guard("db", Bulkhead(15, max_wait=0.5))))

Promises:

- A caller waits for a connection as long as the guard allows, at most until the deadline, and is
  refused by the guard. The pool's own timeout (30 s) is never reached.
- A slot is held from the checkout of a connection to its return, however it is returned.
- Failures to connect are failures of the guard's calls: a breaker opens if the server is down.
"""

from __future__ import annotations

from typing import Any

try:
    from sqlalchemy.pool import QueuePool
except ImportError as error:
    raise ImportError(
        "seawall.clients.sqlalchemy needs SQLAlchemy: pip install 'seawall[sqlalchemy]'"
    ) from error

from sqlalchemy.util import await_only

from seawall.guard import Guard
from seawall.policies.slots import SlotPolicy
from seawall.runtime.blocks import Hold

__all__ = ["guarded_pool"]


def guarded_pool(guard: Guard, base: type[QueuePool] = QueuePool) -> type[QueuePool]:
    """Return a class of pools for `create_engine(poolclass=...)` that asks `guard`.

    For `create_async_engine`, `base` is `sqlalchemy.pool.AsyncAdaptedQueuePool`. The guard needs a
    `Bulkhead` or an `AdaptiveLimit` that is no larger than the pool.
    """
    if not isinstance(guard, Guard):
        raise TypeError(
            f"{guard!r}: the first argument is a Guard, such as Guard('db', Bulkhead(15))"
        )
    if not (isinstance(base, type) and issubclass(base, QueuePool)):
        raise TypeError(f"base={base!r}: write QueuePool or AsyncAdaptedQueuePool")
    if not _limits(guard):
        raise ValueError(f"guard {guard.name!r} bounds nothing: give it a Bulkhead(15)")

    kind: type[QueuePool] = type("GuardedPool", (_GuardedCheckout, base), {"_guard": guard})
    return kind


class _GuardedCheckout(QueuePool):
    """The pool, for the guard that its subclass names: a new pool of an engine has it too."""

    _guard: Guard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holds: dict[Any, Hold] = {}
        admitted, most = min(_limits(self._guard)), self.size() + self._max_overflow
        if self._max_overflow >= 0 and admitted > most:
            raise ValueError(
                f"guard {self._guard.name!r} lets {admitted} in, and the pool has {most}"
                f" connections: write Bulkhead({most}), or a larger pool_size"
            )

    def connect(self) -> Any:
        """Return a connection; wait for it at the guard."""
        hold = self._guard.hold()
        if self._is_asyncio:
            await_only(hold.__aenter__())
        else:
            hold.__enter__()
        try:
            connection: Any = super().connect()
        except BaseException as error:
            hold.__exit__(type(error), error, error.__traceback__)
            raise
        self._holds[connection._connection_record] = hold
        return connection

    def _do_return_conn(self, record: Any) -> None:
        hold = self._holds.pop(record, None)  # before another thread checks this record out
        try:
            super()._do_return_conn(record)
        finally:
            if hold is not None:
                hold.__exit__(None, None, None)


def _limits(guard: Guard) -> list[int]:
    return [policy.limit for policy in guard.policies if isinstance(policy, SlotPolicy)]
