"""Settings of a circuit breaker: when to trip, for how long, and how to recover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self, TypeVar

from seawall import _checks as check
from seawall.models.breaker.probes import NOfM, Probes, Ramp, SlowStart, single_probe
from seawall.models.windows import sample

T = TypeVar("T")

BREAK_FOR: Final = 15.0
"""Default length of a break in seconds."""


class _Fields(NamedTuple):
    consecutive: int | None
    failure_ratio: float | None
    slow_after: float | None
    slow_ratio: float | None
    window: float | None
    window_calls: int | None
    min_calls: int | None
    break_for: float | Callable[[int], float]
    probes: Probes
    probe_timeout: float


class BreakerSettings(_Fields):
    """When to trip, for how long, and how to recover. Validated and immutable.

    The trip rules are checked at each failure and each slow call, and any one suffices:
    `consecutive` failures; a `failure_ratio`; a `slow_ratio` of calls that took `slow_after` or
    longer. Ratios are computed over the last `window` seconds or the last `window_calls` calls,
    once there are `min_calls`. Without any rule, `failure_ratio=0.5` applies.

    The break lasts `break_for`, or `break_for(n)` at the n-th open without a recovery. Then
    `probes` decide. A probe that is slow, or has no result after `probe_timeout`, has failed.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        consecutive: int | None = None,
        failure_ratio: float | None = None,
        slow_after: float | None = None,
        slow_ratio: float | None = None,
        window: float | None = None,
        window_calls: int | None = None,
        min_calls: int | None = None,
        break_for: float | Callable[[int], float] = BREAK_FOR,
        probes: Probes | None = None,
        probe_timeout: float = 60.0,
    ) -> Self:
        """Validate the settings and fill in the defaults."""
        if (slow_after is None) != (slow_ratio is None):
            raise ValueError("write slow_after and slow_ratio together, such as 1.0 and 0.5")
        if consecutive is None and failure_ratio is None and slow_ratio is None:
            failure_ratio = 0.5
        if failure_ratio is not None or slow_ratio is not None:
            window, window_calls, min_calls = sample(window, window_calls, min_calls)
        elif (window, window_calls, min_calls) != (None, None, None):
            raise ValueError("window, window_calls and min_calls need failure_ratio or slow_ratio")
        probes = single_probe() if probes is None else probes
        if not isinstance(probes, NOfM | Ramp | SlowStart):
            raise TypeError(
                f"probes={probes!r}: write single_probe(), slow_start(), n_of_m(2, 3) or"
                " ramp(step=10.0)"
            )
        made = super().__new__(
            cls,
            consecutive=_unless_none(check.count, "consecutive", consecutive),
            failure_ratio=_unless_none(check.ratio, "failure_ratio", failure_ratio),
            slow_after=_unless_none(check.seconds, "slow_after", slow_after),
            slow_ratio=_unless_none(check.ratio, "slow_ratio", slow_ratio),
            window=window,
            window_calls=window_calls,
            min_calls=min_calls,
            break_for=break_for,
            probes=probes,
            probe_timeout=check.seconds("probe_timeout", probe_timeout),
        )
        made.break_after(1)
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def break_after(self, opens: int) -> float:
        """Return the length of the break at the given number of consecutive opens."""
        length = self.break_for(opens) if callable(self.break_for) else self.break_for
        return check.seconds("break_for", length)

    def replace(self, **changes: Any) -> BreakerSettings:
        """Return a copy with some settings changed, validated again."""
        fields: dict[str, Any] = self._asdict()
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


def _unless_none(checked: Callable[[str, object], T], name: str, value: object) -> T | None:
    return None if value is None else checked(name, value)
