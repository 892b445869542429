"""Outlier ejection: stop using a host for a while if it does worse than it should.

A host is ejected because of consecutive failures, its failure ratio, or doing worse than the others
by more than their own differences and chance explain. Ejections become longer each time, up to a
bound, and shorter again with good behaviour. Only a limited share of the hosts is ejected at once,
and never the last one: when many are bad at the same time, the hosts are not the cause.

`now` is any growing number, in the unit of the settings. Callers must serialise access.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

from seawall import _checks as check
from seawall.models.windows import FAILED, TimeWindow

OTHERS: Final = 2  # minimum number of other hosts to compare a host with
MARGIN: Final = 0.05  # difference in success ratio below which a host counts as unlucky, not worse
LOOKS: Final = 10  # number of comparisons between hosts per `window`


class Outliers:
    """When a host is ejected, and for how long. None switches a rule off."""

    __slots__ = (
        *("consecutive", "deviations", "eject_for", "failure_ratio", "max_eject_for"),
        *("max_ejected", "min_calls", "window"),
    )

    def __init__(
        self,
        *,
        consecutive: int | None = 5,
        failure_ratio: float | None = 0.5,
        deviations: float | None = 3.0,
        window: float = 30.0,
        min_calls: int = 20,
        eject_for: float = 10.0,
        max_eject_for: float = 300.0,
        max_ejected: float = 0.5,
    ) -> None:
        """Eject by `consecutive` failures, or by those of the last `window` seconds.

        After at least `min_calls`, a host is ejected at a failure ratio of `failure_ratio`, or if
        its success ratio is `deviations` standard deviations below the mean of the other hosts. The
        first ejection lasts `eject_for` seconds, the second twice as long, and so on up to
        `max_eject_for`. Each `eject_for` in service forgives one ejection. At most the share
        `max_ejected` of the hosts is ejected at once.
        """
        self.consecutive = None if consecutive is None else check.count("consecutive", consecutive)
        self.failure_ratio = (
            None if failure_ratio is None else check.ratio("failure_ratio", failure_ratio)
        )
        self.deviations = (
            None if deviations is None else check.at_least("deviations", deviations, 1.0)
        )
        self.window = check.seconds("window", window)
        self.min_calls = check.count("min_calls", min_calls)
        self.eject_for = check.seconds("eject_for", eject_for)
        self.max_eject_for = check.seconds("max_eject_for", max_eject_for)
        if self.max_eject_for < self.eject_for:
            raise ValueError(
                f"max_eject_for={max_eject_for!r}: write eject_for={eject_for!r} or more"
            )
        self.max_ejected = check.ratio("max_ejected", max_ejected, zero=True)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"Outliers({given})"

    def lasts(self, ejections: int) -> float:
        """Return the duration of the ejection with this number."""
        return min(self.eject_for * ejections, self.max_eject_for)

    def most_out(self, hosts: int) -> int:
        """Return how many of `hosts` may be ejected at once. Never all."""
        return share_of(self.max_ejected, hosts)


def share_of(share: float, hosts: int) -> int:
    """Return how many of `hosts` make up at most that `share`. Never all."""
    return max(0, min(int(share * hosts + 1e-9), hosts - 1))


class ActionBound:
    """Limit on how many members of a group an action may affect at once, and never all of them.

    A failure detector may be wrong about all members at the same moment, when the network or this
    process fails. Then the limit keeps the harm small. Callers must serialise access.
    """

    __slots__ = ("acted_on", "held_back", "most", "times_held_back")

    def __init__(self, most: float = 1 / 3) -> None:
        self.most = check.ratio("most", most, zero=True)
        self.acted_on: tuple[str, ...] = ()
        self.held_back: tuple[str, ...] = ()  # members that would be acted on if there were room
        self.times_held_back = 0  # number of times a member began to be held back

    def __repr__(self) -> str:
        acted, held = len(self.acted_on), len(self.held_back)
        return f"ActionBound({self.most:g}): {acted} acted on, {held} held back"

    @property
    def text(self) -> str:
        """The bound as it was given, for messages."""
        return f"most={self.most:.3g}"

    def choose(self, wanted: Iterable[str], total: int, room: int | None = None) -> tuple[str, ...]:
        """Return the first of `wanted` that may be acted on, in a group of `total`.

        `room` is an optional second limit. The caller must release members that were chosen before
        and are not chosen now.
        """
        listed = tuple(dict.fromkeys(wanted))
        most = share_of(self.most, total)
        if room is not None:
            most = max(0, min(most, room))
        self.acted_on, held_back = listed[:most], listed[most:]
        self.times_held_back += len(set(held_back).difference(self.held_back))
        self.held_back = held_back
        return self.acted_on

    def snapshot(self) -> dict[str, object]:
        """Return the members that the action applies to, and those held back by the limit."""
        return {
            "most": self.most,
            "acted_on": list(self.acted_on),
            "held_back": list(self.held_back),
            "times_held_back": self.times_held_back,
        }


class Ejection(NamedTuple):
    """The ejection of a host for a number of seconds."""

    cause: str
    seconds: float


class HostRecord:
    """Record of one host. Calls that began in an older `generation` do not count."""

    def __init__(self, settings: Outliers, now: float) -> None:
        self.generation = 0
        self.streak = 0  # number of consecutive failures
        self.ejections = 0  # number of ejections that are not forgiven yet
        self.since = now  # when the host entered service or was ejected
        self.until: float | None = None  # when the ejection ends, or None
        self.window = TimeWindow(settings.window)

    def succeeded(self, now: float) -> None:
        """Count a success."""
        self.streak = 0
        self.window.success(now)

    def failed(self, now: float) -> None:
        """Count a failure."""
        self.streak += 1
        self.window.add(FAILED, now)

    def eject(self, settings: Outliers, now: float) -> float:
        """Take the host out of service and return for how long."""
        served = max(0.0, now - self.since)
        forgiven = int(min(served / settings.eject_for, self.ejections))
        self.ejections += 1 - forgiven
        seconds = settings.lasts(self.ejections)
        self.generation += 1
        self.since = now
        self.until = now + seconds
        return seconds

    def restore(self, settings: Outliers, now: float) -> None:
        """Put the host back into service with a clean record, except for its ejections."""
        self.generation += 1
        # Its ejection ended at that time, even if it was only noticed now.
        self.since = now if self.until is None else min(now, self.until)
        self.until = None
        self.streak = 0
        self.window = TimeWindow(settings.window)


class OutlierModel:
    """Outlier detection for a set of hosts. Call `judge` after each `Record.failed`."""

    def __init__(self, settings: Outliers) -> None:
        self.settings = settings
        self._next_look = float("-inf")

    def judge(
        self, record: HostRecord, records: Iterable[HostRecord], out: int, now: float
    ) -> Ejection | None:
        """Eject the host of `record` if a rule says so and there is room, or return None.

        `records` are those of all hosts. `out` of these are already out of service for any reason,
        and `record` is not among them.
        """
        everyone = list(records)
        if record.until is not None or out + 1 > self.settings.most_out(len(everyone)):
            return None
        cause = self._cause(record, everyone, now)
        return None if cause is None else Ejection(cause, record.eject(self.settings, now))

    def _cause(self, record: HostRecord, everyone: list[HostRecord], now: float) -> str | None:
        s = self.settings
        if s.consecutive is not None and record.streak >= s.consecutive:
            return f"{record.streak} failures in a row"
        calls, failures, _ = record.window.totals(now)
        if calls < s.min_calls:
            return None
        if s.failure_ratio is not None and failures / calls >= s.failure_ratio:
            return f"{failures} of {calls} calls failed"
        if s.deviations is None or now < self._next_look:
            return None
        # Comparing all hosts at each failure would cost most when there is least time for it.
        self._next_look = now + s.window / LOOKS
        serving = (one for one in everyone if one is not record and one.until is None)
        totals = (one.window.totals(now) for one in serving)
        others = [1 - one.failures / one.calls for one in totals if one.calls >= s.min_calls]
        own = 1 - failures / calls
        if len(others) >= OTHERS and own < worst_normal(others, calls, s.deviations):
            return f"{failures} of {calls} calls failed, more than elsewhere"
        return None


def worst_normal(others: list[float], calls: int, deviations: float) -> float:
    """Return the lowest success ratio that is still normal compared with `others`.

    The host itself is not part of the mean: among five hosts none could ever be two standard
    deviations below a mean that it lowers itself. The result allows for the random variation of a
    ratio over `calls` calls.
    """
    mean = sum(others) / len(others)
    spread = sum((ratio - mean) ** 2 for ratio in others) / len(others)
    chance = mean * (1 - mean) / calls
    return mean - max(MARGIN, deviations * sqrt(spread + chance))


@dataclass
class Checked:
    """Result of the active checks of one host. Several equal results are needed to change it."""

    failing: bool = False
    streak: int = 0  # number of consecutive results that contradict `failing`

    def take(self, *, passed: bool, failures: int, successes: int) -> bool:
        """Record a result. Return whether enough of them in a row have changed `failing`."""
        if passed is not self.failing:
            self.streak = 0
            return False
        self.streak += 1
        if self.streak < (successes if self.failing else failures):
            return False
        self.failing = not self.failing
        self.streak = 0
        return True
