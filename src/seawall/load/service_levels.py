"""The level of service, by load and by the state of dependencies.

Promises:
- An outage of a dependency lowers the level immediately.
- Load lowers it one level at a time, and it recovers one at a time, later and at a lower load than
  it was lowered.
- Reading the level never fails and costs little.
- `pin` overrides everything.

The rules are in `seawall.models.service_levels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from itertools import count
from threading import Lock
from typing import Any, ClassVar, NamedTuple, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import Overloaded
from seawall.events import LevelChanged, SettingsChanged
from seawall.events.bus import emit
from seawall.load.signals import GAUGE_EVERY, Load, Signal, as_signal, clock_of
from seawall.models.service_levels import (
    THRESHOLDS,
    LevelCause,
    LevelModel,
    LevelSettings,
    ServiceLevel,
)
from seawall.runtime.degradation import Degradation
from seawall.runtime.functions import with_arguments
from seawall.runtime.layers import Host, Inline
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import MODES, GateBound, GatePolicy, Mode, bindings_of

T = TypeVar("T")
LevelName = ServiceLevel | str


class ServiceLevels:
    """The current level of a service: full, cached, partial, static or maintenance."""

    def __init__(
        self,
        name: str,
        *,
        load: Load | None = None,
        depends_on: Mapping[Any, LevelName] | None = None,
        thresholds: Mapping[LevelName, float] | None = None,
        gap: float = 0.1,
        hold: float = 5.0,
        recover_after: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """Lower the level by `load`, any signal, and while something in `depends_on` is in trouble.

        `thresholds` are the loads at which each level is entered (a level left out never is); one
        level at a time, `hold` seconds apart. One level is recovered once load has been `gap` below
        its threshold for `recover_after` seconds. `depends_on` maps a breaker, a guard that has
        one, or a function that reports trouble, to the level that is left while it is open.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"ServiceLevels({name!r}): the first argument is a name, such as 'shop'"
            )
        if load is None and not depends_on:
            raise ValueError(
                "ServiceLevels(): say what moves it, such as load=process_cpu() or"
                " depends_on={breaker: 'cached'}"
            )
        if depends_on is not None and not isinstance(depends_on, Mapping):
            raise TypeError(f"depends_on={depends_on!r}: write {{breaker: 'cached'}}")
        self.name = name
        self.clock: Clock = current_clock() if clock is None else check_clock(clock)
        self._load = None if load is None else as_signal(load)
        self._dependencies = [
            _Dependency(_name(thing), _trouble(thing), ServiceLevel.of(level))
            for thing, level in (depends_on or {}).items()
        ]
        given: Any = THRESHOLDS if thresholds is None else thresholds
        self.settings = LevelSettings(given, gap, hold, recover_after).checked()
        self._model = LevelModel(self.settings)
        self._now = self.clock.now
        self._pinned: ServiceLevel | None = None
        self._standing = ServiceLevel.FULL
        self._since = self._now()
        self._due = float("-inf")
        self._lock = Lock()
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "service_levels", name)

    def __repr__(self) -> str:
        return f"<ServiceLevels {self.name!r}: {self._standing.label}>"

    @property
    def level(self) -> ServiceLevel:
        """The current level."""
        now = self._now()
        if now >= self._due:
            self._look(now)
        return self._standing

    def allows(self, level: LevelName) -> bool:
        """Return whether answers of that level may be given: the service is there, or better.

        If not, record a lesser answer, which `degradations()` collects.
        """
        wanted = ServiceLevel.of(level)
        if self.level <= wanted:
            return True
        source = f"service level: {self._standing.label}"
        error = Overloaded(_refusal(self, wanted), guard=self.name, policy="service_levels")
        Degradation(source, int(self._standing), error).collect(self.name)
        return False

    def at(self, level: LevelName, function: Callable[..., T]) -> Callable[..., T]:
        """Return `function` as a level of a `Fallback` that answers only where `level` is allowed.

        Otherwise it passes on to the next, by raising `Overloaded`.
        """
        allowed = ServiceLevel.of(level)
        answer = with_arguments(check.function("function", function))

        def at_level(*args: Any, **kwargs: Any) -> T:
            if self.level > allowed:
                raise Overloaded(_refusal(self, allowed), guard=self.name, policy="service_levels")
            result: T = answer(*args, **kwargs)
            return result

        return update_wrapper(at_level, function)

    def gate(self, level: LevelName = ServiceLevel.FULL, *, mode: Mode = "enforce") -> LevelGate:
        """Return a policy that refuses calls with `Overloaded` while `level` is not allowed.

        Put it between a `Fallback`, which then answers, and the policies of the real call.
        """
        return LevelGate(self, ServiceLevel.of(level), mode)

    def pin(self, level: LevelName) -> None:
        """Stay at `level`, whatever happens, until `unpin`."""
        self._pin(ServiceLevel.of(level), LevelCause.PINNED)

    def unpin(self) -> None:
        """Follow load and dependencies again, from the next check on."""
        self._pin(None, LevelCause.UNPINNED)

    def update(self, **changes: Any) -> None:
        """Change `thresholds`, `gap`, `hold` or `recover_after` at run time; the level stays.

        Invalid values raise and change nothing.
        """
        if not changes:
            raise TypeError("ServiceLevels.update(): name what to change")
        known = LevelSettings._fields
        for name in changes:
            if name not in known:
                raise TypeError(f"ServiceLevels.update({name}=...): it takes {', '.join(known)}")
        self.settings = self._model.settings = self.settings._replace(**changes).checked()
        emit(SettingsChanged, self.name, policy="service_levels", changes=changes)

    def snapshot(self) -> dict[str, Any]:
        """Return the level, how long it has lasted, and the dependencies."""
        level = self.level
        return {
            "name": self.name,
            "level": level.label,
            "pinned": self._pinned is not None,
            "seconds": self._now() - self._since,
            "load": None if self._load is None else self._load.snapshot(),
            "depends_on": self._dependency_states(),
        }

    def _dependency_states(self) -> dict[str, Any]:
        """Return by name what each dependency demands; a duplicate name gets a number."""
        shown: dict[str, Any] = {}
        for read_name, trouble, level in self._dependencies:
            plain = name = read_name()
            numbers = count(2)
            while name in shown:
                name = f"{plain} {next(numbers)}"
            shown[name] = {"level": level.label, "in_trouble": bool(trouble())}
        return shown

    def _look(self, now: float) -> None:
        """Check load and dependencies; callers that come meanwhile use the current level."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._due = now + GAUGE_EVERY
            load = 0.0 if self._load is None else self._load()
            levels = (level for _, trouble, level in self._dependencies if trouble())
            demanded = max(levels, default=ServiceLevel.FULL)
            move = self._model.update(load, demanded, now)
        finally:
            self._lock.release()
        if move is not None:
            self._apply(move.cause, now)

    def _pin(self, level: ServiceLevel | None, cause: LevelCause) -> None:
        with self._mutex:
            self._pinned = level
        self._apply(cause, self._now())

    def _apply(self, cause: LevelCause, now: float) -> None:
        with self._mutex:  # so that a check that began before a pin cannot overwrite it
            after = self._model.level if self._pinned is None else self._pinned
            before, self._standing = self._standing, after
            if before is not after:
                self._since = now
        if before is not after:
            fields = {"before": before.label, "after": after.label, "cause": cause.value}
            emit(LevelChanged, self.name, **fields)

    def _after_fork(self) -> None:
        """Reset the locks in a child process: another thread may have held them."""
        self._lock = Lock()
        self._mutex = Mutex()


class _Dependency(NamedTuple):
    """The level of service that is left while a dependency is in trouble."""

    name: Callable[[], str]
    trouble: Signal
    level: ServiceLevel


def _name(thing: Any) -> Callable[[], str]:
    """Return a function that names a guard, a function, or the guard of a breaker."""
    if hasattr(thing, "is_open"):
        return lambda: next((bound.host.name for bound in bindings_of(thing)), thing.kind)
    name = str(getattr(thing, "name", None) or getattr(thing, "__name__", "trouble"))
    return lambda: name


def _trouble(thing: Any) -> Signal:
    """Return a signal that is 1.0 while `thing` is in trouble."""
    of = () if isinstance(thing, type) else getattr(thing, "policies", (thing,))
    parts = [part for part in of if hasattr(part, "is_open")]
    if parts:
        name = str(getattr(thing, "name", None) or thing.kind)
        return Signal(name, lambda: any(p.is_open(clock_of(p).now()) for p in parts), every=0.0)
    if isinstance(thing, type) or not callable(thing) or hasattr(thing, "policies"):
        raise TypeError(
            f"depends_on={{{thing!r}: ...}}: pass a breaker, a guard that has one, or a function"
            " that returns True while there is trouble"
        )
    check.plain_function("depends_on", thing)
    return Signal(getattr(thing, "__name__", "trouble"), lambda: bool(thing()), every=0.0)


def _refusal(levels: ServiceLevels, level: ServiceLevel) -> str:
    return f"service level of {levels.name!r} is {levels.level.label}, below {level.label}"


class LevelGate(GatePolicy):
    """Refuses calls while the service is lower than `level`. Make it with `levels.gate(...)`."""

    kind: ClassVar[str] = "service_levels"

    def __init__(self, levels: ServiceLevels, level: ServiceLevel, mode: Mode) -> None:
        super().__init__(mode)
        self.levels = levels
        self.level = level

    def __repr__(self) -> str:
        return f"ServiceLevels({self.levels.name!r}).gate({self.level.label!r})"

    def _bind(self, host: Host) -> _LevelBound:
        return _LevelBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("level", "mode"))
        mode = check.choice("mode", changes.get("mode", self.mode), MODES)
        self.level = ServiceLevel.of(changes.get("level", self.level))
        self.mode = mode


class _LevelBound(GateBound):
    """The gate inside one guard."""

    policy: LevelGate

    def __init__(self, policy: LevelGate, host: Host) -> None:
        super().__init__(policy, host)
        levels = policy.levels
        if levels.clock is host.clock:  # otherwise `now` is on another clock than the next check
            self.inline = Inline(
                names={"levels": levels, "policy": policy},
                enter=(
                    "{ticket} = None",
                    "if now_ >= {levels}._due or {levels}._standing > {policy}.level:",
                    "    {enter}(now_)",
                ),
                leave=(),
            )

    def enter(self, now: float, /) -> None:
        """Admit the call, or refuse it."""
        levels, level = self.policy.levels, self.policy.level
        if levels.level > level:
            self.refuse(Overloaded(f"guard {self.host.name!r}: {_refusal(levels, level)}"))

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the current level, and the level needed here."""
        stands = self.policy.levels.level.label
        return {**super().snapshot(now), "level": stands, "needs": self.policy.level.label}
