"""The Django app: the setting `SEAWALL` of a project, and its checks.

    SEAWALL = {
        "TIMEOUT": 10.0,
        "LIMITS": [RequestLimit("600/min", by="address")],
    }

The names are those of the parts of an edge, in capitals: see `seawall.web.fastapi.protect` for ASGI
and `seawall.web.wsgi.Edge` for WSGI.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any, Final, Literal

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004 - Django's name
    register,
)

from seawall import registry
from seawall.web.edge.edge import EdgeParts, default_edge
from seawall.web.wsgi import Edge as WsgiEdge

MIDDLEWARE: Final = "seawall.web.django.ErrorMiddleware"

Server = Literal["asgi", "wsgi"]

_PARTS: Final[Mapping[Server, frozenset[str]]] = {
    "asgi": frozenset(EdgeParts.__annotations__),
    "wsgi": frozenset(signature(WsgiEdge).parameters) - {"app", "clock"},
}
_KNOWN: Final = sorted(part.upper() for part in _PARTS["asgi"] | _PARTS["wsgi"])


class SeawallConfig(AppConfig):  # type: ignore[misc]  # it has no types
    """Seawall in a Django project; it has no models."""

    name = "seawall.web.django"
    label = "seawall"
    verbose_name = "Seawall"

    def ready(self) -> None:
        """Register the checks."""
        register(check_settings, "seawall")


def edge_parts(server: Server) -> Any:
    """Return the parts in `SEAWALL` that an edge for this kind of server has."""
    given = getattr(settings, "SEAWALL", {})
    return {part: given[part.upper()] for part in _PARTS[server] if part.upper() in given}


def check_settings(**_kwargs: Any) -> list[CheckMessage]:
    """Return what is wrong with `SEAWALL`, and whether the middleware is missing."""
    given = getattr(settings, "SEAWALL", {})
    if not isinstance(given, Mapping):
        hint = 'Write SEAWALL = {"TIMEOUT": 10.0}.'
        return [Error(f"SEAWALL is {given!r}, not a dict.", hint=hint, id="seawall.E001")]
    found: list[CheckMessage] = [_unknown(name) for name in given if name not in _KNOWN]
    wrong = dict.fromkeys(filter(None, (_refused("asgi"), _refused("wsgi"))))  # each once
    found += [Error(f"SEAWALL: {message}", id="seawall.E003") for message in wrong]
    if MIDDLEWARE not in settings.MIDDLEWARE:
        message = "Errors of Seawall are answered with 500: its middleware is not installed."
        hint = f'Put "{MIDDLEWARE}" first in MIDDLEWARE.'
        found.append(Warning(message, hint=hint, id="seawall.W001"))
    return found


def _unknown(name: object) -> CheckMessage:
    near = get_close_matches(str(name).upper(), _KNOWN, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known are {', '.join(_KNOWN)}."
    return Error(f"SEAWALL has no setting {name!r}.", hint=hint, id="seawall.E002")


def _refused(server: Server) -> str | None:
    """Return why an edge with these settings cannot be made: one is made, and closed."""
    parts = edge_parts(server)
    if parts.get("name"):
        parts["name"] = registry.free_name(f"check of {parts['name']}")
    try:
        if server == "asgi":
            default_edge(_never_called, **parts).close()
        else:  # without what listens to signals
            WsgiEdge(_never_called, **parts | {"lifecycle": None}).close()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _never_called(*_args: Any) -> Any:
    """Stand for the application while the settings are checked."""
