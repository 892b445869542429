"""Rates as text such as "60/s", parsed into whole numbers: a limit and a period."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MICROSECONDS: Final = 1_000_000

EXACT: Final = 2**53  # below it a float holds every whole number: Python and Lua agree
ROUND: Final = 6755399441055744.0  # 1.5 * 2**52: added to a float and subtracted, it rounds
_UNITS: Final[dict[str, int]] = {
    "ms millisecond milliseconds": 1_000,
    "s sec secs second seconds": MICROSECONDS,
    "m min mins minute minutes": 60 * MICROSECONDS,
    "h hr hrs hour hours": 3_600 * MICROSECONDS,
    "d day days": 86_400 * MICROSECONDS,
    "w week weeks": 604_800 * MICROSECONDS,
}
_LENGTHS: Final = {name: length for names, length in _UNITS.items() for name in names.split()}
_SHOWN: Final = 60
_TIMES: Final[dict[str, int]] = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000}
_NUMBER: Final = r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,9})?)"
_SPEC: Final = re.compile(
    rf"\s{{0,9}}{_NUMBER} ?([kKM]?)(?: ?/ ?| per )(?:{_NUMBER} ?)?([A-Za-z]{{1,12}})\s{{0,9}}"
)


def whole_microseconds(seconds: float) -> float:
    """Return whole microseconds, as a float: faster than an integer, and exact below 2**53."""
    return seconds * 1e6 + ROUND - ROUND


class Rate(NamedTuple):
    """At most `limit` in each `period` of whole microseconds."""

    limit: int
    period: int

    @classmethod
    def parse(cls, text: object) -> Rate:
        """Parse "60/s", "1000/min", "10k/day", "5 per second", "100/15min"; raise on anything else.

        k is a thousand and M a million. Units are ms, s, min, h, day and week, also written out.
        """
        if not isinstance(text, str):
            raise TypeError(f"rate {_shown(text)}: write text, such as '60/s' or '1000/min'")
        match = _SPEC.fullmatch(text)
        length = _LENGTHS.get(match[4].lower()) if match else None
        if match is None or length is None:
            raise ValueError(
                f"rate {_shown(text)}: write a number, a slash and a unit of time (ms, s, min, h,"
                " day, week), such as '60/s', '10k/day' or '100/15min'"
            )
        limit = _scaled(text, match[1], _TIMES[match[2]])
        return cls(limit, _scaled(text, match[3] or "1", length))


def _shown(value: object) -> str:
    """Return the repr of `value` for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _scaled(text: str, number: str, by: int) -> int:
    """Return `number` times `by`, or raise unless it is a whole number of at least 1."""
    digits, _, decimals = number.replace("_", "").partition(".")
    one: int = 10 ** len(decimals)
    value, rest = divmod(int(digits + decimals) * by, one)
    if rest or not 1 <= value < EXACT:
        raise ValueError(
            f"rate {_shown(text)}: write whole numbers of at least 1, such as '1/2s' for one in two"
            " seconds"
        )
    return value
