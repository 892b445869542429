"""Backoff schedules: the delay before each retry.

With `e = min(cap, base * factor**n)`, n = 0 after the first failure, and U a uniform random number:

    jitter             delay
    "full"             U(0, e)
    "equal"            U(e/2, e)
    "none"             e
    plus_minus(f)      e * U(1-f, 1+f), so at most f above the cap

    decorrelated_jitter(base, cap)     s = min(cap, U(base, 3*s)), s starts at base

Full jitter is the default, because callers that failed together must not retry together. For the
same reason a retry never happens at the exact instant that a server named: see `above_floor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice, repeat
from typing import Literal, NamedTuple, TypeAlias

from seawall import _checks as check

LONGEST = 365 * 86_400.0  # maximum delay: one year. A longer one is a mistake, perhaps milliseconds
MOST_LISTED = 1_000  # delays in a list at most. For more, write a function of the attempt
FLOOR_SPREAD = 0.25  # maximum addition to a server's requested pause, as a fraction of that pause
Rng: TypeAlias = Callable[[], float]
"""Source of uniform random numbers in [0, 1)."""


class PlusMinus(NamedTuple):
    """Jitter around the delay: at most this fraction of it, in either direction."""

    share: float

    def __repr__(self) -> str:
        return f"plus_minus({self.share!r})"


Jitter: TypeAlias = Literal["full", "equal", "none"] | PlusMinus


class Backoff:
    """Immutable description of delays: a generator function and its arguments. Calls share it."""

    def __init__(
        self,
        name: str,
        generate: Callable[..., Iterator[float]],
        *arguments: object,
        **settings: object,
    ) -> None:
        """Describe `generate(rng, *arguments, **settings)`. `name` is used in the repr."""
        self._name = name
        self._generate = generate
        self._arguments = arguments
        self._settings = settings

    def delays(self, rng: Rng) -> Iterator[float]:
        """Start the endless schedule of one call; the longest if `rng` always returns 1.0."""
        return self._generate(rng, *self._arguments, **self._settings)

    @property
    def is_jittered(self) -> bool:
        """Whether two calls can get different delays. Always True for a user's function."""
        if self._generate is _calculated:
            return True
        low, high = self.delays(lambda: 0.0), self.delays(lambda: 1.0)
        pairs = list(islice(zip(low, high, strict=True), 2))
        return any(one != other for one, other in pairs) or not any(one for one, _ in pairs)

    def __eq__(self, other: object) -> bool:
        """Return whether both give the same delays for the same random numbers."""
        return isinstance(other, Backoff) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        arguments = [repr(argument) for argument in self._arguments]
        settings = [f"{name}={value!r}" for name, value in self._settings.items()]
        return f"{self._name}({', '.join(arguments + settings)})"

    def described(self) -> tuple[str, tuple[object, ...], dict[str, object]]:
        """Return the name of the function that creates it, and its arguments."""
        return self._name, self._arguments, dict(self._settings)

    def _identity(self) -> tuple[object, ...]:
        return self._generate, self._arguments, tuple(self._settings.items())


def full_jitter(base: float, cap: float = 30.0) -> Backoff:
    """Wait a random time up to `base`, then up to twice that, and so on up to `cap`."""
    return exponential(base, cap=cap)


def decorrelated_jitter(base: float, cap: float = 30.0) -> Backoff:
    """Wait a random time between `base` and three times the previous delay, at most `cap`."""
    base, cap = _base_and_cap(base, cap)
    return Backoff("decorrelated_jitter", _decorrelated, base, cap=cap)


def exponential(
    base: float, *, cap: float = 30.0, factor: float = 2.0, jitter: Jitter = "full"
) -> Backoff:
    """Multiply the delay by `factor` after each failure, up to `cap`."""
    base, cap = _base_and_cap(base, cap)
    factor = check.at_least("factor", factor, 1.0)
    jitter = _jitter(jitter)
    return Backoff("exponential", _exponential, base, cap=cap, factor=factor, jitter=jitter)


def linear(
    base: float, *, step: float | None = None, cap: float = 30.0, jitter: Jitter = "full"
) -> Backoff:
    """Add `step` (`base`, if not given) to the delay after each failure, up to `cap`."""
    base, cap = _base_and_cap(base, cap)
    step = base if step is None else _delay("step", step)
    return Backoff("linear", _linear, base, step=step, cap=cap, jitter=_jitter(jitter))


def constant(seconds: float, *, jitter: Jitter = "none") -> Backoff:
    """Wait the same time after each failure: exactly, unless `jitter` is given."""
    return Backoff("constant", _constant, _delay("seconds", seconds), jitter=_jitter(jitter))


def plus_minus(share: float) -> PlusMinus:
    """Return jitter that moves a delay by up to this fraction in either direction: 0.1 is 10 %."""
    return PlusMinus(check.ratio("share", share))


def above_floor(floor: float, rng: Rng) -> float:
    """Return a pause of at least `floor` seconds, and up to a quarter more.

    This rule applies to every `retry_after`, whether from a server or from a guard's refusal:
    clients that were refused together receive the same value, and must not come back together.
    """
    return floor * (1.0 + FLOOR_SPREAD * rng())


def as_backoff(value: Backoff | float | Iterable[float] | Callable[[int], float]) -> Backoff:
    """Convert a `backoff=` argument into a `Backoff`, or raise an error that says what to write.

    A number means full jitter starting at that many seconds. An iterable lists the delays; it is
    read once, immediately, and its last delay repeats. A function receives the number of the failed
    attempt, starting at 1, and returns the delay. Lists and functions get no further jitter.
    """
    if isinstance(value, Backoff):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return full_jitter(_delay("backoff", value))
    if callable(value):
        return Backoff("as_backoff", _calculated, check.plain_function("backoff", value))
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray)):
        return Backoff("as_backoff", _listed, _materialised(value))
    raise TypeError(
        f"backoff={value!r}: write seconds, such as 0.1, or full_jitter(0.1, cap=2.0), a list of "
        f"delays, or a function from the attempt's number to its delay, not {type(value).__name__}"
    )


def _exponential(
    rng: Rng, base: float, *, cap: float, factor: float, jitter: Jitter
) -> Iterator[float]:
    low, width = _spread(jitter)
    delay = base
    while True:
        yield delay * (low + width * rng())
        # Cap at every step, so that no power of `factor` can overflow.
        delay = min(cap, delay * factor)


def _linear(rng: Rng, base: float, *, step: float, cap: float, jitter: Jitter) -> Iterator[float]:
    low, width = _spread(jitter)
    for n in count():
        yield min(cap, base + n * step) * (low + width * rng())


def _constant(rng: Rng, seconds: float, *, jitter: Jitter) -> Iterator[float]:
    low, width = _spread(jitter)
    while True:
        yield seconds * (low + width * rng())


def _decorrelated(rng: Rng, base: float, *, cap: float) -> Iterator[float]:
    delay = base
    while True:
        delay = min(cap, base + (3 * delay - base) * rng())
        yield delay


def _listed(_rng: Rng, delays: tuple[float, ...]) -> Iterator[float]:
    return chain(delays, repeat(delays[-1]))


def _calculated(_rng: Rng, function: Callable[[int], float]) -> Iterator[float]:
    for attempt in count(1):
        yield _delay(f"backoff({attempt})", function(attempt))


def _spread(jitter: Jitter) -> tuple[float, float]:
    """Return the smallest factor that the jitter applies to a delay, and the width above it."""
    if isinstance(jitter, PlusMinus):
        return 1 - jitter.share, 2 * jitter.share
    return {"full": (0.0, 1.0), "equal": (0.5, 0.5), "none": (1.0, 0.0)}[jitter]


def _jitter(jitter: Jitter) -> Jitter:
    if isinstance(jitter, PlusMinus) or jitter in ("full", "equal", "none"):
        return jitter
    raise ValueError(
        f"jitter={jitter!r}: write 'full', 'equal', 'none' or plus_minus(0.1); "
        "decorrelated_jitter(base, cap=...) is a backoff of its own"
    )


def _base_and_cap(base: float, cap: float) -> tuple[float, float]:
    base, cap = _delay("base", base), _delay("cap", cap)
    if cap < base:
        raise ValueError(f"cap={cap!r} is below base={base!r}: write cap={base!r} or more")
    return base, cap


def _materialised(delays: Iterable[float]) -> tuple[float, ...]:
    # Copy the delays: all calls would share a one-shot iterator, and a list could change.
    values = tuple(islice(delays, MOST_LISTED + 1))
    if not values:
        raise ValueError("backoff is empty: write at least one delay, such as [0.1, 0.5]")
    if len(values) > MOST_LISTED:
        raise ValueError(
            f"backoff has over {MOST_LISTED} delays: write a function from the attempt's number "
            "to its delay, such as lambda attempt: 0.1 * attempt"
        )
    return tuple(_delay(f"backoff[{index}]", value) for index, value in enumerate(values))


def _delay(name: str, value: object) -> float:
    delay = check.seconds(name, value, zero=True)
    if delay > LONGEST:
        raise ValueError(f"{name}={value!r}: write at most {LONGEST:.0f} seconds, a year")
    return delay
