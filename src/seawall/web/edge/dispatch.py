"""Prediction of the route to which a Starlette or FastAPI app will dispatch a request.

The lookup takes the same steps as `Router.app`: it calls each route's `matches` in order; the first
full match counts, then the first partial one (a 405); it enters a mounted app with the scope that
the mount makes. So convertors, included routers, hosts and root paths need no second rule.

The lookup does not see a middleware between the edge and the router that rewrites paths or methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Host, Match, Mount, Router

from seawall.web.routes import shape_of

Scope = MutableMapping[str, Any]

UNKNOWN: Final = ""
"""Placeholder for a route whose template cannot be determined."""

_MOST_KNOWN: Final = 1000
_LONGEST: Final = 200
"""Maximum length of a cached path. Longer paths are looked up each time, so that clients cannot
fill the memory with them."""

_DEEPEST: Final = 50
"""Maximum depth of nested mounts. Stops the lookup in an app that is mounted in itself."""

_MOST_MIDDLEWARES: Final = 100

_FRAMEWORKS: Final = ("starlette.routing", "fastapi.routing")
"""Modules whose `matches` methods are known to look only at type, method and path."""


def behind(app: Any) -> Starlette | Router | None:
    """Return the app or router that `app` is, or that it wraps as a middleware."""
    for _ in range(_MOST_MIDDLEWARES):
        if app is None or isinstance(app, (Starlette, Router)):
            return app
        app = getattr(app, "app", None)
    return None


class Found(NamedTuple):
    """The route of a request: None if the app has none, `UNKNOWN` if it cannot be determined."""

    template: str | None
    """The template of the route, with the paths of all mounts around it."""
    shape: str | None
    """The template without the names of parameters."""
    refuses_method: bool
    """Whether the app has the path, but not for this method: it will answer 405."""


class Dispatch:
    """Lookup of the route to which an app will dispatch a request, with a bounded cache."""

    def __init__(self, app: Starlette | Router) -> None:
        """Look up the routes of `app`; routes may be added later."""
        self._app = app
        self._router: Any = getattr(app, "router", app)  # a property would cost a frame
        self._known: dict[tuple[Any, ...], Found] = {}
        self.shapes: frozenset[str] = frozenset()
        """The shapes of all routes of the app, as of the last lookup."""
        self._routes = -1
        self.by_path = False
        """Whether type, method and path of a request determine its route, so that results can be
        cached."""

    def ask(self, scope: Mapping[str, Any]) -> Found:
        """Return the route of a request."""
        path, method = scope["path"], scope.get("method")  # a websocket has none
        key = path, method, scope.get("root_path")
        if len(self._router.routes) != self._routes:
            self._read_routes()
        known = self._known.get(key)
        if known is not None:
            return known
        found, refused = _dispatched(self._app, {**scope, "fastapi": {}}, "", 0)
        answer = Found(found, found and shape_of(found), refused)
        if self.by_path and len(path) + len(method or "") <= _LONGEST:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = answer
        return answer

    def _read_routes(self) -> None:
        """Read the routes of the app: they are not known yet, or their number has changed."""
        self._routes = len(self._router.routes)
        self._known.clear()
        found = list(_leaves(self._app, "", ()))
        self.shapes = frozenset(shape_of(path) for path, _ in found if path is not None)
        self.by_path = all(plain for _, plain in found)


def _dispatched(
    app: Starlette | Router, scope: Scope, prefix: str, depth: int
) -> tuple[str | None, bool]:
    """Return the template of the route to which `app` dispatches, behind `prefix`.

    The second value is whether the route does not support the method.
    """
    if depth > _DEEPEST:
        return UNKNOWN, False
    root = getattr(app, "root_path", None)  # set by FastAPI, replaces the scope's
    if root:
        scope["root_path"] = root
    partial: tuple[BaseRoute, Any] | None = None
    for route in app.routes:
        try:
            match, child = route.matches(scope)
        except Exception:  # noqa: BLE001 - from a convertor: the app will hit the same error
            match, child = Match.FULL, {}
        if match is Match.FULL:
            return _template(route, child, scope, prefix, depth)
        if match is Match.PARTIAL and partial is None:
            partial = route, child
    if partial is None:
        return None, False
    return _template(*partial, scope, prefix, depth)[0], True


def _template(
    route: Any, child: Any, scope: Scope, prefix: str, depth: int
) -> tuple[str | None, bool]:
    """Return the template of a matched route, or of the route inside of it."""
    while _is_included(route):
        try:
            _, child, route, context = route._match(scope)
        except Exception:  # noqa: BLE001 - as in `_dispatched`
            return UNKNOWN, False
        if route is None:
            return UNKNOWN, False
        if context is not None:
            route = context.starlette_route or context
    path = getattr(route, "path", "")
    if not isinstance(path, str):
        return UNKNOWN, False
    if isinstance(route, (Mount, Host)):
        inner = _mounted(route)
        if inner is None:
            return prefix + path, False
        return _dispatched(inner, {**scope, **child}, prefix + path, depth + 1)
    return prefix + path if path else UNKNOWN, False


def _leaves(
    app: Starlette | Router, prefix: str, outer: tuple[Any, ...]
) -> Iterator[tuple[str | None, bool]]:
    """Yield the templates of all routes of `app`, and whether path and method determine each.

    A mount whose routes are known yields None as its own template.
    """
    waiting: list[Any] = list(app.routes)
    while waiting:
        route: Any = waiting.pop()
        if _is_included(route):
            contexts = route.effective_route_contexts()
            waiting += [context.starlette_route or context for context in contexts]
            continue
        path = prefix + str(getattr(route, "path", None) or "")
        inner = _mounted(route) if isinstance(route, (Mount, Host)) else None
        yield path if inner is None else None, _is_plain(route)
        if inner is not None and not any(inner is known for known in (app, *outer)):
            yield from _leaves(inner, path, (app, *outer))


def _mounted(route: Any) -> Starlette | Router | None:
    return behind(route.app) or behind(getattr(route, "_base_app", None))


def _is_included(route: Any) -> bool:
    """Return whether this is FastAPI's placeholder for the routes of an included router."""
    return hasattr(route, "_match") and hasattr(route, "effective_route_contexts")


def _is_plain(route: Any) -> bool:
    """Return whether a route looks only at type, method and path of a request."""
    kind = type(getattr(route, "original_route", route))  # of an included router's route
    matches = getattr(kind, "matches", None)
    written_in = getattr(matches, "__module__", None)
    return written_in in _FRAMEWORKS and not issubclass(kind, Host)
