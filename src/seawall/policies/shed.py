"""Load shedding policy: refuse the least important calls before any work is done for them.

Promises:
- A shed call was never started and costs almost nothing.
- At any instant no call is shed while a less critical one is admitted.
- CRITICAL_PLUS is never shed by load, unless a rule says so (`keep=`).
- If a load signal fails, no call is shed by it.

The rules are in `seawall.models.shedding`, those for queues (a bulkhead's `shed=`) in its module
`codel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall._failures import log_failure
from seawall.context import Criticality, current_criticality, current_tier, seconds_left
from seawall.errors import DeadlineExceeded, Overloaded, Rejected
from seawall.models.shedding.rules import ShedRule, Sources
from seawall.runtime.layers import OK, Host, Outcome
from seawall.runtime.policy import MODES, GateBound, GatePolicy, Mode, bindings_of
from seawall.runtime.stats import ResponseTimes, service_time

Load = Callable[[], float]
"""A load signal: 0 is idle, 1 is at the limit."""

WINDOW: Final = 5.0  # minimum period of response times, in seconds, that a latency rule considers


class Shed(GatePolicy):
    """Refuse calls by one or more rules; a call that any of them sheds is shed."""

    kind: ClassVar[str] = "shed"

    def __init__(self, *rules: ShedRule, load: Load | None = None, mode: Mode = "enforce") -> None:
        """Shed by `rules`, in this order: `by_criticality()`, `by_tier()`, `by_deadline()`...

        `load` is a function without arguments that returns the used share of the capacity: 0 is
        idle, 1 is at the limit. Rules by criticality, tier, cost and chance need it, and
        `by_fraction(..., start=)`. If no rule reads it, it is an error to pass it.
        """
        super().__init__(mode)
        self.rules, self.load = _check(rules, load)
        self._reading = _LoadReading(self.load or float)

    def __repr__(self) -> str:
        return f"Shed({', '.join(repr(rule) for rule in self.rules)})"

    def _bind(self, host: Host) -> _ShedGate:
        return _ShedGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("rules", "load", "mode"))
        mode = check.choice("mode", changes.get("mode", self.mode), MODES)
        rules, load = _check(changes.get("rules", self.rules), changes.get("load", self.load))
        old, new = ([(r.name, r.takes_arguments) for r in some] for some in (self.rules, rules))
        if old != new:
            raise ValueError(
                f"Shed.update(rules={list(rules)!r}): write the same rules with other settings, in"
                " the same order; for other rules make another Shed"
            )
        changed = rules is not self.rules
        self.mode, self.rules, self.load = mode, rules, load
        self._reading.replace(load or float)
        for bound in bindings_of(self):
            if changed and isinstance(bound, _ShedGate):
                bound.start()


class _LoadReading:
    """A signal that counts as 0 while it fails: no call is shed because of a failed measurement."""

    __slots__ = ("_failing", "_read")

    def __init__(self, read: Load) -> None:
        self.replace(read)

    def replace(self, read: Load) -> None:
        self._read = read
        self._failing = False

    def read(self) -> float:
        try:
            value = self._read()
            if value - value:  # true for nan and infinity: the difference is nan
                raise ValueError(f"a signal returned {value!r}")  # noqa: TRY301 - as if it raised
        except Exception:  # noqa: BLE001 - logged
            if not self._failing:  # once, not for each call of an outage
                self._failing = True
                log_failure("a load signal failed: nobody is shed by it")
            return 0.0
        self._failing = False
        return value


def _check(rules: object, load: Load | None) -> tuple[tuple[ShedRule, ...], Load | None]:
    if not isinstance(rules, Sequence) or not rules:
        raise TypeError("Shed(): give it a rule, such as Shed(by_criticality(), load=...)")
    for rule in rules:
        if isinstance(rule, type) or not hasattr(rule, "takes_arguments"):
            raise TypeError(f"Shed({rule!r}): write a rule, such as by_criticality()")
        if rule.needs_load and load is None:
            raise TypeError(
                f"Shed({rule!r}): it needs a load; write load=..., a function that returns how much"
                " of the limit is in use, such as seawall.load.signals.occupancy(bulkhead)"
            )
    if load is not None:
        check.plain_function("load", load)
        if not any(rule.needs_load for rule in rules):
            raise TypeError(
                f"Shed({rules[0]!r}, load=...): no rule here reads a load; leave load= out, or"
                " write one that does, such as by_criticality() or by_fraction(0.1, start=0.8)"
            )
    return tuple(rules), load


class _ShedGate(GateBound):
    """The shedder inside one guard."""

    policy: Shed

    def __init__(self, policy: Shed, host: Host) -> None:
        super().__init__(policy, host)
        self.takes_arguments = any(rule.takes_arguments for rule in policy.rules)
        self.shed = [[0] * len(Criticality) for _ in policy.rules]
        """Number of calls shed by each rule, for each class."""
        self._times = ResponseTimes(WINDOW)
        if _slas(policy.rules):
            self.leave = self._leave_timed
        self.start()

    def start(self) -> None:
        """Start the rules; again after a change of settings."""
        host = self.host
        sources = Sources(
            load=self.policy._reading.read,
            signal=lambda read: _LoadReading(read).read,
            rank=current_criticality,
            tier=current_tier,
            uniform=lambda: host.rng.random(),  # noqa: PLW0108 - a fork makes another rng
            remaining=seconds_left,
            service_time=lambda quantile: service_time(host, quantile),
            response_time=self._times.quantile,
        )
        self._rules = tuple(
            (rule.start(sources), rule.takes_arguments, number)
            for number, rule in enumerate(self.policy.rules)
        )

    def enter(self, now: float, *args: Any, **kwargs: Any) -> float:
        """Ask each rule. The first one that sheds the call gives the reason."""
        if self.policy.mode == "off":
            return now
        for sheds, takes_arguments, number in self._rules:
            if sheds(now, *args, **kwargs) if takes_arguments else sheds(now):
                self.shed[number][current_criticality()] += 1
                self.refuse(self._error(self.policy.rules[number]))
                break
        return now

    def _error(self, rule: ShedRule) -> Rejected:
        """Return the refusal.

        The caller must not keep it, to avoid a reference cycle with its frame.
        """
        name = self.host.name
        if rule.name == "deadline":
            return DeadlineExceeded(f"guard {name!r}: the deadline leaves too little time")
        error = Overloaded(f"guard {name!r}: shed by {rule.name}")
        error.reason = f"shed_by_{rule.name}"
        return error

    def _leave_timed(self, ticket: float, outcome: Outcome, detail: object, now: float) -> None:
        """Record how long the call took; without success, only if that was too long."""
        if self.policy.mode == "off":
            return
        elapsed = now - ticket
        if outcome is OK or elapsed > min(_slas(self.policy.rules)):
            self._times.add(elapsed)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the load, and for each rule how many calls it shed, or would have shed."""
        shed_by: Counter[str] = Counter()
        classes: dict[str, Counter[str]] = {}
        for rule, shed in zip(self.policy.rules, self.shed, strict=True):
            shed_by[rule.name] += sum(shed)
            by_class = {c.name.lower(): n for c, n in zip(Criticality, shed, strict=True) if n}
            if by_class:
                classes.setdefault(rule.name, Counter()).update(by_class)
        return {
            **super().snapshot(now),
            "load": None if self.policy.load is None else self.policy._reading.read(),
            "shed_by": dict(shed_by),
            "shed_classes": {name: dict(count) for name, count in classes.items()},
        }


def _slas(rules: Sequence[ShedRule]) -> list[float]:
    """Return the response times above which these rules shed."""
    slas = (getattr(rule, "sla", None) for rule in rules)
    return [sla for sla in slas if sla is not None]
