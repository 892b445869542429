"""From a stack of bound policies to a function: layers inline, drivers around their inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from seawall.runtime.fastpath import Binder, FastPath
from seawall.runtime.layers import Driver, Host, Kind, Layer
from seawall.runtime.parameters import ANY, Parameters
from seawall.runtime.policy import Bound
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.verdicts import CollectedGate, VerdictCollector

Function = Callable[..., Any]


class Plan:
    """How the calls of one guard run; compiled on first use."""

    def __init__(self, host: Host, bounds: Sequence[Bound], around: Layer | None = None) -> None:
        """Go through `bounds`, the first outermost; with a layer `around` all of them."""
        self._host = host
        self._outermost = [] if around is None else [around]
        self._bounds = bounds
        self._segments: dict[tuple[int, Kind, bool], _Segment] = {}
        self._binders: dict[Kind, Binder] = {}  # makers of guarded functions, without a driver

    def bind(self, function: Function, kind: Kind, parameters: Parameters = ANY) -> Function:
        """Return `function` with all layers around it, taking `parameters`."""
        binder = self._binders.get(kind)
        if binder is not None and parameters is ANY:  # guard.call() takes this path at each call
            return binder(function, ())
        segment = self._segment(0, kind, in_thread=False)
        if segment.driver is None:
            self._binders[kind] = segment.path.binder(ANY)
            return segment.path.bind(function, parameters)
        inner = self._inside(segment, function, kind, interpreted=False)
        return segment.path.bind(inner, parameters)

    def bind_interpreted(self, function: Function, kind: Kind) -> Function:
        """Return `function` with all layers around it, without the fast path."""
        segment = self._segment(0, kind, in_thread=False)
        return self._around(segment, function, kind, interpreted=True)

    @property
    def runs_in_threads(self) -> bool:
        """Whether an async call runs a plain function through a driver."""
        return self._segment(0, "async", in_thread=False).driver is not None

    def check(self, kind: Kind) -> None:
        """Raise if a function of that kind cannot be innermost."""
        for bound in self._bounds:
            layer = bound.layer(kind)
            if isinstance(layer, Driver) and layer.inner_kind(kind) != kind:
                raise TypeError(
                    f"guard {self._host.name!r}: {bound.policy!r} runs plain functions in threads,"
                    " not async ones: guard the blocking function, and `await guard.acall(it)`"
                )

    def _around(
        self, segment: _Segment, function: Function, kind: Kind, *, interpreted: bool
    ) -> Function:
        if segment.driver is not None:
            function = self._inside(segment, function, kind, interpreted=interpreted)
        return segment.path.interpreted(function) if interpreted else segment.path.bind(function)

    def _inside(
        self, segment: _Segment, function: Function, kind: Kind, *, interpreted: bool
    ) -> Function:
        """Return the function that the segment's driver makes of everything inside it."""
        driver = segment.driver
        assert driver is not None  # noqa: S101 - for the type checker
        inner_kind = driver.inner_kind(kind)
        in_thread = segment.in_thread or inner_kind != kind or isinstance(driver, ThreadDriver)
        inner = self._segment(
            segment.end + 1, inner_kind, in_thread=in_thread, repeated=segment.repeated
        )
        inside = self._around(inner, function, inner_kind, interpreted=interpreted)
        wrapped = driver.wrap(self._host, inside, kind, function)
        wrapped.seawall_bare = function, kind  # type: ignore[attr-defined]
        return wrapped

    def layers(self, kind: Kind, purpose: str) -> list[Layer]:
        """Return all layers; raise if one is a driver. `purpose` is for the error message."""
        layers = [(bound, bound.layer(kind)) for bound in self._bounds]
        for bound, layer in layers:
            if isinstance(layer, Driver):
                raise TypeError(f"guard {self._host.name!r}: {bound.policy!r} cannot {purpose}")
        return self._outermost + [layer for _, layer in layers if isinstance(layer, Layer)]

    def _segment(
        self, start: int, kind: Kind, *, in_thread: bool, repeated: bool = False
    ) -> _Segment:
        known = self._segments.get((start, kind, in_thread))
        if known is not None:
            return known
        layers = [] if start else list(self._outermost)
        driver: Driver | None = None
        end = start
        for bound in self._bounds[start:]:
            layer = bound.layer(kind)
            if isinstance(layer, Driver):
                driver = layer
                break
            if layer.attempted is not None and repeated:
                layer = CollectedGate(layer, self._host)
            layers.append(layer)
            end += 1
        if driver is not None and not repeated:
            # Attempts of a retry that pass a driver before gates count them need a collector.
            retry = next((n for n, layer in enumerate(layers) if layer.repeats), None)
            inside = self._bounds[end + 1 :]
            if retry is not None and any(getattr(one, "attempted", None) for one in inside):
                layers.insert(retry, VerdictCollector(self._host))
        repeated = repeated or any(layer.repeats for layer in layers)
        path = FastPath(self._host, layers, kind, counts=driver is None, in_thread=in_thread)
        segment = _Segment(path, driver, end, in_thread, repeated)
        self._segments[start, kind, in_thread] = segment
        return segment


class _Segment(NamedTuple):
    """Consecutive layers, and the driver that ends them (at position `end`), if any."""

    path: FastPath
    driver: Driver | None
    end: int
    in_thread: bool
    repeated: bool  # whether a flow in it, or further out, may repeat what is inside
