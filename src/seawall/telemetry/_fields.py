"""An event's values as those who write them down can take them."""

from __future__ import annotations

from math import isfinite
from typing import Final

from seawall.runtime.events import Event

LONGEST_VALUE: Final = 500


def fields_of(event: Event, prefix: str) -> dict[str, str | bool | int | float]:
    """Return the event's values by prefixed name: plain ones, none of them long.

    What has no value is left out.
    """
    told: dict[str, str | bool | int | float] = {}
    for name, value in event.fields().items():
        if isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value)):
            told[prefix + name] = value
        elif value is not None:
            told[prefix + name] = str(value)[:LONGEST_VALUE]
    return told
