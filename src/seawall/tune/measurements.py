"""What was measured of guards and pools: counts, latencies and today's settings.

A snapshot for tuning is the JSON document that a dashboard serves at `/snapshot`:

    {"guards": [...], "pools": [...], "settings": "<TOML of all guards>"}

Each guard is as in `Guard.snapshot()`, with `seconds`, the time that its counts cover, and
`recent_rate`, its attempts a second in the last ten to twenty seconds.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf, log
from statistics import NormalDist
from typing import Any, Final, NamedTuple

from seawall import registry
from seawall.config import guards_to_toml
from seawall.models.histogram import BOUNDS, Tally
from seawall.registry import plain

Table = Mapping[str, Any]

FAILING: Final = 0.1  # share of failed attempts from which a dependency counts as failing
FAILING_NOW: Final = 0.2  # the same for the attempts of the last seconds, which are few
LARGEST: Final = 1e15  # numbers above this are none that a process counts
MOST_HIDDEN: Final = 0.4  # share of attempts that may time out before too little is known


class Measurement(NamedTuple):
    """The calls of one guard to its dependency, or of borrowers to a pool."""

    name: str
    kind: str
    """"guard" or "pool"."""
    seconds: float
    """How long the counts cover; 0 if that is not known."""
    succeeded: float
    failed: float
    """Attempts that failed, those that timed out included."""
    timed_out: float
    rejected: float
    retries: float
    error_rate: float
    """Share of the attempts of the last seconds that failed."""
    recent_rate: float
    """Attempts a second in the last seconds."""
    tally: Tally
    """Durations of the attempts that succeeded or timed out."""
    policies: Sequence[Mapping[str, Any]]
    """What each policy counted, outermost first; empty if that is not known."""
    table: Table | None
    """Today's settings, as `guards_from_toml` reads them; None if they are not known."""

    @property
    def samples(self) -> int:
        """Number of durations."""
        return round(sum(self.tally.counts))

    @property
    def attempts(self) -> float:
        """Attempts that reached the dependency."""
        return self.succeeded + self.failed

    @property
    def calls(self) -> float:
        """Calls that came, those that were refused included."""
        return max(0.0, self.attempts - self.retries) + self.rejected

    @property
    def rate(self) -> float:
        """Calls a second: over all the time, or in the last seconds if that is more."""
        per_attempt = self.calls / max(1.0, self.attempts)
        mean = self.attempts / self.seconds if self.seconds else 0.0
        return per_attempt * max(mean, self.recent_rate)

    @property
    def attempt_rate(self) -> float:
        """Attempts a second that would come if nothing were refused."""
        return self.rate * (1 + self.retries / max(1.0, self.attempts - self.retries))

    @property
    def failing(self) -> float:
        """Share of the attempts that failed by themselves, and not by a timeout."""
        return max(0.0, self.failed - self.timed_out) / max(1.0, self.attempts)

    @property
    def timing_out(self) -> float:
        """Share of the attempts that timed out."""
        return min(1.0, self.timed_out / max(1.0, self.attempts))

    @property
    def is_failing(self) -> bool:
        """Whether the dependency fails, now or all the time: then nothing may add load to it."""
        usual = self.failing + self.timing_out
        grows = self.error_rate > max(FAILING, 2 * usual)
        now = self.failing_now > FAILING_NOW or self.is_broken
        return self.failing > FAILING or grows or now

    @property
    def is_broken(self) -> bool:
        """Whether a breaker is not closed; then few attempts or none say that they fail."""
        breakers = (one for one in self.policies if one.get("policy") == "breaker")
        return any(one.get("state") not in (None, "closed") for one in breakers)

    @property
    def is_in_trouble(self) -> bool:
        """Whether the dependency fails or hangs; a short timeout looks like one that hangs."""
        return self.is_failing or self.timing_out > FAILING

    @property
    def failing_now(self) -> float:
        """Share of the last attempts that failed, less those that usually time out."""
        return self.error_rate - self.timing_out

    @property
    def mean(self) -> float:
        """The mean duration of an attempt."""
        return self.tally.sum / max(1, self.samples)

    def quantile(self, p: float) -> float:
        """Return the duration that a share `p` of the attempts does not exceed."""
        counts = list(accumulate(self.tally.counts))
        wanted = p * counts[-1]
        place = min(bisect_left(counts, wanted), len(counts) - 1)
        bounds = (0.0, *self.tally.bounds, self.tally.bounds[-1])
        below = counts[place - 1] if place else 0.0
        inside = counts[place] - below
        part = (wanted - below) / inside if inside else 1.0
        return bounds[place] + part * (bounds[place + 1] - bounds[place])

    @property
    def longest_known(self) -> float:
        """The upper bound of the last bucket that has one; longer calls are counted together."""
        return self.tally.bounds[-1]

    def slower_than(self, seconds: float) -> float:
        """Return the share of the attempts that took longer than `seconds`."""
        bounds = (0.0, *self.tally.bounds, inf)
        slower = 0.0
        for low, high, count in zip(bounds, bounds[1:], self.tally.counts, strict=False):
            if seconds <= low:
                slower += count
            elif seconds < high < inf:
                slower += count * (high - seconds) / (high - low)
        return slower / max(1, self.samples)

    def without_timeout(self, timeout: float) -> Measurement | None:
        """Return the measurements as they would be without a timeout of `timeout` seconds.

        The attempts that it cut off are spread over the tail of the log-normal distribution that
        has the same median and the same share above the timeout. None if too many were cut off.
        """
        beyond = self.tally.counts[bisect_left(self.tally.bounds, timeout) :]
        hidden = min(self.timed_out, sum(beyond))
        if not hidden:
            return self
        share = hidden / self.samples
        median = self.quantile(0.5)
        if share > MOST_HIDDEN or median >= timeout:
            return None
        sigma = log(timeout / median) / NormalDist().inv_cdf(1 - share)
        normal = NormalDist(log(median), sigma)
        tally = Tally(self.tally.bounds)
        left = hidden
        lows, longest = (0.0, *self.tally.bounds), self.tally.bounds[-1]
        highs = (*self.tally.bounds, inf)
        for place, (low, high) in enumerate(zip(lows, highs, strict=True)):
            count = self.tally.counts[place]
            if high > timeout:
                below = 1.0 if high == inf else normal.cdf(log(high))
                tail = (below - normal.cdf(log(max(low, timeout)))) / share
                tally.counts[place] = hidden * tail
            taken = min(left, count) if high >= timeout else 0.0
            left -= taken
            tally.counts[place] += count - taken
            tally.sum += tally.counts[place] * (low + min(high, longest)) / 2
        return self._replace(tally=tally)


def tuning_snapshot(only: str | None = None) -> dict[str, Any]:
    """Return what `seawall tune` reads of this process: its own guards and pools, as plain data.

    Guards that are part of something else (an edge, a database), families, and what cannot be read
    are left out; so is everything but the guard that `only` names.
    """
    everyone = (guard for guard in registry.guards() if only in (None, guard.name))
    guards = [guard for guard in everyone if not registry.is_part(guard)]
    shown = []
    for guard in guards:
        now = guard.clock.now()
        seen = registry.snapshot_of(guard)
        if "snapshot_error" in seen:
            continue
        seen["seconds"] = max(0.0, now - guard.stats.began)
        seen["recent_rate"] = guard.stats.recent_rate(now)
        shown.append(seen)
    pools = [
        {
            **plain(pool.snapshot()),
            "recent_rate": pool.advice().throughput,
            "checkout_timeout": checkout(pool),
        }
        for pool, entry in registry.entered()
        if entry.kind == "pool" and only is None
    ]
    return {"guards": shown, "pools": pools, "settings": guards_to_toml(guards)}


def checkout(pool: Any) -> float | None:
    """Return how long borrowers wait; None if that is not bounded."""
    seconds: float = pool.settings.checkout_timeout
    return None if seconds == inf else seconds


def measurements_of(snapshot: Mapping[str, Any]) -> list[Measurement]:
    """Return what was measured of each guard and pool of a snapshot for tuning."""
    tables = tomllib.loads(str(snapshot.get("settings") or "")).get("guards", {})
    for name, table in (tables if isinstance(tables, Mapping) else {"": None}).items():
        policies = table.get("policies") if isinstance(table, Mapping) else None
        if not _are_tables(policies, "policy"):
            raise ValueError(f"settings of guard {name!r}: write [[guards.NAME.policies]]")
    return [*_guards(_listed(snapshot, "guards"), tables), *_pools(_listed(snapshot, "pools"))]


def _listed(snapshot: Mapping[str, Any], kind: str) -> Sequence[Mapping[str, Any]]:
    listed: Sequence[Mapping[str, Any]] = snapshot.get(kind) or ()
    if not _are_tables(listed, "name"):
        raise ValueError(f"this is no snapshot: its {kind} are not a list of objects with a name")
    return listed


def _are_tables(listed: Any, key: str) -> bool:
    return isinstance(listed, (list, tuple)) and all(
        isinstance(one, Mapping) and isinstance(one.get(key), str) for one in listed
    )


_COUNTS: Final = (
    *("seconds", "succeeded", "failed", "timed_out", "rejected", "retries", "error_rate"),
    "recent_rate",
)
"""The numbers in the snapshot of a guard that are fields of `Measurement`."""


def _guards(guards: Sequence[Mapping[str, Any]], tables: Table) -> Iterator[Measurement]:
    for seen in guards:
        name = seen["name"]
        counted = seen.get("policies") or [*_counted(seen, tables.get(name))]
        if not _are_tables(counted, "policy"):
            raise ValueError(f"this is no snapshot: guard {name!r} has policies {counted!r:.80}")
        counts: dict[str, Any] = {count: _number(seen, count) for count in _COUNTS}
        yield Measurement(
            name,
            "guard",
            **counts,
            tally=_tally(seen.get("histogram")),
            policies=tuple(counted),
            table=tables.get(name),
        )


def _counted(seen: Mapping[str, Any], table: Table | None) -> Iterator[Mapping[str, Any]]:
    """Yield what an export counts of each policy of `table`."""
    refused = seen.get("refused") or {}
    for policy in (table or {}).get("policies", ()):
        kind = policy["policy"]
        counted = {"policy": kind, "rejected": refused.get(kind, 0.0)}
        if kind == "breaker":
            opened = {"open": _number(seen, "opened")}
            counted |= {"transitions": opened, "state": seen.get("breaker_state")}
        yield counted


def _pools(pools: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
    for seen in pools:
        use = seen.get("use") or {}
        refused = _number(seen, "rejected") + _number(seen, "timed_out")
        bounded = seen.get("checkout_timeout") is not None
        wait = _number(seen, "checkout_timeout") if bounded else inf
        counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0.0)
        counts |= {count: _number(seen, count) for count in ("seconds", "recent_rate")}
        counts |= {"succeeded": _number(seen, "borrowed"), "rejected": refused}
        yield Measurement(
            seen["name"],
            "pool",
            **{**counts, "failed": _number(seen, "connect_failed")},
            tally=_tally(use.get("histogram")),
            policies=(),
            table={"max_size": int(_number(seen, "limit")), "checkout_timeout": wait},
        )


def _tally(histogram: Any) -> Tally:
    """Return a histogram of a snapshot; an empty one if it has another shape."""
    tally = Tally()
    known = histogram if isinstance(histogram, Mapping) else {}
    counts = known.get("counts", ())
    if isinstance(counts, list) and len(counts) == len(BOUNDS) + 1:
        tally.counts = [_finite("counts", count) for count in counts]
        tally.sum = _number(known, "sum")
    return tally


def _number(seen: Mapping[str, Any], name: str) -> float:
    value = seen.get(name)
    return 0.0 if value is None else _finite(name, value)


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        raise ValueError(f"this is no snapshot: its {name} is {value!r:.80}")
    return float(value)
