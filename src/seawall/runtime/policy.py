"""What all policies have in common, and what binds them to a guard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar, Literal, Self, TypeVar
from weakref import ref

from seawall import _checks as check
from seawall._failures import said_by
from seawall.clock import current_clock
from seawall.errors import Rejected
from seawall.events import CallRejected, SettingsChanged, SettingsDiffer, StoreModeChanged
from seawall.events.bus import Event, emit, listening
from seawall.runtime.layers import Driver, Host, Kind, Layer

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["enforce", "shadow", "off"]
MODES: tuple[Mode, ...] = ("enforce", "shadow", "off")


class Bound:
    """A policy as part of one guard: holds its statistics there; its state is in the policy."""

    def __init__(self, policy: Policy, host: Host) -> None:
        self.policy = policy
        self.host = host

    def layer(self, kind: Kind) -> Layer | Driver:
        """Return the layer that a call of that kind goes through: by default, this object."""
        assert isinstance(self, (Layer, Driver))  # noqa: S101 - for the type checker
        return self

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the policy's state and its counts in this guard."""
        return {}


class Policy:
    """A rule around a call. The same object in two guards shares its state between them."""

    kind: ClassVar[str] = ""
    """The policy's name in errors, events and metrics."""

    _needs_statistics: ClassVar[bool] = True  # if not, a policy used alone keeps none

    def __init__(self) -> None:
        self._bindings: list[ref[Bound]] = []

    def __call__(self, function: F) -> F:
        """Use this policy alone as a decorator."""
        # Imported by name: a guard is made of policies, so policies cannot import it.
        guarded: F = import_module("seawall.guard").Guard.alone(self, function)
        return guarded

    def update(self, **changes: Any) -> None:
        """Change settings at run time; state and calls in flight are kept.

        Takes the names of the constructor's arguments. Invalid values raise and change nothing.
        """
        if not changes:
            raise TypeError(f"{type(self).__name__}.update(): name what to change")
        self._update(changes)
        emit_for(self, SettingsChanged, policy=self.kind, changes=changes)

    def _bind(self, host: Host) -> Bound:
        """Return the part of this policy that belongs to `host`."""
        raise NotImplementedError

    def _at_rest(self, now: float) -> bool:
        """Return whether forgetting its state would break no limit and erase no penalty."""
        return True

    def _update(self, changes: dict[str, Any]) -> None:
        raise TypeError(f"{type(self).__name__} has nothing that can be changed at run time")

    @classmethod
    def _reject_unknown(cls, changes: dict[str, Any], known: Iterable[str]) -> None:
        for name in changes:
            if name not in known:
                raise TypeError(f"{cls.__name__}.update({name}=...): it takes {', '.join(known)}")

    @classmethod
    def _changed(cls, changes: dict[str, Any], **today: Any) -> Self:
        """Return a new policy with the settings `today` after `changes`; invalid ones raise."""
        cls._reject_unknown(changes, today)
        return cls(**{**today, **changes})


def bind(policy: Policy, host: Host) -> Bound:
    """Make `policy` part of `host`."""
    bound = policy._bind(host)  # noqa: SLF001 - not for users
    kept = [known for known in policy._bindings if known() is not None]  # noqa: SLF001
    policy._bindings = [*kept, ref(bound)]  # noqa: SLF001 - swapped whole: others read it meanwhile
    return bound


def bindings_of(policy: Policy) -> list[Bound]:
    """Return the bounds of `policy` in the guards that it is part of."""
    return [bound for known in policy._bindings if (bound := known()) is not None]  # noqa: SLF001


def emit_for(policy: Policy, event: type[Event], /, **fields: Any) -> None:
    """Emit an event for each guard that `policy` is part of."""
    for bound in bindings_of(policy):
        emit(event, bound.host.name, **fields)


def now_of(policy: Policy) -> float:
    """Return the time of the clock of its guards; of the current one, if there are none."""
    clocks = (bound.host.clock for bound in bindings_of(policy))
    return next(clocks, current_clock()).now()


class PolicyShareOwner:
    """What a store's share knows of its policy (`ShareOwner`), without keeping it alive."""

    def __init__(self, policy: Any) -> None:
        self._policy: Callable[[], Any] = ref(policy)

    def mode_changed(self, before: str, after: str, cause: str) -> None:
        """Emit an event for each guard of the policy: another party decides."""
        policy = self._policy()
        if policy is not None:
            fields = {"before": before, "after": after, "cause": cause}
            name = policy.shared.name
            emit_for(policy, StoreModeChanged, policy=policy.kind, store=name, **fields)

    def settings_differ(self, own: str, other: str) -> None:
        """Emit an event for each guard of the policy: pods disagree on its settings."""
        policy = self._policy()
        if policy is not None:
            fields = {"policy": policy.kind, "own": own, "other": other}
            emit_for(policy, SettingsDiffer, shared_name=policy.name, **fields)


class GatePolicy(Policy):
    """A policy that admits or refuses. It acts (`enforce`), only counts (`shadow`), or is `off`."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode: Mode = check.choice("mode", mode, MODES)


class GateBound(Layer, Bound):
    """A gate inside one guard."""

    policy: GatePolicy

    def __init__(self, policy: GatePolicy, host: Host) -> None:
        super().__init__(policy, host)
        self.refused = 0
        self.would_refuse = 0

    def layer(self, kind: Kind) -> Layer:
        """Return this gate, for both sync and async."""
        return self

    def refuse(self, error: Rejected) -> None:
        """Raise `error` if the policy is enforced; otherwise count it and admit the call."""
        mode = self.policy.mode
        if mode == "off":
            return
        enforced = mode == "enforce"
        if listening():
            emit(
                CallRejected,
                self.host.name,
                policy=self.policy.kind,
                reason=error.reason,
                enforced=enforced,
                key=error.key,
                message=said_by(error),
            )
        if not enforced:
            self.would_refuse += 1
            return
        self.refused += 1
        self.host.stats.rejected += 1
        error.guard = self.host.name
        error.policy = self.policy.kind
        try:
            raise error
        finally:
            del error  # break the reference cycle between the error and this frame

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the mode and how many calls of this guard were, or would have been, refused."""
        return {
            "mode": self.policy.mode,
            "rejected": self.refused,
            "would_reject": self.would_refuse,
        }
