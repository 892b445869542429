"""Settings of a circuit breaker: when to trip, for how long, and how to recover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from seawall import _checks as check
from seawall.models.breaker.probes import NOfM, Probes, Ramp, SlowStart
from seawall.models.windows import sample

BREAK_FOR: Final = 15.0  # default length of a break in seconds


@dataclass(frozen=True, kw_only=True)
class BreakerSettings:
    """When to trip, for how long, and how to recover. Validated and immutable.

    The trip rules are checked at each failure and each slow call, and any one suffices:
    `consecutive` failures; a `failure_ratio`; a `slow_ratio` of calls that took `slow_after` or
    longer. Ratios are computed over the last `window` seconds or the last `window_calls` calls,
    once there are `min_calls`. Without any rule, `failure_ratio=0.5` applies.

    The break lasts `break_for`, or `break_for(n)` at the n-th open without a recovery. Then
    `probes` decide. A probe that is slow, or has no result after `probe_timeout`, has failed.
    """

    consecutive: int | None = None
    failure_ratio: float | None = None
    slow_after: float | None = None
    slow_ratio: float | None = None
    window: float | None = None
    window_calls: int | None = None
    min_calls: int | None = None
    break_for: float | Callable[[int], float] = BREAK_FOR
    probes: Probes = None  # type: ignore[assignment]  # see `__post_init__`
    probe_timeout: float = 60.0

    def __post_init__(self) -> None:
        """Validate the settings and fill in the defaults."""
        if (self.slow_after is None) != (self.slow_ratio is None):
            raise ValueError("write slow_after and slow_ratio together, such as 1.0 and 0.5")
        fields = vars(self)  # the only way to set those of a frozen class
        sampled = self.window, self.window_calls, self.min_calls
        if self.consecutive is None and self.failure_ratio is None and self.slow_ratio is None:
            fields["failure_ratio"] = 0.5
        if self.failure_ratio is not None or self.slow_ratio is not None:
            fields["window"], fields["window_calls"], fields["min_calls"] = sample(*sampled)
        elif sampled != (None, None, None):
            raise ValueError("window, window_calls and min_calls need failure_ratio or slow_ratio")
        if self.probes is None:
            fields["probes"] = NOfM(1, 1)
        elif not isinstance(self.probes, NOfM | Ramp | SlowStart):
            raise TypeError(
                f"probes={self.probes!r}: write single_probe(), slow_start(), n_of_m(2, 3) or"
                " ramp(step=10.0)"
            )
        for name, checked in _CHECKS.items():
            if fields[name] is not None:
                fields[name] = checked(name, fields[name])
        fields["probe_timeout"] = check.seconds("probe_timeout", self.probe_timeout)
        self.break_after(1)

    def break_after(self, opens: int) -> float:
        """Return the length of the break at the given number of consecutive opens."""
        length = self.break_for(opens) if callable(self.break_for) else self.break_for
        return check.seconds("break_for", length)

    def replace(self, **changes: Any) -> BreakerSettings:
        """Return a copy with some settings changed, validated again."""
        fields: dict[str, Any] = dict(vars(self))
        if changes.get("window") is not None:
            fields["window_calls"] = None
        if changes.get("window_calls") is not None:
            fields["window"] = None
        fields |= changes
        if fields["failure_ratio"] is None and fields["slow_ratio"] is None:
            if fields["consecutive"] is None:
                raise ValueError(f"{changes}: no rule to trip by is left; write another instead")
            fields |= {"window": None, "window_calls": None, "min_calls": None} | changes
        return BreakerSettings(**fields)


_CHECKS: Final[dict[str, Callable[[str, object], float]]] = {
    "consecutive": check.count,
    "failure_ratio": check.ratio,
    "slow_after": check.seconds,
    "slow_ratio": check.ratio,
}
