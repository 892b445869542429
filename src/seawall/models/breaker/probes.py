"""Recovery of a circuit breaker: length of the break, admission of probes, and their verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from seawall import _checks as check


class CallVerdict(Enum):
    """What a finished call says: NONE if it was cancelled or never reached the dependency."""

    SUCCESS = "success"
    FAILURE = "failure"
    NONE = "none"


class Countdown:
    """A time span that a clock set back can lengthen, but never shorten.

    If the clock is set back by more than the whole span, the span starts again in full. Otherwise
    it could last indefinitely.
    """

    __slots__ = ("_length", "_until")

    def __init__(self, length: float, now: float) -> None:
        self._length = length
        self._until = now + length

    def left(self, now: float) -> float:
        """Return how long to wait, so as never to be early; 0 once it is over."""
        left = self._until - now
        if left <= 0:
            return 0
        if left > 2 * self._length:
            self._until = now + self._length
            left = self._length
        if now + left < self._until:  # rounding of the float's last bit
            left += self._until - (now + left)
        return left


_OVER = Countdown(0.0, float("-inf"))


@dataclass(frozen=True, repr=False, slots=True)
class Growing:
    """Break lengths that grow with each open; see `growing`."""

    base: float
    factor: float
    cap: float

    def __repr__(self) -> str:
        return f"growing({self.base:g}, factor={self.factor:g}, cap={self.cap:g})"

    def __call__(self, opens: int) -> float:
        """Return the break after the given number of opens without a recovery, 1 for the first."""
        try:
            return min(self.cap, self.base * self.factor ** (opens - 1))
        except OverflowError:
            return self.cap


def growing(base: float, *, factor: float = 2.0, cap: float = 300.0) -> Callable[[int], float]:
    """Make each consecutive break `factor` times as long: `base` first, at most `cap`."""
    base, cap = check.seconds("base", base), check.seconds("cap", cap)
    if cap < base:
        raise ValueError(f"cap={cap!r} is below base={base!r}: write cap={base!r} or more")
    return Growing(base, check.at_least("factor", factor, 1), cap)


class Probe:
    """The ticket of a call that was admitted while half-open."""

    __slots__ = ("generation", "hung", "stage", "started")

    def __init__(self, generation: int, started: float, timeout: float, stage: int) -> None:
        self.generation = generation
        self.started = started
        self.hung = Countdown(timeout, started)
        self.stage = stage

    def __repr__(self) -> str:
        return f"Probe(generation={self.generation}, started={self.started!r})"


class Trial:
    """One half-open generation: the running probes and the results of the finished ones."""

    def __init__(self, generation: int, timeout: float) -> None:
        self._generation = generation
        self._timeout = timeout
        self._out: dict[Probe, None] = {}
        self._stage = 0
        self._successes = 0
        self._failures = 0

    def admit(self, now: float) -> Probe | None:
        """Admit a call as a probe, or return None."""
        probe = Probe(self._generation, now, self._timeout, self._stage)
        if not self._has_room(now):
            return None
        # Call nothing between the count in `_has_room` and this line: an exception raised by a
        # signal handler there would lose a permit.
        self._out[probe] = None
        return probe

    def settle(self, probe: Probe, verdict: CallVerdict, now: float) -> CallVerdict:
        """Record the end of a probe and return the verdict of the trial so far.

        A probe without a verdict gives its permit back. A probe that was given up as hung has
        already been counted.
        """
        if probe not in self._out:
            return CallVerdict.NONE
        del self._out[probe]
        if verdict is CallVerdict.NONE:
            self._give_back(probe)
        elif not self._counts(probe):
            pass
        elif verdict is CallVerdict.SUCCESS:
            self._successes += 1
        else:
            self._failures += 1
        return self._shown(now)

    def review(self, now: float) -> CallVerdict:
        """Give up hung probes as failed and return the verdict of the trial so far."""
        while self._out:
            oldest = next(iter(self._out))
            if oldest.hung.left(now) > 0:
                break
            del self._out[oldest]
            self._failures += self._counts(oldest)
        return self._shown(now)

    def _counts(self, _probe: Probe, /) -> bool:
        return True

    def _has_room(self, now: float, /) -> bool:
        raise NotImplementedError

    def _give_back(self, probe: Probe) -> None:
        """Undo what `_has_room` counted for this probe."""

    def _shown(self, now: float, /) -> CallVerdict:
        raise NotImplementedError


class _CountedTrial(Trial):
    def __init__(self, plan: NOfM, generation: int, timeout: float) -> None:
        super().__init__(generation, timeout)
        self._plan = plan

    def _has_room(self, _now: float, /) -> bool:
        return len(self._out) + self._successes + self._failures < self._plan.m

    def _shown(self, _now: float, /) -> CallVerdict:
        if self._failures > self._plan.m - self._plan.n:
            return CallVerdict.FAILURE
        return CallVerdict.SUCCESS if self._successes >= self._plan.n else CallVerdict.NONE


class _RampTrial(Trial):
    def __init__(
        self, plan: Ramp, generation: int, timeout: float, threshold: float, now: float
    ) -> None:
        super().__init__(generation, timeout)
        self._plan = plan
        self._threshold = threshold
        self._stage = -1
        self._begin_stage(now)

    def _begin_stage(self, now: float) -> None:
        step = Countdown(self._plan.step, now)
        # Nothing is called from here on, so a signal cannot interrupt a stage change halfway.
        self._step = step
        self._stage += 1
        self._offered = self._admitted = 0
        self._successes = self._failures = 0

    def _has_room(self, _now: float, /) -> bool:
        room = self._admitted <= self._offered * self._plan.shares[self._stage]
        self._offered += 1
        self._admitted += room
        return room

    def _give_back(self, probe: Probe) -> None:
        if probe.stage == self._stage:
            self._admitted -= 1

    def _shown(self, now: float, /) -> CallVerdict:
        finished = self._successes + self._failures
        if self._failures and self._failures / finished >= self._threshold:
            return CallVerdict.FAILURE
        if self._successes and self._step.left(now) <= 0:
            if self._stage + 1 == len(self._plan.shares):
                return CallVerdict.SUCCESS
            self._begin_stage(now)
        return CallVerdict.NONE


class _SlowStartTrial(Trial):
    """A trial whose stage k runs up to 2**k calls at once and ends with 2**k verdicts of its own.

    A stage that refused no call is large enough: it is repeated until the trial is over. Slower
    answers make longer stages, so the load grows no faster than the dependency answers.
    """

    def __init__(
        self, plan: SlowStart, generation: int, timeout: float, threshold: float, now: float
    ) -> None:
        super().__init__(generation, timeout)
        self._plan = plan
        self._threshold = threshold
        self._refused = False  # whether this stage refused a call
        self._quiet = Countdown(plan.step, now)  # time since the last refusal
        self._latest = self._quiet  # time since the last probe started
        self._latest_at = now

    def _has_room(self, now: float, /) -> bool:
        again = Countdown(self._plan.step, now)
        # A hung probe may have started before the recovery: after `step`, try another. The permit
        # of a failed call is not reused: the dependency may still be working on a call that timed
        # out.
        free = len(self._out) + self._failures < 2**self._stage
        room = free or self._latest.left(now) <= 0
        if room:
            self._latest, self._latest_at = again, now
        else:
            self._quiet, self._refused = again, True
        return room

    def _give_back(self, probe: Probe) -> None:
        if probe.started == self._latest_at:
            self._latest = _OVER

    def _counts(self, probe: Probe, /) -> bool:
        return probe.stage == self._stage

    def _shown(self, now: float, /) -> CallVerdict:
        size = 2**self._stage
        if self._failures / size >= self._threshold:
            return CallVerdict.FAILURE
        if self._successes + self._failures < size:
            return CallVerdict.NONE
        if not self._refused and self._quiet.left(now) <= 0:
            return CallVerdict.SUCCESS
        # Nothing is called from here on, so a signal cannot interrupt a stage change halfway.
        if self._refused and self._failures / size < self._threshold / 2:
            self._stage += 1
        self._successes = self._failures = 0
        self._refused = False
        return CallVerdict.NONE


class NOfM(NamedTuple):
    """Close after n successes of at most m probes; see `n_of_m`."""

    n: int
    m: int

    def __repr__(self) -> str:
        return "single_probe()" if self.m == 1 else f"n_of_m({self.n}, {self.m})"

    def begin(self, generation: int, timeout: float, _threshold: float, _now: float, /) -> Trial:
        """Start a half-open generation."""
        return _CountedTrial(self, generation, timeout)


class Ramp(NamedTuple):
    """Admit a growing share of the calls; see `ramp`."""

    shares: tuple[float, ...]
    step: float

    def __repr__(self) -> str:
        return f"ramp({self.shares}, step={self.step:g})"

    def begin(self, generation: int, timeout: float, threshold: float, now: float, /) -> Trial:
        """Start a half-open generation."""
        return _RampTrial(self, generation, timeout, threshold, now)


class SlowStart(NamedTuple):
    """Double the number of concurrent probes at each stage; see `slow_start`."""

    step: float

    def __repr__(self) -> str:
        return f"slow_start(step={self.step:g})"

    def begin(self, generation: int, timeout: float, threshold: float, now: float, /) -> Trial:
        """Start a half-open generation."""
        return _SlowStartTrial(self, generation, timeout, threshold, now)


Probes: TypeAlias = NOfM | Ramp | SlowStart


def single_probe() -> Probes:
    """Admit one call: its success closes the breaker, its failure opens it again."""
    return NOfM(1, 1)


def n_of_m(n: int, m: int) -> Probes:
    """Admit `m` calls: `n` successes close the breaker; if too many fail, it opens again."""
    check.count("n", n)
    if check.count("m", m) < n:
        raise ValueError(f"n_of_m({n}, {m}): of {m} probes {n} cannot succeed; write n <= m")
    return NOfM(n, m)


def ramp(shares: Sequence[float] = (0.01, 0.05, 0.25), *, step: float) -> Probes:
    """Admit a growing share of the calls, stage by stage, then all of them.

    A stage lasts at least `step`, and until it has seen a success. Its first call is always
    admitted. Once the share of failures reaches the breaker's `failure_ratio` (0.5 if it has none),
    the breaker opens again.
    """
    if not isinstance(shares, Sequence):
        raise TypeError(f"shares={shares!r}: write growing shares, such as (0.01, 0.05, 0.25)")
    checked = tuple(check.ratio("shares", share) for share in shares)
    if not checked or any(low >= high for low, high in pairwise(checked)):
        raise ValueError(f"shares={shares!r}: write growing shares, such as (0.01, 0.05, 0.25)")
    return Ramp(checked, check.seconds("step", step))


def slow_start(*, step: float = 0.5) -> Probes:
    """Admit one call, and as they succeed two at once, then four, eight, and so on.

    A stage ends when as many of its calls have a verdict as it allows at once. Once the share of
    failures among them reaches the breaker's `failure_ratio` (0.5 if it has none), the breaker
    opens again. It closes after a stage that refused no call, if no call was refused for `step`. If
    calls hang, one more is admitted every `step`.
    """
    return SlowStart(check.seconds("step", step))
