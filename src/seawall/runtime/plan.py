"""From a stack of bound policies to a function: layers inline, drivers around their inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seawall.runtime.fastpath import FastPath
from seawall.runtime.layers import Driver, Host, Kind, Layer
from seawall.runtime.parameters import ANY, Parameters
from seawall.runtime.policy import Bound

Function = Callable[..., Any]


class Plan:
    """How the calls of one guard run; compiled when first needed."""

    def __init__(self, host: Host, bounds: Sequence[Bound]) -> None:
        """Go through `bounds`, the first outermost."""
        self._host = host
        self._bounds = bounds
        self._segments: dict[tuple[int, Kind], tuple[FastPath, Driver | None, int]] = {}

    def bind(self, function: Function, kind: Kind, parameters: Parameters = ANY) -> Function:
        """Return `function` with all layers around it, taking `parameters`."""
        return self._bind(function, kind, parameters, 0)

    def _bind(self, function: Function, kind: Kind, parameters: Parameters, start: int) -> Function:
        segment = self._segments.get((start, kind))
        if segment is None:
            segment = self._segments[start, kind] = self._compile(kind, start)
        path, driver, end = segment
        if driver is not None:
            inner = self._bind(function, driver.inner_kind(kind), ANY, end + 1)
            return path.bind(driver.wrap(inner, kind, function), parameters)
        return path.bind(function, parameters)

    def layers(self, kind: Kind, purpose: str) -> list[Layer]:
        """Return all layers, where none of them may be a driver: `purpose` is for the refusal."""
        layers = [(bound, bound.layer(kind)) for bound in self._bounds]
        for bound, layer in layers:
            if isinstance(layer, Driver):
                raise TypeError(f"guard {self._host.name!r}: {bound.policy!r} cannot {purpose}")
        return [layer for _, layer in layers if isinstance(layer, Layer)]

    def _compile(self, kind: Kind, start: int) -> tuple[FastPath, Driver | None, int]:
        layers: list[Layer] = []
        for end in range(start, len(self._bounds)):
            layer = self._bounds[end].layer(kind)
            if isinstance(layer, Driver):
                return FastPath(self._host, layers, kind), layer, end
            layers.append(layer)
        return FastPath(self._host, layers, kind), None, len(self._bounds)
