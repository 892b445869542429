"""`sharing="split"`: each pod has its part of the limit, and decides alone.

Promises:
- All pods together keep to the limit, while pods come and go.
- A call costs no round trip.

The price: a pod that needs less than its part leaves it unused, and a new pod has none for a
moment. The rules are in `models.rate.split`; `LivePods` counts the pods.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize

from seawall.clock import Clock
from seawall.errors import StoreUnavailable
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import SETTLED, check_divisible, divided, excess_of, follow
from seawall.redis.limits.shared import SharedLimits
from seawall.redis.messages import weakly
from seawall.redis.store import SLACK
from seawall.runtime.driver import CallbackWaiter, Steps
from seawall.runtime.layers import Kind
from seawall.runtime.mutex import Mutex
from seawall.runtime.store import LimitVerdict, WantedCharge

if TYPE_CHECKING:
    from seawall.redis.store import StoreCore


class SplitLimits(SharedLimits):
    """The limits of one policy, divided among the pods: `LimitShare`.

    Once it has a part, this pod decides alone, by meters in memory that follow the part's rules.
    """

    sharing = "split"

    def __init__(
        self,
        store: StoreCore,
        name: str,
        rules: Sequence[RateRule[Any]],
        **options: Any,
    ) -> None:
        """Let the meters of the owner follow this pod's part."""
        self._mutex = Mutex()
        self._clock: Clock | None = None
        self._parts: list[RateRule[Any] | None] = []
        self._pods = 0
        """Number of pods among which the limits are divided; 0: this pod has no part yet."""
        self._whole = True
        """Whether the meters follow the whole limits: this pod has never had a part of them."""
        self._waiting: dict[Callable[[], bool], None] = {}
        """How to wake the calls that wait to know whether this pod has a part."""
        super().__init__(store, name, rules, **options)
        finalize(self, store.pods.watchers.add(weakly(self._pods_changed)))

    # Settings

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Divide other numbers from now on."""
        check_divisible(self.sharing, rules)
        super().configure(rules)
        self._whole = True
        self.divide(anew=True)

    def divide(self, *, anew: bool = False) -> None:
        """Make the meters follow this pod's part of the limits, if that has changed."""
        pods = self.store.pods
        with self._mutex:
            if not pods.settled:
                self._pods = 0  # others may have grown into its part
                self._parts = []
            if self._clock is None or not pods.settled:
                return
            if pods.count == self._pods and not anew:
                return
            clock = self._clock
        self.owner.follow(self._divided(clock))
        self._wake_all()

    def _pods_changed(self) -> None:
        self.divide()
        self._wake_all()

    def _divided(self, clock: Clock) -> Iterator[RateRule[Any]]:
        """Yield this pod's parts, as of the first `next`: the meters are locked then.

        So two threads that see changes at the same time apply them in order, whichever comes first.
        """
        pods = self.store.pods
        with self._mutex:
            # A pod that was settled before the first call had its part from then on.
            passed = 0.0 if self._pods else pods.members.steady
            now = whole_microseconds(clock.now()) - passed
            count, settled = pods.count, pods.settled
            parts = [divided(rule, count) for rule in self.terms.rules]
            for part, old in zip(parts, self._parts or [None] * len(parts), strict=True):
                if old is not None or not self._nobody_before(part, count):
                    follow(part, old, now)
            self._pods, self._parts = (count, list(parts)) if settled else (0, [])
            self._whole = False
        yield from parts

    def _nobody_before(self, part: RateRule[Any], count: int) -> bool:
        """Return whether no other pod can have spent anything that still matters."""
        quiet = self.store.pods.members.quiet
        return count == 1 and (quiet is None or quiet >= 2 * part.rate.period)

    def _after_fork(self) -> None:
        """Drop the part in a child process: no pod has heard of it."""
        super()._after_fork()
        self._mutex = Mutex()
        self._waiting = {}
        self._parts, self._pods = [], 0

    @property
    def mode(self) -> str:
        """What decides: "shared" while the store is up, otherwise `on_store_failure`."""
        return "shared" if self.store.up else self.failing

    @property
    def away(self) -> bool:
        """Whether this pod decides alone: once it has its part, or if the store is gone."""
        if self._pods and self.store.pods.current:
            return True
        return not self.store.up

    @property
    def times(self) -> int:
        """How often a call counts: once, if the rules are those of a part."""
        return super().times if self._whole else 1

    @property
    def excess(self) -> tuple[int, ...]:
        """Additional admissions at once, if there are more pods than the limit has units."""
        return tuple(excess_of(rule, self.store.pods.count) for rule in self.terms.rules)

    def snapshot(self) -> dict[str, Any]:
        """Return among how many the limits are divided; 0 while this pod has no part."""
        return {**super().snapshot(), "pods": self._pods, "excess": self.excess}

    # Before there is a part

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> Any:
        """Return a waiter that ends when this pod has its part, or is known to have none yet."""
        if not self._ready:
            self._prepare()
        if self._clock is None:
            self._clock = clock
            self.divide()
        until = clock.now() + self.store.timeout + SLACK
        return CallbackWaiter(self._join, leave=self._leave, result=self._verdict, until=until)

    def _join(self, wake: Callable[[], bool]) -> None:
        with self._mutex:
            waits = not self.store.pods.current
            if waits:
                self._waiting[wake] = None
        if not waits:
            wake()

    def _leave(self, wake: Callable[[], bool]) -> None:
        self._mutex.do(lambda: self._waiting.pop(wake, None))

    def _verdict(self) -> LimitVerdict:
        """Refuse calls that come before there is a part; raise once this pod decides alone."""
        if self._pods or not self.store.pods.current:
            raise StoreUnavailable("this pod decides alone")
        return LimitVerdict(float(SETTLED))

    def _wake_all(self) -> None:
        with self._mutex:
            waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()

    # Local state only

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Do nothing: the meters in memory already apply it, and only they decide."""

    def confirmed_lower(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> Steps[None]:
        """Do nothing, as in `lower`."""
        yield from ()

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> Steps[None]:
        """Do nothing: the meters in memory have already forgotten it."""
        yield from ()
