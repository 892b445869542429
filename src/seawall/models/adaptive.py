"""How many calls at once a dependency takes well, learnt from how long they take.

A limit is told of one window after another: the mean time of its calls, how many ran at once, and
whether calls were dropped (ran out of time, or were refused for overload). With `L` the limit,
`rtt` that time, `base` the time without a queue, and lg = max(1, log10 L), a window moves it so:

    Aimd        dropped, or rtt > slow_after: L * backoff; else L + 1
    Vegas       queue = ceil(L * (1 - base/rtt));
                queue <= lg: L + beta*lg;  queue < alpha*lg: L + lg;
                queue > beta*lg, or dropped: L - lg
    Gradient2   g = 1.5 * base/rtt within [0.5, 1] (0.5 if dropped); 0.8 * L + 0.2 * (g*L + 4)

Common to all: L stays within its bounds; it does not grow while less than half of it is used; and
a window with drops never trains `base`.

Why `base` is taken anew: if all calls seen had stood in a queue, the limit would take that for
normal and follow its own queue upwards. So every U(0.5, 1) * 30 windows, if the limit is in full
use, it is lowered for two windows to where no queue can be, and what calls take then is `base`.
"""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.models.backoff import Rng

REPROBE: Final = 30
"""At most so many windows pass before `base` is taken anew."""

DRAINED: Final = 0.8
"""The share of the presumed capacity at which no queue is left."""

NOISE: Final = 0.2
"""Two windows that differ by less than this share may differ by chance."""

PATIENCE: Final = 8
"""After so many windows a limit that was lowered goes up again, drained or not."""


class Limit:
    """A number of calls at once, moved by one window after another. Locking is the caller's."""

    name: ClassVar[str] = ""

    def __init__(self, initial: int, minimum: int, maximum: int) -> None:
        """Begin with `initial`, and stay from `minimum` to `maximum`."""
        self.initial = check.count("initial", initial)
        self.bound(minimum, maximum)
        if self.initial != initial:
            raise ValueError(f"initial={initial}: write a number from {minimum} to {maximum}")

    def bound(self, minimum: int, maximum: int) -> None:
        """Stay from `minimum` to `maximum` from now on."""
        check.count("minimum", minimum)
        check.count("maximum", maximum)
        if minimum > maximum:
            raise ValueError(f"minimum={minimum}: write at most the maximum, which is {maximum}")
        self.minimum, self.maximum = minimum, maximum
        self.initial = min(max(self.initial, minimum), maximum)
        self._move_to(getattr(self, "estimate", self.initial))

    def fresh(self) -> Limit:
        """Return one with the same settings that has learnt nothing yet."""
        return type(self)(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return what it was made with."""
        names = ("initial", "minimum", "maximum")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{self.name}({given})"

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """What a call is thought to take without a queue; None if that is not known or needed."""
        return None

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - the field's own signature
        """Take in a window that ended at `now`: its mean time, its use, and whether it dropped.

        `rtt` counts only without drops. `rng` gives uniform numbers.
        """
        raise NotImplementedError

    def _unused(self, in_flight: int) -> bool:
        """Tell whether so little is in flight that nothing can be learnt of a higher limit."""
        return in_flight * 2 < self.limit

    def _move_to(self, estimate: float) -> None:
        self.estimate = float(min(max(estimate, self.minimum), self.maximum))


class Aimd(Limit):
    """Add one while all is well, and back off by a factor when it is not."""

    name: ClassVar[str] = "aimd"

    def __init__(
        self, *, slow_after: float, backoff: float, initial: int, minimum: int, maximum: int
    ) -> None:
        """Take a window whose calls take more than `slow_after` on average for overload."""
        self.slow_after = check.seconds("slow_after", slow_after, infinite=True)
        self.backoff = check.ratio("backoff", backoff)
        super().__init__(initial, minimum, maximum)

    def settings(self) -> dict[str, Any]:
        """Return what it was made with."""
        return {
            "slow_after": self.slow_after,
            "backoff": self.backoff,
            **super().settings(),
        }

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - as above
        """Move by the rule of additive increase and multiplicative decrease."""
        if dropped or rtt > self.slow_after:
            self._move_to(self.estimate * self.backoff)
        elif not self._unused(in_flight):
            self._move_to(self.estimate + 1)


class Learner(Limit):
    """What Vegas and Gradient2 share: a baseline that is learnt, and taken anew in time."""

    _base: float | None = None
    _windows_left = 0.0
    _lowered_to = 0
    """The limit while a queue is to drain; 0 at other times."""
    _drained = False
    _patience = 0
    _higher: float | None = None
    """What calls took at the limit that was lowered to before, if that was too much."""
    _refilling = False
    """True in the window after that: it still sees the drained queue, and would call it growth."""

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return self._lowered_to or floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """What a call is thought to take without a queue, in seconds."""
        return self._base

    def bound(self, minimum: int, maximum: int) -> None:
        """Stay from `minimum` to `maximum` from now on."""
        super().bound(minimum, maximum)
        self._lowered_to = 0

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - as above
        """Learn the baseline, take it anew if it is time, and move by the rule."""
        if dropped:
            self._lowered_to = 0
            self._move_dropped()
            return
        if rtt <= 0:
            return
        if self._base is None:
            self._take_anew(rtt, rng)
        if self._lowered_to:
            self._drain(rtt, in_flight, rng)
            return
        if self._refilling:
            self._refilling = False
            return
        base = self._base = self._learn(rtt)
        self._windows_left -= 1
        if self._windows_left <= 0:
            calm = self._calm(rtt, self.estimate)
            if in_flight <= calm:
                self._take_anew(rtt, rng)
            elif in_flight >= self.limit and calm < self.limit:
                self._lower(calm)
                self._patience, self._higher = PATIENCE, None
                return
        if not self._unused(in_flight):
            self._move(base, rtt)

    def _calm(self, rtt: float, limit: float) -> int:
        """Return how many at once make no queue, if `limit` of them take `rtt`."""
        base = rtt if self._base is None else min(self._base, rtt)
        served = limit * base / rtt  # at a time, by Little's law
        return max(self.minimum, floor(DRAINED * served))

    def _drain(self, rtt: float, in_flight: int, rng: Rng) -> None:
        """Wait until no more than the lowered limit are in flight; believe the next window."""
        self._patience -= 1
        if not self._patience:
            self._windows_left = self._interval(rng)
        elif not self._drained:
            self._drained = in_flight <= self._lowered_to
            return
        elif self._may_hold_a_queue(rtt):
            self._lower(self._calm(rtt, self._lowered_to))
            self._higher = rtt
            return
        else:
            self._take_anew(rtt, rng)
        self._lowered_to = 0
        self._refilling = True

    def _may_hold_a_queue(self, rtt: float) -> bool:
        """Tell whether calls take longer than before although the limit is lowered, and why.

        A queue gets shorter if the limit is lowered further; a slower dependency stays as slow.
        """
        if self._base is None or rtt <= (1 + NOISE) * self._base:
            return False
        return self._higher is None or rtt < self._higher * (1 - NOISE / 2)

    def _lower(self, limit: int) -> None:
        self._lowered_to, self._drained = limit, False

    def _take_anew(self, rtt: float, rng: Rng) -> None:
        base = self._base
        self._windows_left = self._interval(rng)
        if base is None:
            self._base = rtt
            self._windows_left /= 4  # the first may have stood in a queue: look again soon
        elif abs(rtt - base) <= NOISE * base:
            self._base = (base + rtt) / 2
        else:
            self._base = rtt

    def _interval(self, rng: Rng) -> float:
        return REPROBE * (0.5 + 0.5 * rng())

    def _learn(self, rtt: float) -> float:
        """Return the baseline, now that a window took `rtt`."""
        raise NotImplementedError

    def _move(self, base: float, rtt: float) -> None:
        """Move the limit by the rule."""
        raise NotImplementedError

    def _move_dropped(self) -> None:
        """Move the limit down: calls were dropped."""
        raise NotImplementedError


class Vegas(Learner):
    """Keep a small queue at the dependency: between `alpha` and `beta` times log10 of the limit."""

    name: ClassVar[str] = "vegas"

    def __init__(
        self, *, alpha: float, beta: float, initial: int, minimum: int, maximum: int
    ) -> None:
        """Grow below `alpha`, shrink above `beta`."""
        self.alpha = check.at_least("alpha", alpha, 0)
        self.beta = check.at_least("beta", beta, 0)
        if alpha > beta:
            raise ValueError(f"alpha={alpha!r}: write at most beta, which is {beta!r}")
        super().__init__(initial, minimum, maximum)

    def settings(self) -> dict[str, Any]:
        """Return what it was made with."""
        return {"alpha": self.alpha, "beta": self.beta, **super().settings()}

    def _learn(self, rtt: float) -> float:
        """Return the least that windows took; each counts for a quarter, as it may be chance."""
        base = rtt if self._base is None else self._base
        return base + min(0.0, rtt - base) / 4

    def _move(self, base: float, rtt: float) -> None:
        queue = ceil(self.estimate * (1 - base / rtt))
        step = self._step()
        if queue <= step:
            self._move_to(self.estimate + self.beta * step)
        elif queue < self.alpha * step:
            self._move_to(self.estimate + step)
        elif queue > self.beta * step:
            self._move_to(self.estimate - step)

    def _move_dropped(self) -> None:
        self._move_to(self.estimate - self._step())

    def _step(self) -> float:
        # Below 10 the logarithm is under one, and at 1 it is nothing: the limit would never move.
        return max(1.0, log10(self.estimate))


class Gradient2(Learner):
    """Follow the ratio of what calls took over a long time to what they take now."""

    name: ClassVar[str] = "gradient2"

    TOLERANCE: ClassVar[float] = 1.5
    """Calls may take so many times longer than usual before the limit shrinks."""
    SMOOTHING: ClassVar[float] = 0.2
    ROOM: ClassVar[int] = 4
    """The queue that is allowed at any time, so that there is something to grow by."""
    LONG: ClassVar[int] = 600
    WARM_UP: ClassVar[int] = 10

    _seen = 0

    def _learn(self, rtt: float) -> float:
        """Return a moving average over 600 windows; the first ten weigh the same."""
        self._seen += 1
        base = rtt if self._base is None else self._base
        weight = 1 / self._seen if self._seen <= self.WARM_UP else 2 / (self.LONG + 1)
        base += weight * (rtt - base)
        # The dependency became twice as fast: the average forgets the slow time sooner.
        return base * 0.95 if base > 2 * rtt else base

    def _move(self, base: float, rtt: float) -> None:
        self._follow(min(1.0, max(0.5, self.TOLERANCE * base / rtt)))

    def _move_dropped(self) -> None:
        self._follow(0.5)

    def _follow(self, gradient: float) -> None:
        wanted = gradient * self.estimate + self.ROOM
        self._move_to((1 - self.SMOOTHING) * self.estimate + self.SMOOTHING * wanted)


def aimd(
    *,
    slow_after: float,
    backoff: float = 0.9,
    initial: int = 20,
    minimum: int = 1,
    maximum: int = 200,
) -> Aimd:
    """Grow by one a window; times `backoff` when calls are dropped or take over `slow_after`.

    With `slow_after=inf` only dropped calls count.
    """
    return Aimd(
        slow_after=slow_after, backoff=backoff, initial=initial, minimum=minimum, maximum=maximum
    )


def vegas(
    *,
    alpha: float = 3.0,
    beta: float = 6.0,
    initial: int = 20,
    minimum: int = 1,
    maximum: int = 1000,
) -> Vegas:
    """Keep a queue of `alpha` to `beta` times log10 of the limit at the dependency."""
    return Vegas(alpha=alpha, beta=beta, initial=initial, minimum=minimum, maximum=maximum)


def gradient2(*, initial: int = 20, minimum: int = 20, maximum: int = 200) -> Gradient2:
    """Let calls take up to 1.5 times what they usually take."""
    return Gradient2(initial=initial, minimum=minimum, maximum=maximum)
