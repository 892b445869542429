"""Matching of requests to a few configured route templates, and gates for single routes.

Promises:

- Inside a Starlette or FastAPI app, a template written as the app writes it applies to a request
  exactly if the app dispatches the request to that route: the app's own router decides (see
  `seawall.web.edge.dispatch`).
- Around any other app, and for templates that name no route of the app, a template is matched
  against the path with the rules of Starlette: the first match in the given order counts. Where a
  framework could read the path in another way (a trailing slash, a root path that ends with one),
  the template applies as well.
- Matching takes time linear in the length of the path, and returns a configured template or
  `OTHER`: callers cannot invent names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from seawall.clock import Clock
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.registry import release
from seawall.runtime.policy import GateBound
from seawall.web.request import path_below_root, route_path

if TYPE_CHECKING:
    from seawall.web.edge.dispatch import Dispatch

OTHER: Final = "other"
"""Name for every request that matches none of the templates."""

_MOST: Final = 1000
_PARAMETER: Final = re.compile(r"{([a-zA-Z_][a-zA-Z0-9_]*)(?::([a-zA-Z_][a-zA-Z0-9_]*))?}")
_ANY: Final = "(?s:.*)"
_CONVERTORS: Final = {
    "str": "[^/]+",
    "path": ".*",
    "int": "[0-9]+",
    "float": r"[0-9]+(?:\.[0-9]+)?",
    "uuid": "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}",
}
"""Patterns of Starlette's convertors. Any other convertor belongs to the app and may match
anything."""

_SAMPLES: Final = {
    "str": ("~~",) * 3,
    "int": ("7306590",) * 3,
    "float": ("7306590.25",) * 3,
    "uuid": ("7306590a-7306-4590-8730-6590a7306590",) * 3,
}
"""Values of each convertor that no template contains as literal text."""
_SAMPLES_OF_ANY: Final = ("", "~~", "~~/" * 20)


def dispatch_of(app: Any) -> Dispatch | None:
    """Return a lookup in the router of `app`, if a Starlette or FastAPI router is found."""
    if "starlette.routing" not in sys.modules:
        return None
    from seawall.web.edge.dispatch import Dispatch, behind

    found = behind(app)
    return None if found is None else Dispatch(found)


class Routes:
    """Templates such as "/search", "/orders/{id:int}", "/files/{name:path}" or "/admin/*".

    A trailing `*` matches any rest. The order counts, as in an app: a template that could never
    match, because an earlier one matches all of its paths, raises `ValueError`.
    """

    def __init__(self, templates: Iterable[str]) -> None:
        self.templates = tuple(templates)
        if len(self.templates) > _MOST:
            raise ValueError(f"{len(self.templates)} routes: give {_MOST} at most")
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for template in self.templates:
            pattern = _compiled(template)
            samples = list(_samples(template))
            for earlier, before in self._patterns:
                if all(before.match(sample) for sample in samples):
                    raise ValueError(
                        f"route {template!r}: {earlier!r} matches the same paths and comes first;"
                        f" write {template!r} before it, or leave one of them out"
                    )
            self._patterns.append((template, pattern))
        self._by_shape = {shape_of(template): template for template in self.templates}
        self._unnamed: tuple[object, list[tuple[str, re.Pattern[str]]]] = (None, [])
        """The patterns that name no route of an app, cached for the app's set of route shapes."""

    def __repr__(self) -> str:
        return f"Routes({', '.join(map(repr, self.templates))})"

    def of(self, scope: Mapping[str, Any], dispatch: Dispatch | None = None) -> str:
        """Return the template that a request matches, or `OTHER`.

        `dispatch` looks up the route in the router of the request's app.
        """
        patterns = self._patterns
        if dispatch is not None:
            found = dispatch.ask(scope).shape
            if found is None or found:  # otherwise the route is not predictable
                if found in self._by_shape:
                    return self._by_shape[found]
                shapes, unnamed = dispatch.shapes, self._unnamed
                if unnamed[0] is not shapes:
                    others = [pair for pair in patterns if shape_of(pair[0]) not in shapes]
                    unnamed = self._unnamed = shapes, others
                patterns = unnamed[1]
        if patterns:
            for path in _readings(scope):
                for template, pattern in patterns:
                    if pattern.match(path):
                        return template
        return OTHER


class RouteGates:
    """The gates that requests enter: some routes have a gate of their own before the common ones.

    Each template has its own guard, so that its state is visible.
    """

    def __init__(
        self,
        name: str,
        routes: Mapping[str, AdaptiveLimit | Bulkhead],
        common: tuple[GateBound, ...],
        clock: Clock,
    ) -> None:
        self._routes = Routes(routes)
        self._guards = {
            path: release(Guard(f"{name} {path}", limit, clock=clock))
            for path, limit in routes.items()
        }
        self._gates: dict[str, tuple[Any, ...]] = {
            path: (guard.bounds[0], *common) for path, guard in self._guards.items()
        }
        self._common = common

    def of(self, scope: Mapping[str, Any], dispatch: Dispatch | None) -> tuple[Any, ...]:
        """Return the gates of a request, in their order."""
        return self._gates.get(self._routes.of(scope, dispatch), self._common)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of each route's gate, by path template."""
        return {path: guard.snapshot()["policies"][0] for path, guard in self._guards.items()}

    def close(self) -> None:
        """Free the names of the guards."""
        for guard in self._guards.values():
            guard.close()


def shape_of(template: str) -> str:
    """Return a template without the names of its parameters, which do not affect matching."""
    return _PARAMETER.sub(lambda found: f"{{:{found[2] or 'str'}}}", template)


def _readings(scope: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path below the app's root in all the ways that a framework could read it.

    First as Starlette does. Then with the root path without its trailing slash. Then with the
    trailing slash of the path removed or added: some frameworks redirect, others just serve it.
    """
    path = route_path(scope)
    yield path
    tolerant = path_below_root(scope)
    if tolerant != path:
        yield tolerant
    for reading in {path: None, tolerant: None}:
        yield reading.rstrip("/") or "/" if reading.endswith("/") else f"{reading}/"


def _compiled(template: str) -> re.Pattern[str]:
    """Return a pattern for the paths of a template, as Starlette would compile it.

    Regular expressions that could backtrack at length are replaced by ones that match more: for
    several parameters in one segment, and from a second parameter on that matches slashes.
    """
    if not isinstance(template, str) or not template.startswith("/"):
        raise ValueError(f"route {template!r}: write a path, such as '/orders/{{id}}'")
    body, star = (template[:-1], _ANY) if template.endswith("/*") else (template, "")
    if "*" in body:
        raise ValueError(f"route {template!r}: a * stands at the end, such as '/files/*'")
    written = []
    slashes = 0
    for segment in body.split("/"):
        literals = _PARAMETER.split(segment)[::3]
        kinds = [found[2] or "str" for found in _PARAMETER.finditer(segment)]
        for literal in literals:
            if "{" in literal or "}" in literal:
                raise ValueError(
                    f"route {template!r}: {segment!r} has a brace that belongs to no parameter;"
                    " write {name} or {name:int}"
                )
        crosses = any(kind == "path" or kind not in _CONVERTORS for kind in kinds)
        slashes += crosses
        if slashes > 1 or (crosses and star):
            written.append(re.escape(literals[0]) + _ANY)
            star = ""
            break
        if not kinds:
            written.append(re.escape(segment))
        elif len(kinds) == 1:
            middle = _CONVERTORS.get(kinds[0], _ANY)
            written.append(re.escape(literals[0]) + middle + re.escape(literals[1]))
        else:
            written.append(re.escape(literals[0]) + (_ANY if crosses else "[^/]+"))
    return re.compile("/".join(written) + star + "$")


def _samples(template: str) -> Iterator[str]:
    """Yield three paths that the template matches."""
    parts = _PARAMETER.split(template)
    literals, kinds = parts[::3], parts[2::3]
    if template.endswith("/*"):
        literals[-1] = literals[-1][:-1]
        kinds, literals = [*kinds, "path"], [*literals, ""]
    for number in range(3):
        values = [_SAMPLES.get(kind or "str", _SAMPLES_OF_ANY)[number] for kind in kinds]
        pairs = zip(literals, [*values, ""], strict=True)
        yield "".join(literal + value for literal, value in pairs)
