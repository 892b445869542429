"""Limits on concurrent requests for single routes, found by their path templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seawall.clock import Clock
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.registry import release
from seawall.runtime.policy import GateBound
from seawall.web.routes import Routes

if TYPE_CHECKING:
    from seawall.web.edge.dispatch import Dispatch


class RouteGates:
    """Gates of some routes. Each template has its own guard, so that its state is visible."""

    def __init__(
        self, name: str, routes: Mapping[str, AdaptiveLimit | Bulkhead], clock: Clock
    ) -> None:
        """Create the gates for the edge called `name`."""
        self._routes = Routes(routes)
        self._guards = {
            path: release(Guard(f"{name} {path}", limit, clock=clock))
            for path, limit in routes.items()
        }
        self._gates: dict[str, Any] = {
            path: guard.bounds[0] for path, guard in self._guards.items()
        }

    def of(self, scope: Mapping[str, Any], dispatch: Dispatch | None) -> GateBound | None:
        """Return the gate of the request's route; None if it has none."""
        gate: GateBound | None = self._gates.get(self._routes.of(scope, dispatch))
        return gate

    def snapshot(self) -> dict[str, Any]:
        """Return the state of each gate, by path template."""
        return {path: guard.snapshot()["policies"][0] for path, guard in self._guards.items()}

    def close(self) -> None:
        """Free the names of the guards."""
        for guard in self._guards.values():
            guard.close()
