"""Protocols between breakers and a store that keeps their models for all pods."""

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
    """What a share knows of its policy; methods may be called from any thread."""

    @property
    def mutex(self) -> Mutex:
        """The lock of its models."""

    def now(self) -> float:
        """Return the time of the policy's clock."""

    def report(self, model: BreakerModel, key: Hashable) -> None:
        """Report the state changes that `model` has recorded. Called without the lock."""

    def mode_changed(self, before: str, after: str, cause: str) -> None:
        """Report that the policy continues without its store, or with it again.

        Without the lock.
        """

    def settings_differ(self, own: str, other: str) -> None:
        """Report that another pod has other settings."""


class BreakerShare(Protocol):
    """The models of one policy, each the same in all pods.

    They are used like any model, under the owner's lock. If `admit` answers that the state is
    "unknown", `ask` finds it out.
    """

    def model(self, key: Hashable) -> BreakerModel:
        """Return the model of `key`, which is new to this pod."""

    def forget(self, model: BreakerModel) -> None:
        """Stop following this model; what the store knows of it stays."""

    def begin(self) -> None:
        """Start exchanging state with the store. Called often, without the lock."""

    def ask(self, kind: Kind, model: BreakerModel, clock: Clock) -> Waiter:
        """Return a waiter for the store's decision; its `claim` returns what `admit` would.

        It never raises: if the store cannot answer, the configured failure mode applies.
        """

    def update(self, settings: BreakerSettings) -> None:
        """Publish other settings from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the sharing."""


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
