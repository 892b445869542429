"""Retries under pressure: fewer for a service in trouble, none for an overloaded one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from seawall import _checks as check

ERROR_RATES: Final[Mapping[float, int]] = MappingProxyType({0.2: 2, 0.5: 1})
"""Maximum number of retries above each failure ratio."""


class Pressure:
    """Current pressure on a dependency."""

    __slots__ = (
        *("average_queue_wait", "breaker_open", "error_rate"),
        *("load", "queue_wait", "saturation"),
    )

    def __init__(
        self,
        *,
        breaker_open: bool = False,
        queue_wait: float = 0.0,
        average_queue_wait: float = 0.0,
        saturation: float = 0.0,
        error_rate: float = 0.0,
        load: float = 0.0,
    ) -> None:
        """Store the known values. Unknown ones default to no pressure.

        `queue_wait` is how long calls wait in seconds now, `average_queue_wait` on average,
        `saturation` the share of slots in use (above 1 when more calls wait), `error_rate` the
        share of recent calls that failed, `load` the highest of the observed signals.
        """
        self.breaker_open = breaker_open
        self.queue_wait = _wait("queue_wait", queue_wait)
        self.average_queue_wait = _wait("average_queue_wait", average_queue_wait)
        self.saturation = check.at_least("saturation", saturation, 0)
        self.error_rate = check.ratio("error_rate", error_rate, zero=True)
        self.load = check.at_least("load", load, 0)

    def worst(self, other: Pressure) -> Pressure:
        """Return the higher value of both in every respect."""
        higher = {name: max(getattr(self, name), getattr(other, name)) for name in self.__slots__}
        return Pressure(**higher)

    def __repr__(self) -> str:
        return (
            f"Pressure(breaker_open={self.breaker_open}, queue_wait={self.queue_wait:g}, "
            f"average_queue_wait={self.average_queue_wait:g}, saturation={self.saturation:g}, "
            f"error_rate={self.error_rate:g}, load={self.load:g})"
        )


class RetryThresholds:
    """Thresholds of pressure above which fewer or no retries are made."""

    __slots__ = ("average_queue_wait", "error_rates", "load", "queue_wait", "saturation")

    def __init__(
        self,
        *,
        queue_wait: float = 2.0,
        average_queue_wait: float = 1.0,
        saturation: float = 0.9,
        load: float = 0.9,
        error_rates: Mapping[float, int] = ERROR_RATES,
    ) -> None:
        """Make no retry above any of these.

        `error_rates` limits the retries above a share of failed calls: `{0.2: 2, 0.5: 1}` means two
        above 20 %, and one above 50 %.
        """
        self.queue_wait = _wait("queue_wait", queue_wait)
        self.average_queue_wait = _wait("average_queue_wait", average_queue_wait)
        self.saturation = check.at_least("saturation", saturation, 0)
        self.load = check.at_least("load", load, 0)
        if not isinstance(error_rates, Mapping):
            raise TypeError(
                f"error_rates={error_rates!r}: write retries by share, such as {{0.2: 2, 0.5: 1}}"
            )
        for share, retries in error_rates.items():
            check.ratio("error_rates", share, zero=True)
            check.count("error_rates", retries, minimum=0)
        self.error_rates = dict(error_rates)

    def allowed_retries(self, pressure: Pressure, maximum: int) -> int:
        """Return how many retries a call may make under `pressure`, at most `maximum`."""
        check.count("maximum", maximum, minimum=0)
        if (
            pressure.breaker_open
            or pressure.queue_wait > self.queue_wait
            or pressure.average_queue_wait > self.average_queue_wait
            or pressure.saturation > self.saturation
            or pressure.load > self.load
        ):
            return 0
        bounds = (most for share, most in self.error_rates.items() if pressure.error_rate > share)
        return min(maximum, *bounds, maximum)

    def __repr__(self) -> str:
        return (
            f"RetryThresholds(queue_wait={self.queue_wait:g}, "
            f"average_queue_wait={self.average_queue_wait:g}, saturation={self.saturation:g}, "
            f"load={self.load:g}, error_rates={self.error_rates})"
        )


def _wait(name: str, value: float) -> float:
    return check.seconds(name, value, zero=True, infinite=True)


def crowding(in_flight: int, waiting: int, limit: int, *, own: int = 0) -> float:
    """Return the share of the slots that other callers hold or wait for.

    The caller's own slot is not counted, whether it holds it (`own` is 1) or has just released it
    to try again, nor is it part of the divisor. Otherwise one of ten callers on ten slots could
    never see more than nine tenths of them in use.
    """
    others = max(0, in_flight - own) + waiting
    return others / max(1, limit - 1)
