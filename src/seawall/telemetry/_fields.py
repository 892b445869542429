"""An event's values as those who write them down can take them."""

from __future__ import annotations

from math import isfinite
from typing import Final, TypeAlias

from seawall._redaction import printable
from seawall.runtime.events import Event

LONGEST_VALUE: Final = 500

Value: TypeAlias = str | bool | int | float


def values_of(event: Event) -> dict[str, Value]:
    """Return the event's values by name, as text or numbers. What has no value is left out."""
    values: dict[str, Value] = {}
    for name, value in event.fields().items():
        if isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value)):
            values[name] = value
        elif value is not None:
            values[name] = str(value)
    return values


def fields_of(values: dict[str, Value], prefix: str) -> dict[str, Value]:
    """Return `values` by prefixed name: no text has control characters in it, or is long."""
    return {
        prefix + name: printable(value, LONGEST_VALUE) if isinstance(value, str) else value
        for name, value in values.items()
    }
