"""As many calls at once as the dependency takes well: the limit is learnt from what they take.

Promises: in flight never exceeds the limit of the moment, and the limit never leaves its bounds; it
does not grow while it is not used; calls that were dropped, cancelled or failed never count as
fast or slow ones; time spent in this gate's own queue counts for nothing. With partitions, a class
that has less in flight than is reserved for it is admitted at once. The rules are in
`seawall.models.adaptive` and `seawall.models.partitions`, the gates in `_limit_gates`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

from seawall import _checks as check
from seawall.errors import ErrorKinds, error_predicate
from seawall.models.adaptive import vegas
from seawall.models.codel import QueueShed
from seawall.models.concurrency import ConcurrencyLimit
from seawall.models.partitions import Partitions
from seawall.models.samples import Windows
from seawall.models.waiting import Order
from seawall.policies._limit_gates import Gate, PartitionedGate
from seawall.policies._slot_gates import SlotPolicy
from seawall.runtime.layers import Host
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound, Mode

DropRule = Callable[[Exception | None, Any], bool]
"""`is_drop(error, value)`: whether a call that raised `error`, or returned `value`, was dropped."""


class AdaptiveLimit(SlotPolicy):
    """Admit as many calls at once as can be served without a queue growing at the dependency."""

    kind: ClassVar[str] = "adaptive_limit"

    def __init__(
        self,
        limit: ConcurrencyLimit | None = None,
        *,
        window: float = 0.1,
        max_wait: float = 0.0,
        max_waiting: int | None = None,
        order: Order = "criticality",
        partitions: Mapping[str, float] | None = None,
        partition: Callable[..., Hashable] | None = None,
        shed: QueueShed | None = None,
        is_drop: DropRule | ErrorKinds | None = None,
        mode: Mode = "enforce",
    ) -> None:
        """Let in as many as `limit` says: `vegas()` unless given, `aimd(...)` or `gradient2()`.

        It is reconsidered every `window` seconds; less often while calls are slow or few. Others
        wait up to `max_wait` seconds, at most `max_waiting` of them (as many as the limit, unless
        given), in the `order` "criticality", "fifo" or "lifo"; `shed` is that of `Bulkhead`.

        `partitions` reserves a share of the limit for each class of calls, as in
        `{"live": 0.6, "batch": 0.2}`; what is left is for all. A call's class is
        `partition(*args, **kwargs)`, or its tier (see `tier`).

        `is_drop(error, value)`, or types of errors, tells which calls the dependency dropped
        because it had too much to do; calls that ran out of time always count as dropped.
        """
        self.model = _check_limit(limit).fresh()
        self.windows = Windows(check.seconds("window", window))
        super().__init__(self.model.limit, max_wait, max_waiting, order, shed, mode)
        self.partitions: Partitions | None = None
        self.partition = None if partition is None else check.plain_function("partition", partition)
        if partitions is not None:
            self.partitions = places = Partitions(partitions, self.model.limit)
            self.slots.fits = lambda waiter: places.admits(waiter.kind)
        elif partition is not None:
            raise TypeError('partition=...: write partitions={"live": 0.6, "batch": 0.2} too')
        self.is_drop = None if is_drop is None else error_predicate("is_drop", is_drop)
        self._crowded = False
        """Whether somebody found all slots taken in this window."""
        survives_fork(self)

    def __repr__(self) -> str:
        shares = "" if self.partitions is None else f", partitions={self.partitions.shares!r}"
        return f"AdaptiveLimit({self.model!r}, {self._queue_repr()}{shares})"

    def _service_time(self, now: float) -> float | None:
        return self.windows.typical

    def _end_window(self, now: float, rng: Callable[[], float]) -> None:
        """Move the limit, if a window is over. Under the lock of the slots."""
        window = self.windows.end(now)
        if window is None:
            return
        limit, in_flight = self.slots.limit, self.slots.in_use
        if in_flight < limit:  # the call that ends the window has just left
            in_flight = limit if self._crowded else in_flight + 1
        self._crowded = False
        self.model.on_sample(now, window.rtt, in_flight, window.dropped, rng)
        if self.model.limit != limit:
            self._resize(self.slots.room)

    def _resize(self, room: int | None) -> None:
        limit = self.model.limit
        if self.partitions is not None:
            self.partitions.resize(limit)
        self.slots.resize(limit, room)

    def _bind(self, host: Host) -> GateBound:
        return Gate(self, host) if self.partitions is None else PartitionedGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = (
            "minimum",
            "maximum",
            "window",
            "max_wait",
            "max_waiting",
            "partitions",
            "shed",
            "mode",
        )
        self._reject_unknown(changes, names)
        model, known = self.model.fresh(), self.partitions
        bounds = [changes.get(name, getattr(model, name)) for name in ("minimum", "maximum")]
        model.bound(*bounds)
        shares = changes.get("partitions", None if known is None else known.shares)
        fresh = AdaptiveLimit(
            model,
            window=changes.get("window", self.windows.shortest),
            max_wait=changes.get("max_wait", self.max_wait),
            max_waiting=changes.get("max_waiting", self.slots.room),
            partitions=shares,
            shed=changes.get("shed", self.shed),
            mode=changes.get("mode", self.mode),
        )
        given = set() if fresh.partitions is None else set(fresh.partitions.shares)
        if given != (set() if known is None else set(known.shares)):
            raise ValueError("update(partitions=...): write new shares for the same classes")
        with self.slots.mutex:
            self._take_over(fresh)
            self.windows.shortest = fresh.windows.shortest
            if known is not None and fresh.partitions is not None:
                known.shares = fresh.partitions.shares
            self.model.bound(*bounds)
            self._resize(fresh.slots.room)

    def _after_fork(self) -> None:
        """Be usable in a child process: slots of threads that are gone are free again."""
        if self.partitions is not None:
            self.partitions.forget_in_flight()


def _check_limit(limit: ConcurrencyLimit | None) -> ConcurrencyLimit:
    if limit is None:
        return vegas()
    if not isinstance(limit, ConcurrencyLimit):
        raise TypeError(f"limit={limit!r}: write vegas(), gradient2() or aimd(slow_after=0.5)")
    return limit
