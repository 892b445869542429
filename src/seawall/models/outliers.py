"""Which of several hosts to ask no more for a while, since it does worse than it should.

A host is ejected by failures in a row, by its share of failures, or for doing worse than the others
by more than their own differences and chance explain. The time of an ejection grows with each one,
up to a bound, and shrinks again with good behaviour. Never more than a share of the hosts is out at
once, and never the last one: when many are bad at the same time, it is not the hosts.

`now` is any number that grows, in the unit of the settings. One caller at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final, NamedTuple

from seawall import _checks as check
from seawall.models.windows import FAILED, TimeWindow

OTHERS: Final = 2
"""A host is compared with no fewer others than these."""

MARGIN: Final = 0.05
"""A host whose success ratio is less than this below the others' is not worse, only unlucky."""

LOOKS: Final = 10
"""How often, in a time of `window`, hosts are compared with each other."""


class Outliers:
    """When a host is ejected, and for how long; None switches a rule off."""

    __slots__ = (
        "consecutive",
        "deviations",
        "eject_for",
        "failure_ratio",
        "max_eject_for",
        "max_ejected",
        "min_calls",
        "window",
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

        From `min_calls` on: by a share of `failure_ratio`, or with a success ratio that is
        `deviations` standard deviations below the mean of the other hosts. The first ejection
        lasts `eject_for` seconds, the second twice as long, up to `max_eject_for`; for each
        `eject_for` in service one is forgiven. At most `max_ejected` of the hosts are out.
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
        """Return how long the ejection lasts that makes so many."""
        return min(self.eject_for * ejections, self.max_eject_for)

    def most_out(self, hosts: int) -> int:
        """Return how many of `hosts` may be out at once; never all."""
        return share_of(self.max_ejected, hosts)


def share_of(share: float, hosts: int) -> int:
    """Return how many of `hosts` are at most that `share` of them; never all."""
    return max(0, min(int(share * hosts + 1e-9), hosts - 1))


class ActionBound:
    """The most members of a group that one action may take at once, and never all of them.

    A failure detector may be wrong about everybody at the same moment, when it is the network or
    this process that fails. Then the bound keeps the harm small. One caller at a time.
    """

    __slots__ = ("acted_on", "held_back", "most", "times_held_back")

    def __init__(self, most: float = 1 / 3) -> None:
        """Act on at most the share `most`, rounded down."""
        self.most = check.ratio("most", most, zero=True)
        self.acted_on: tuple[str, ...] = ()
        self.held_back: tuple[str, ...] = ()
        """Members that would be acted on if there were room."""
        self.times_held_back = 0
        """How often a member began to be held back."""

    def __repr__(self) -> str:
        acted, held = len(self.acted_on), len(self.held_back)
        return f"ActionBound({self.most:g}): {acted} acted on, {held} held back"

    @property
    def text(self) -> str:
        """The bound as it was given, for messages."""
        return f"most={self.most:.3g}"

    def choose(self, wanted: Iterable[str], total: int, room: int | None = None) -> tuple[str, ...]:
        """Return the first of `wanted` that may be acted on, in a group of `total`.

        `room` is a second bound, if there is one. Whoever was chosen before and is not chosen now
        is to be let go.
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
        """Return whom the action applies to, and whom it would apply to without the bound."""
        return {
            "most": self.most,
            "acted_on": list(self.acted_on),
            "held_back": list(self.held_back),
            "times_held_back": self.times_held_back,
        }


class Ejection(NamedTuple):
    """A host is out, for so many seconds."""

    cause: str
    seconds: float


class Record:
    """How one host has done. What was begun in an older `generation` counts for nothing."""

    __slots__ = ("ejections", "generation", "since", "streak", "until", "window")

    def __init__(self, settings: Outliers, now: float) -> None:
        """Be in service since `now`, with a clean record."""
        self.generation = 0
        self.streak = 0
        """Failures in a row."""
        self.ejections = 0
        """Ejections that are not forgiven yet."""
        self.since = now
        """When it came into service, or was ejected."""
        self.until: float | None = None
        """When its ejection ends."""
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
        """Go out of service; returns for how long."""
        served = max(0.0, now - self.since)
        forgiven = int(min(served / settings.eject_for, self.ejections))
        self.ejections += 1 - forgiven
        seconds = settings.lasts(self.ejections)
        self.generation += 1
        self.since = now
        self.until = now + seconds
        return seconds

    def restore(self, settings: Outliers, now: float) -> None:
        """Come back into service, with a clean record but for the ejections."""
        self.generation += 1
        # Its time was over then, even if nobody looked.
        self.since = now if self.until is None else min(now, self.until)
        self.until = None
        self.streak = 0
        self.window = TimeWindow(settings.window)


class OutlierModel:
    """The judge of a set of hosts: tell it each failure, right after `Record.failed`."""

    __slots__ = ("_next_look", "settings")

    def __init__(self, settings: Outliers) -> None:
        self.settings = settings
        self._next_look = float("-inf")

    def judge(
        self, record: Record, records: Iterable[Record], out: int, now: float
    ) -> Ejection | None:
        """Eject the host of `record` if a rule says so and there is room, or return None.

        `records` are those of all hosts; `out` of these are out of service already, for whatever
        reason, and `record` is not among them.
        """
        everyone = list(records)
        if record.until is not None or out + 1 > self.settings.most_out(len(everyone)):
            return None
        cause = self._cause(record, everyone, now)
        return None if cause is None else Ejection(cause, record.eject(self.settings, now))

    def _cause(self, record: Record, everyone: list[Record], now: float) -> str | None:
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
        # Looking at all hosts with each failure would cost most when there is least time for it.
        self._next_look = now + s.window / LOOKS
        others = [
            1 - totals.failures / totals.calls
            for other in everyone
            if other is not record and other.until is None
            for totals in (other.window.totals(now),)
            if totals.calls >= s.min_calls
        ]
        own = 1 - failures / calls
        if len(others) >= OTHERS and own < worst_normal(others, calls, s.deviations):
            return f"{failures} of {calls} calls failed, more than elsewhere"
        return None


def worst_normal(others: list[float], calls: int, deviations: float) -> float:
    """Return the lowest success ratio that is still normal beside those of `others`.

    The host itself is not part of the mean: among five hosts none could ever be two standard
    deviations below a mean that it lowers itself. How far a ratio of so few `calls` goes by
    chance alone is allowed for.
    """
    mean = sum(others) / len(others)
    spread = sum((ratio - mean) ** 2 for ratio in others) / len(others)
    chance = mean * (1 - mean) / calls
    return mean - max(MARGIN, deviations * sqrt(spread + chance))


class Checked:
    """What the active checks say of one host: it needs several of one kind to change its mind."""

    __slots__ = ("failing", "streak")

    def __init__(self) -> None:
        """Believe that it is well, until checks say otherwise."""
        self.failing = False
        self.streak = 0
        """Results in a row that contradict `failing`."""

    def take(self, *, passed: bool, failures: int, successes: int) -> bool:
        """Take in a result; True if that changed `failing`: by so many in a row."""
        if passed is not self.failing:
            self.streak = 0
            return False
        self.streak += 1
        if self.streak < (successes if self.failing else failures):
            return False
        self.failing = not self.failing
        self.streak = 0
        return True
