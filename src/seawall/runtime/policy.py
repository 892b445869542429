"""What every policy has in common, and what binds it to a guard."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar
from weakref import ref

from seawall import _checks as check
from seawall._failures import said_by
from seawall.errors import Rejected
from seawall.runtime.events import CallRejected, SettingsChanged, emit, listening
from seawall.runtime.layers import Driver, Host, Kind, Layer

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["enforce", "shadow", "off"]
MODES: tuple[Mode, ...] = ("enforce", "shadow", "off")


class Bound:
    """A policy as part of one guard: its statistics there live here, its state in the policy."""

    def __init__(self, policy: Policy, host: Host) -> None:
        """Belong to `host`."""
        self.policy = policy
        self.host = host

    def layer(self, kind: Kind) -> Layer | Driver:
        """Return what a call of that kind goes through."""
        raise NotImplementedError

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the policy's state and its counts in this guard."""
        return {}


class Policy:
    """A rule around a call. The same object in two guards shares its state between them."""

    kind: ClassVar[str] = ""
    """The policy's name in errors, events and metrics."""

    needs_statistics: ClassVar[bool] = True
    """Whether it reads how its guard's calls went. Alone, one that does not has none kept."""

    def __init__(self) -> None:
        """Be bound to no guard yet."""
        self._bindings: list[ref[Bound]] = []

    def __call__(self, function: F) -> F:
        """Use this policy alone as a decorator."""
        # By name: a guard is made of policies, so policies cannot import it.
        guarded: F = import_module("seawall.guard").Guard.alone(self, function)
        return guarded

    def bind(self, host: Host) -> Bound:
        """Become part of `host`."""
        bound = self._bind(host)
        kept = [known for known in self._bindings if known() is not None]
        self._bindings = [*kept, ref(bound)]  # swapped whole: others read it meanwhile
        return bound

    @property
    def bindings(self) -> list[Bound]:
        """What binds this policy to the guards that it is part of."""
        return [bound for known in self._bindings if (bound := known()) is not None]

    def update(self, **changes: Any) -> None:
        """Change settings at run time; state and calls in flight are kept.

        Takes the names of the constructor's arguments. Bad values raise and change nothing.
        """
        if not changes:
            raise TypeError(f"{type(self).__name__}.update(): name what to change")
        self._update(changes)
        for bound in self.bindings:
            emit(SettingsChanged, bound.host.name, policy=self.kind, changes=changes)

    def _bind(self, host: Host) -> Bound:
        raise NotImplementedError

    def _at_rest(self, now: float) -> bool:
        """Tell whether forgetting its state would break no bound and let nobody off."""
        return True

    def _update(self, changes: dict[str, Any]) -> None:
        raise TypeError(f"{type(self).__name__} has nothing that can be changed at run time")

    def _reject_unknown(self, changes: dict[str, Any], known: tuple[str, ...]) -> None:
        for name in changes:
            if name not in known:
                listed = ", ".join(known)
                raise TypeError(f"{type(self).__name__}.update({name}=...): it takes {listed}")


class GatePolicy(Policy):
    """A policy that admits or refuses. It acts (`enforce`), only counts (`shadow`), or is `off`."""

    def __init__(self, mode: Mode) -> None:
        """Begin in `mode`."""
        super().__init__()
        self.mode: Mode = check.choice("mode", mode, MODES)


class GateBound(Layer, Bound):
    """A gate inside one guard."""

    policy: GatePolicy

    def __init__(self, policy: GatePolicy, host: Host) -> None:
        """Belong to `host`; nothing refused yet."""
        super().__init__(policy, host)
        self.refused = 0
        self.would_refuse = 0

    def layer(self, kind: Kind) -> Layer:
        """Return this gate: one for sync and async."""
        return self

    def refuse(self, error: Rejected) -> None:
        """Raise `error` if the policy is to be enforced; else count it and admit."""
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
            del error  # or its own frame would keep it alive

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the mode and how many calls of this guard were, or would have been, refused."""
        return {
            "mode": self.policy.mode,
            "rejected": self.refused,
            "would_reject": self.would_refuse,
        }
