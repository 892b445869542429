"""What became of a run: goodput, latency, load, recovery, and a verdict in words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.sim.records import OUTCOMES, ClientRecord, Disturbance, GuardRecord, ServiceRecord

NORMAL: Final = 0.95  # share of the usual service from which a world counts as well
WINDOW: Final = 5.0  # seconds over which a share is taken to judge whether a world is well
DOWN: Final = 0.1  # share of good answers below which a world is down, and not only degraded
OVERLOAD: Final = 1.2  # offered load in units of capacity from which a verdict speaks of overload
HELD: Final = 0.5  # share of its capacity that an overloaded world must serve not to have collapsed
VerdictKind = Literal["unaffected", "recovers", "degraded", "stays down", "collapses", "holds"]


class Verdict(NamedTuple):
    """How a run ended, in one word and in one sentence."""

    kind: VerdictKind
    text: str
    recovery: float
    """Seconds from the end of the last disturbance; infinite if it never recovered."""

    def __str__(self) -> str:
        return self.text


class SimulationResult:
    """The records of one run, and what can be asked of them.

    Times are in seconds from the beginning; `until=None` means the end. Calls of all clients count,
    unless the name of one group is given.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        step: float,
        *,
        clients: Sequence[ClientRecord],
        services: Sequence[ServiceRecord],
        guards: Sequence[GuardRecord],
        disturbances: Sequence[Disturbance],
        steps: int,
    ) -> None:
        self.name = name
        self.seed = seed
        self.step = step
        self.steps = steps
        self.clients = {record.name: record for record in clients}
        self.services = {record.name: record for record in services}
        self.guards = {record.name: record for record in guards}
        self.disturbances = tuple(disturbances)

    def __repr__(self) -> str:
        return f"<SimulationResult {self.name!r}, seed {self.seed}: {self.verdict}>"

    @property
    def seconds(self) -> float:
        """How long the run was."""
        return self.steps * self.step

    # What clients got

    def came(self, since: float = 0.0, until: float | None = None, *, of: str | None = None) -> int:
        """Return how many calls came."""
        span = self._span(since, until)
        return sum(sum(record.came[span]) for record in self._groups(of))

    def ended(
        self, outcome: str, since: float = 0.0, until: float | None = None, *, of: str | None = None
    ) -> int:
        """Return how many calls ended like that: one of `OUTCOMES`."""
        check.choice("outcome", outcome, OUTCOMES)
        span = self._span(since, until)
        return sum(sum(record.ended[outcome][span]) for record in self._groups(of))

    def goodput(
        self, since: float = 0.0, until: float | None = None, *, of: str | None = None
    ) -> float:
        """Return real answers a second, by the second in which their callers came."""
        span = self._span(since, until)
        seconds = len(range(*span.indices(self.steps))) * self.step
        return self.ended("ok", since, until, of=of) / seconds

    def share(
        self, since: float = 0.0, until: float | None = None, *, of: str | None = None
    ) -> float:
        """Return the share of calls that got a real answer; 1 if none came."""
        came = self.came(since, until, of=of)
        return self.ended("ok", since, until, of=of) / came if came else 1.0

    def answered(
        self, since: float = 0.0, until: float | None = None, *, of: str | None = None
    ) -> float:
        """Return the share of calls that got an answer, real or degraded; 1 if none came."""
        came = self.came(since, until, of=of)
        lesser = self.ended("degraded", since, until, of=of)
        return (self.ended("ok", since, until, of=of) + lesser) / came if came else 1.0

    def quantile(
        self, p: float, since: float = 0.0, until: float | None = None, *, of: str | None = None
    ) -> float:
        """Return what a share `p` of the real answers took at most; 0 if there were none."""
        check.ratio("p", p, zero=True)
        span = self._span(since, until)
        by_step = chain.from_iterable(g.latencies[span] for g in self._groups(of))
        took = sorted(chain.from_iterable(by_step))
        return took[min(len(took) - 1, int(p * len(took)))] if took else 0.0

    def load(self, service: str, since: float = 0.0, until: float | None = None) -> float:
        """Return calls a second that reached the service of that name."""
        span = self._span(since, until)
        calls = self.services[service].calls[span]
        return sum(calls) / (len(calls) * self.step)

    # How it ended

    @property
    def trouble(self) -> tuple[float, float] | None:
        """From when to when the world was disturbed; None if it was not."""
        if not self.disturbances:
            return None
        begin = min(one.at for one in self.disturbances)
        end = max(one.at if one.until == inf else one.until for one in self.disturbances)
        return begin, min(end, self.seconds)

    @property
    def usual(self) -> float:
        """The share of good answers before the first disturbance; of the whole run without one."""
        begin = self.seconds if self.trouble is None else self.trouble[0]
        return self.share(0.0, begin) if begin >= self.step else 1.0

    def recovery(self, share: float | None = None) -> float:
        """Return the seconds from the end of the disturbance until calls are served as usual.

        From then on, `share` of them get real answers (95 % of the usual share, if not given): over
        the next five seconds, and over all the time that is left. Infinite if that never happens.
        """
        end = 0.0 if self.trouble is None else self.trouble[1]
        least = NORMAL * self.usual if share is None else check.ratio("share", share)
        first = int(end / self.step)
        width = max(1, round(WINDOW / self.step))
        good = _per_step([group.ended["ok"] for group in self.clients.values()], self.steps)
        came = _per_step([group.came for group in self.clients.values()], self.steps)
        recovered = inf
        good_left = came_left = 0
        # Backwards, so that what is left is a running sum.
        for index in range(self.steps - 1, first - 1, -1):
            good_left += good[index]
            came_left += came[index]
            near = slice(index, index + width)
            if index + width > self.steps:
                continue
            is_well = sum(good[near]) >= least * sum(came[near])
            if is_well and good_left >= least * came_left:
                recovered = max(0.0, index * self.step - end)
        return recovered

    @property
    def verdict(self) -> Verdict:
        """How it ended, in words."""
        collapsed = self._overload()
        if collapsed is not None:
            return collapsed
        if self.trouble is None:
            return self._calm()
        recovery = self.recovery()
        if recovery < inf:
            if self._worst() >= NORMAL * self.usual:
                text = f"unaffected: at least {_percent(self._worst())} of the calls served"
                return Verdict("unaffected", text, 0.0)
            text = f"{_recovers(recovery)}; {_percent(self._worst())} of the calls served at worst"
            return Verdict("recovers", text, recovery)
        late = max(self.trouble[1], self.seconds - 2 * WINDOW)
        tail = self.share(min(late, self.seconds - self.step))
        if tail < DOWN:
            text = f"stays down: {_percent(tail)} of the calls served at the end"
            return Verdict("stays down", text, inf)
        text = f"does not recover: {_percent(tail)} of the calls served at the end"
        return Verdict("degraded", text, inf)

    def _calm(self) -> Verdict:
        share = self.share()
        if share >= NORMAL:
            return Verdict("unaffected", f"serves {100 * share:.1f} % of the calls", 0.0)
        kind: VerdictKind = "stays down" if self.share(self.seconds / 2) < DOWN else "degraded"
        return Verdict(kind, f"serves only {100 * share:.1f} % of the calls", inf)

    def _worst(self) -> float:
        """Return the least share of good answers over any five seconds since the trouble began."""
        begin = 0.0 if self.trouble is None else self.trouble[0]
        width = max(1, round(WINDOW / self.step))
        firsts = range(int(begin / self.step), self.steps - width + 1)
        shares = (self.share(one * self.step, (one + width) * self.step) for one in firsts)
        return min(shares, default=1.0)

    def _overload(self) -> Verdict | None:
        """Judge a run in which nothing broke, but more calls came than a service can serve."""
        if any(not one.is_load for one in self.disturbances):
            return None
        width = max(1, round(WINDOW / self.step))
        firsts = range(self.steps - width + 1)
        spans = [(first * self.step, (first + width) * self.step) for first in firsts]
        loads = [self._fullest(*span) for span in spans]
        over = [index for index, load in enumerate(loads) if load >= OVERLOAD]
        if not over:
            return None
        served = {index: loads[index] * self.share(*spans[index]) for index in over}
        worst = min(over, key=lambda index: served[index])
        recovery = self.recovery()
        ending = "" if not self.disturbances else f", and {_recovers(recovery)}"
        if served[worst] >= HELD:
            text = f"holds: serves {_percent(served[worst])} of its capacity or more"
            text = f"{text} at {max(loads):.1f} times capacity{ending}"
            return Verdict("holds", text, recovery)
        first = next(index for index in over if served[index] < HELD)
        text = f"collapses at {loads[first]:.1f} times capacity to {_percent(served[worst])} of it"
        return Verdict("collapses", f"{text}{ending}", recovery)

    def _fullest(self, since: float, until: float) -> float:
        """Return the highest load on any service, in units of its capacity."""
        bounded = [(name, one.capacity) for name, one in self.services.items() if one.capacity]
        loads = [self.load(name, since, until) / capacity for name, capacity in bounded]
        return max(loads, default=0.0)

    # Plain data

    def series(self) -> dict[str, Any]:
        """Return all that was recorded, by step, as plain data for JSON and charts."""
        return {
            "clients": {name: self._client_series(one) for name, one in self.clients.items()},
            "services": {name: self._service_series(one) for name, one in self.services.items()},
            "guards": {
                name: {
                    "breaker": one.breaker,
                    "in_flight": one.in_flight,
                    "waiting": one.waiting,
                    "queue_age": _rounded(one.queue_age),
                }
                for name, one in self.guards.items()
            },
        }

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as plain data."""
        begin, end = self.trouble or (None, None)
        verdict = self.verdict
        return {
            "name": self.name,
            "seed": self.seed,
            "seconds": self.seconds,
            "step": self.step,
            "verdict": verdict.text,
            "kind": verdict.kind,
            "recovery": None if verdict.recovery == inf else verdict.recovery,
            "trouble": None if begin is None else [begin, end],
            "disturbances": [
                {"at": one.at, "until": None if one.until == inf else one.until, "text": one.text}
                for one in self.disturbances
            ],
            "came": self.came(),
            "ended": {outcome: self.ended(outcome) for outcome in OUTCOMES},
            "errors": {name: one.errors for name, one in self.clients.items() if one.errors},
            "goodput": round(self.goodput(), 6),
            "share": round(self.share(), 6),
            "quantiles": {
                f"p{100 * p:g}": round(self.quantile(p), 6) for p in (0.5, 0.95, 0.99, 0.999)
            },
            "load": {name: round(self.load(name), 6) for name in self.services},
        }

    def _client_series(self, record: ClientRecord) -> dict[str, Any]:
        latencies = [sorted(record.latencies[index]) for index in range(self.steps)]
        return {
            "came": record.came[: self.steps],
            **{outcome: record.ended[outcome][: self.steps] for outcome in OUTCOMES},
            **{
                f"p{100 * p:g}": [
                    round(took[min(len(took) - 1, int(p * len(took)))], 6) if took else None
                    for took in latencies
                ]
                for p in (0.5, 0.95, 0.99)
            },
        }

    def _service_series(self, record: ServiceRecord) -> dict[str, Any]:
        return {
            "capacity": record.capacity,
            "calls": record.calls[: self.steps],
            "failed": record.failed[: self.steps],
            "in_flight": record.in_flight,
            "queued": record.queued,
            "queue_age": _rounded(record.queue_age),
        }

    def _groups(self, name: str | None) -> list[ClientRecord]:
        return list(self.clients.values()) if name is None else [self.clients[name]]

    def _span(self, since: float, until: float | None) -> slice:
        end = self.seconds if until is None else min(until, self.seconds)
        first, last = round(since / self.step), round(end / self.step)
        if not 0 <= first < last:
            raise ValueError(
                f"since={since!r}, until={until!r}: write a span within the {self.seconds:g} s"
                f" of the run, of at least one step ({self.step:g} s)"
            )
        return slice(first, last)


def _per_step(lists: Sequence[Sequence[int]], steps: int) -> list[int]:
    return [sum(one[index] for one in lists) for index in range(steps)]


def _rounded(values: Sequence[float] | array[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _recovers(recovery: float) -> str:
    if recovery == inf:
        return "does not recover"
    return "recovers at once" if recovery < 1 else f"recovers {recovery:.0f} s after the end"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
