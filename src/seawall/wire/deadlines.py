"""Headers with the remaining time of a request.

All known headers are read and the smallest value counts, so that the time never grows along a
chain: written values are rounded down, and reading never yields more than was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from seawall.wire.text import A_YEAR, decimal_of, text_of, whole_of

GRPC: Final = "grpc-timeout"
"""How long the caller waits: 1 to 8 digits and a unit of H, M, S, m, u or n, such as `250m`."""
ENVOY: Final = "x-envoy-expected-rq-timeout-ms"
"""How long the caller waits, in milliseconds."""
SERVER: Final = "x-server-timeout"
"""How long the caller waits, in seconds."""
TIMEOUT_HEADERS: Final = frozenset({GRPC, ENVOY, SERVER})
"""Headers that say how long the caller waits, in lower case."""
_GRPC: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS: Final = {"H": 3600, "M": 60, "S": 1}
_IN_A_SECOND: Final = {"m": 10**3, "u": 10**6, "n": 10**9}


def read_timeout(name: str, value: str | bytes) -> float | None:
    """Return the seconds in the header `name`, 0 if it is over; None if unknown or invalid."""
    text = text_of(value)
    if text is None:
        return None
    seconds: float | None = None
    if name == ENVOY:
        milliseconds = whole_of(text)
        seconds = None if milliseconds is None else milliseconds / 1000
    elif name == SERVER:
        seconds = decimal_of(text)
    elif name == GRPC:
        found = _GRPC.fullmatch(text)
        if found is None:
            return None
        count, unit = int(found[1]), found[2]
        # Divided, not multiplied by 0.001: that yields the nearest float to the text.
        seconds = count * _SECONDS[unit] if unit in _SECONDS else count / _IN_A_SECOND[unit]
    return None if seconds is None or seconds > A_YEAR else float(seconds)


def least_timeout(pairs: Iterable[tuple[bytes | str, bytes | str]]) -> float | None:
    """Return the smallest timeout of the known headers, or None; contradictions are ignored."""
    given: dict[str, str | bytes | None] = {}
    for raw_name, value in pairs:
        name = raw_name.decode("latin-1") if isinstance(raw_name, bytes) else raw_name
        name = name.lower()
        if name in TIMEOUT_HEADERS:
            given[name] = value if given.get(name, value) == value else None
    least: float | None = None
    for name, text in given.items():
        seconds = None if text is None else read_timeout(name, text)
        if seconds is not None and (least is None or seconds < least):
            least = seconds
    return least


def write_timeout(seconds: float) -> list[tuple[str, str]]:
    """Return the headers for a call that has `seconds` left; none for more than a year."""
    if not seconds <= A_YEAR:
        return []
    milliseconds = _round_down(seconds, 1000)
    in_seconds = f"{milliseconds // 1000}.{milliseconds % 1000:03d}"
    return [(ENVOY, str(milliseconds)), (SERVER, in_seconds)]


def _round_down(seconds: float, units: int) -> int:
    """Return how many whole units of a second fit, such that reading them never yields more."""
    count = int(max(0.0, seconds) * units)
    # The product may have been rounded up to an integer.
    return count - 1 if count / units > seconds and count else count
