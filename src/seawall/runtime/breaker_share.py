"""What a breaker knows of a store: models that are kept for all pods, as protocols."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from seawall.runtime.layers import Kind, Waiter

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.models.breaker.settings import BreakerSettings
    from seawall.models.breaker.state import BreakerModel
    from seawall.runtime.mutex import Mutex


class BreakerOwner(Protocol):
    """What a share knows of the policy that it belongs to; any thread may call it."""

    @property
    def mutex(self) -> Mutex:
        """The lock of its models."""

    def now(self) -> float:
        """Return the time of the clock that the policy's guards have."""

    def report(self, model: BreakerModel, key: Hashable) -> None:
        """Tell of the changes of state that `model` has noted; without the lock."""

    def mode_changed(self, before: str, after: str, cause: str) -> None:
        """Tell that the policy goes on without its store, or with it again; without the lock."""

    def settings_differ(self, own: str, other: str) -> None:
        """Tell that another pod has other settings."""


class BreakerShare(Protocol):
    """The models of one policy, each the same in all pods.

    They are used as any model, under the owner's lock. Where `admit` answers that the state is
    "unknown", `ask` finds it out.
    """

    def model(self, key: Hashable) -> BreakerModel:
        """Return the model of `key`, new to this pod."""

    def forget(self, model: BreakerModel) -> None:
        """Follow this model no more; what the store knows of it stays."""

    def begin(self) -> None:
        """See to it that the store is told, and heard; without the lock. Called often."""

    def ask(self, kind: Kind, model: BreakerModel, clock: Clock) -> Waiter:
        """Return a waiter for what the store says to a call: its `claim` returns what `admit` does.

        It never raises: if the store cannot say, what was to be done then is done.
        """

    def update(self, settings: BreakerSettings) -> None:
        """Tell other settings from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return what is known of the sharing."""


class BreakerStore(Protocol):
    """A store that can keep breakers."""

    name: str

    def breaker(
        self,
        name: str,
        settings: BreakerSettings,
        owner: BreakerOwner,
        *,
        on_store_failure: str,
        quorum: int | None,
        keyed: bool,
    ) -> BreakerShare:
        """Return what is shared under `name`."""
