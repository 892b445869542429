"""Prove proposals in the simulator: today's settings and others, under each of its conditions.

The world is made of what was measured: a dependency with the measured latencies and failures, that
serves at most `capacity` calls a second, and callers who come at the measured rate and leave after
`patience` seconds. The settings run as the real policies (`seawall.sim.rehearse`).

Promises:
- Each proposal is tried beside the others: with it, and without it. One that helps under no
  condition, or makes one worse than today beyond the interval, is dropped, and it is said why.
- What is left makes nothing worse than today. A dependency that is down never gets more calls than
  it gets today when it is well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isinf
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.config import guards_to_toml
from seawall.sim import CONDITIONS, Latency, Rehearsal, compare, rehearse
from seawall.tune.measurements import Measurement, Table
from seawall.tune.proposals import Proposal, apply, rounded, seconds

HEADROOM: Final = 1.5  # times today's attempts that a dependency bears, if that is not known
PATIENCE: Final = 3.0  # times the slowest usual answer for which callers wait, if not known
SHORTEST_PATIENCE: Final = 1.0

NOTICED: Final = 0.05  # share of goodput, tail or load from which a difference counts
NOTICED_ALWAYS: Final = 0.01  # the same for the goodput as usual, which is every day
IN_TROUBLE: Final = ("slow", "down", "hangs")  # conditions in which load must not grow
SIMULATED: Final = frozenset(
    {"adaptive_limit", "breaker", "bulkhead", "hedge", "rate_limit", "retry", "throttle"}
    | {"timeout"}
)
"""Policies that are simulated. Caches, fallbacks and functions of the user are left out."""

_OWN: Final = frozenset(
    {"cost", "dispose", "is_drop", "is_failure", "max_threads", "name", "on_store_failure"}
    | {"probe", "retry_after", "settle", "shared", "sync", "workers"}
)
"""Settings that are functions of the user, stores or threads, which a simulation does not have."""

Progress = Callable[[str], None]


class Effect(NamedTuple):
    """What settings do under one condition: today (None if unknown), then, and the difference."""

    before: Rehearsal | None
    after: Rehearsal
    difference: Rehearsal | None


class Proof(NamedTuple):
    """What the simulator says about the proposals for one guard or pool."""

    kept: list[Proposal]
    dropped: list[tuple[Proposal, str]]
    effects: dict[str, Effect]
    """By condition: today against everything that was kept."""
    table: dict[str, Any] | None
    """The settings with everything that was kept."""
    world: str
    """What was simulated, in words."""


def prove(
    measured: Measurement,
    proposals: Sequence[Proposal],
    *,
    capacity: float | None = None,
    patience: float | None = None,
    seeds: int = 5,
    seconds: float = 60.0,
    processes: int = 1,
    progress: Progress | None = None,
) -> Proof:
    """Try `proposals` for what was measured, and keep those that help.

    `capacity` is the number of calls a second that the dependency can serve, `patience` how long
    callers wait. Both have defaults from what was measured, and the proof says which.
    """
    known = _without_todays_timeout(measured)
    given = {
        "latency": Latency.measured(known.tally),
        "rate": measured.rate,
        "failing": min(0.99, measured.failing),
        "capacity": capacity or HEADROOM * measured.attempt_rate,
        "patience": patience or _usual_patience(known),
        "seconds": seconds,
        "seeds": seeds,
        "processes": processes,
    }
    report = check.plain_function("progress", progress or (lambda _text: None))
    return _Trial(measured, known.samples, list(proposals), given, report).prove()


class _Trial:
    """The world of one guard or pool, and the settings that were tried in it."""

    def __init__(
        self,
        measured: Measurement,
        samples: int,
        proposals: list[Proposal],
        given: dict[str, Any],
        report: Progress,
    ) -> None:
        self._measured = measured
        self._samples = samples
        self._proposals = proposals
        self._given = given
        self._report = report
        self._tried: dict[str, dict[str, Rehearsal]] = {}

    @property
    def world(self) -> str:
        """What is simulated, in words."""
        measured, given = self._measured, self._given
        return (
            f"{measured.rate:.3g} calls a second, {self._samples} measured latencies,"
            f" {measured.failing:.1%} failing; the dependency bears {given['capacity']:.3g} calls a"
            f" second, callers wait {seconds(given['patience'])}; {given['seeds']} seeds"
        )

    def prove(self) -> Proof:
        """Drop what does not help beside everything else, or is worse than today."""
        kept = list(self._proposals)
        dropped: list[tuple[Proposal, str]] = []
        for one in reversed(self._proposals):
            candidate: Proposal | None = one
            rest = [other for other in kept if other is not one]
            first = ""
            while candidate is not None:
                tried = [candidate if other is one else other for other in kept]
                why, worse = self._against(rest, tried)
                if not why:
                    kept = tried
                    break
                first = first or why
                candidate = gentler(candidate) if worse else None
            else:
                kept = rest
                dropped.insert(0, (one, first))
        while kept and self._is_known:
            why, _ = self._against([], kept)
            if not why:
                break
            gone = self._culprit(kept)
            dropped.append((gone, f"beside the others, {why}"))
            kept = [one for one in kept if one is not gone]
        return self._proof(kept, dropped)

    def _culprit(self, kept: list[Proposal]) -> Proposal:
        """Return the proposal without which the others are no worse than today; else the last."""
        for one in reversed(kept):
            rest = [other for other in kept if other is not one]
            if rest and not self._against([], rest)[0]:
                return one
        return kept[-1]

    def _against(self, rest: list[Proposal], tried: list[Proposal]) -> tuple[str, bool]:
        """Return why `tried` is no improvement on `rest`, and whether it makes something worse.

        What is worse than without a proposal, but not worse than today, was gained by others.
        """
        before, after = self._try(rest), self._try(tried)
        today = self._try([]) if self._is_known else before
        given = today["normal"].load.mean, self._given["seconds"]
        verdicts = {name: judge(name, before[name], after[name], *given) for name in CONDITIONS}
        for name, (_, worse) in verdicts.items():
            if worse and judge(name, today[name], after[name], *given)[1]:
                return f"worse under {name}: {worse}", True
        if not any(better for better, _ in verdicts.values()):
            return "it helps under none of the conditions", False
        return "", False

    @property
    def _is_known(self) -> bool:
        return self._measured.table is not None

    def _proof(self, kept: list[Proposal], dropped: list[tuple[Proposal, str]]) -> Proof:
        after = self._try(kept)
        before = self._try([]) if self._is_known else None
        effects = {
            name: Effect(None, after[name], None)
            if before is None
            else Effect(before[name], after[name], compare(before[name], after[name]))
            for name in CONDITIONS
        }
        table = None if self._measured.kind == "pool" else self._table(kept)
        return Proof(kept, dropped, effects, table, self.world)

    def _table(self, proposals: Sequence[Proposal]) -> dict[str, Any]:
        return apply(self._measured.table or {"policies": []}, proposals)

    def _try(self, proposals: Sequence[Proposal]) -> dict[str, Rehearsal]:
        text = self._settings(proposals)
        if text not in self._tried:
            what = ", ".join(f"{one.policy} {one.words}" for one in proposals) or "today"
            self._report(f"{self._measured.name}: {what}")
            self._tried[text] = rehearse(text, **self._given)
        return self._tried[text]

    def _settings(self, proposals: Sequence[Proposal]) -> str:
        """Return the settings with these proposals, as TOML for the simulator."""
        if self._measured.kind == "pool":
            size = {**(self._measured.table or {})}
            for one in proposals:
                size |= one.after
            slots = {"policy": "bulkhead", "limit": size["max_size"]}
            slots["max_wait"] = size["checkout_timeout"]
            return guards_to_toml({"pool": {"policies": [slots]}})
        return guards_to_toml({"guard": simulated(self._table(proposals))})


def _without_todays_timeout(measured: Measurement) -> Measurement:
    """Return the measurements with what a timeout of today hides."""
    timeouts = [
        policy["seconds"]
        for policy in (measured.table or {}).get("policies", ())
        if policy["policy"] == "timeout" and isinstance(policy.get("seconds"), (int, float))
    ]
    return (measured.without_timeout(timeouts[-1]) if timeouts else None) or measured


def _usual_patience(measured: Measurement) -> float:
    wait = 0.0
    if measured.kind == "pool":
        wait = float((measured.table or {}).get("checkout_timeout") or 0.0)
    slowest = PATIENCE * measured.quantile(0.999)
    return max(SHORTEST_PATIENCE, slowest + (0.0 if isinf(wait) else wait))


def simulated(table: Table) -> dict[str, Any]:
    """Return the part of a guard's settings that the simulator can run."""
    policies = []
    for policy in table.get("policies", ()):
        if policy["policy"] not in SIMULATED or "key" in policy or "cost" in policy:
            continue
        known = {name: value for name, value in policy.items() if name not in _OWN}
        if "on" in known:
            known["on"] = _errors(known["on"])
        policies.append(known)
    kept = {name: table[name] for name in ("idempotent", "max_wait") if name in table}
    return {**kept, "policies": policies or [_NOTHING]}


_NOTHING: Final = {"policy": "timeout", "seconds": 3600.0}
"""In place of no policy at all: a guard must have one."""


def _errors(on: Any) -> list[str]:
    """Return errors of the simulator for those of the user: failures, and timeouts if named."""
    listed = [on] if isinstance(on, str) else list(on)
    known = {"ConnectionError", "Exception", "OSError", "TimeoutError", "TimedOut"}
    names = [name if name in known else "ConnectionError" for name in listed]
    return sorted({*names, *(["TimeoutError"] if "transient" in listed else [])})


def gentler(proposal: Proposal) -> Proposal | None:
    """Return a proposal that goes half as far, for one that made something worse; None if none."""
    if proposal.policy != "timeout" or proposal.added:
        return None
    today, wanted = proposal.before["seconds"], 2 * proposal.after["seconds"]
    if wanted > today / 2:
        return None
    reason = proposal.reason.partition("; shorter")[0]
    return proposal._replace(
        after={"seconds": rounded(wanted)},
        reason=f"{reason}; shorter ones lose answers when it is slow",
    )


def judge(
    condition: str, before: Rehearsal, after: Rehearsal, usually: float, length: float
) -> tuple[str, str]:
    """Return what is better and what is worse under one condition; each may be empty.

    More goodput may have a longer tail. Nothing makes up for more load on a dependency in trouble
    than it `usually` has. A run lasts for `length` seconds.
    """
    difference = compare(before, after)
    goodput = _change(difference.goodput, before.goodput.mean)
    # Few seeds, and so a wide interval, are no excuse for losing more than the last second's calls.
    if condition == "down" and difference.goodput.mean < -usually / length:
        goodput = min(goodput, difference.goodput.mean / max(before.goodput.mean, 1e-9))
    tail = _change(difference.tail, before.tail.mean)
    load = _change(difference.load, before.load.mean)
    changes = {
        "goodput": f"goodput {before.goodput.mean:.3g} -> {after.goodput.mean:.3g} a second",
        "tail": f"p99 {seconds(before.tail.mean)} -> {seconds(after.tail.mean)}",
        "load": f"load {before.load.mean:.3g} -> {after.load.mean:.3g} a second",
    }
    worse = ""
    noticed = NOTICED_ALWAYS if condition == "normal" else NOTICED
    if condition in IN_TROUBLE and load > NOTICED and after.load.low > usually:
        worse = changes["load"]
    elif goodput < -noticed:
        worse = changes["goodput"]
    elif tail > NOTICED and goodput < noticed:
        worse = changes["tail"]
    elif goodput < noticed and _unrecovered(after) - _unrecovered(before) > len(after.outcomes) / 2:
        worse = "it does not recover"
    better = ""
    if goodput > noticed:
        better = changes["goodput"]
    elif tail < -NOTICED:
        better = changes["tail"]
    elif condition in IN_TROUBLE and load < -NOTICED:
        better = changes["load"]
    return better, worse


def _unrecovered(rehearsal: Rehearsal) -> int:
    """Return in how many seeds it never recovers."""
    return sum(isinf(outcome.recovery) for outcome in rehearsal.outcomes)


def _change(difference: Any, before: float) -> float:
    """Return a difference as a share of what there was; 0 if the interval includes none."""
    if difference.low <= 0 <= difference.high:
        return 0.0
    return float(difference.mean / before) if before else float(difference.mean > 0)
