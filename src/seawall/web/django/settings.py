"""The setting `SEAWALL` of a Django project, and its checks.

    SEAWALL = {
        "TIMEOUT": 10.0,
        "LIMITS": [RequestLimit("600/min", by="address")],
    }

The names are those of the parts of `seawall.web.fastapi.protect`, in capitals.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's name

from seawall.web.edge.defaults import EdgeParts, default_edge

MIDDLEWARE: Final = "seawall.web.django.ErrorMiddleware"

_KNOWN: Final = {name.upper(): name for name in EdgeParts.__annotations__}


def edge_parts() -> EdgeParts:
    """Return the parts of the edge that `SEAWALL` names."""
    given = getattr(settings, "SEAWALL", {})
    parts: Any = {part: given[name] for name, part in _KNOWN.items() if name in given}
    return parts  # type: ignore[no-any-return]


def check_settings(**_kwargs: Any) -> list[CheckMessage]:
    """Return what is wrong with `SEAWALL`, and whether the middleware is missing."""
    given = getattr(settings, "SEAWALL", {})
    if not isinstance(given, Mapping):
        hint = 'Write SEAWALL = {"TIMEOUT": 10.0}.'
        return [Error(f"SEAWALL is {given!r}, not a dict.", hint=hint, id="seawall.E001")]
    found: list[CheckMessage] = [_unknown(name) for name in given if name not in _KNOWN]
    if not found:
        try:
            default_edge(_never_called, **edge_parts()).close()
        except (TypeError, ValueError) as error:
            hint = "The settings are those of protect(app, ...), in capitals."
            found.append(Error(f"SEAWALL: {error}", hint=hint, id="seawall.E003"))
    if MIDDLEWARE not in settings.MIDDLEWARE:
        said = "Errors of Seawall are answered with 500: its middleware is not installed."
        hint = f'Put "{MIDDLEWARE}" first in MIDDLEWARE.'
        found.append(Warning(said, hint=hint, id="seawall.W001"))
    return found


def _unknown(name: object) -> CheckMessage:
    near = get_close_matches(str(name).upper(), _KNOWN, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known are {', '.join(sorted(_KNOWN))}."
    return Error(f"SEAWALL has no setting {name!r}.", hint=hint, id="seawall.E002")


async def _never_called(_scope: Any, _receive: Any, _send: Any) -> None:
    """Stand for the application while the settings are checked."""
