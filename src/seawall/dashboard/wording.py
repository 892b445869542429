"""Numbers as text, short enough for a small screen."""

from __future__ import annotations

from typing import Any, Final

from seawall._redaction import redacted
from seawall.dashboard.bounds import LONGEST_NAME, number, shown

_MINUTE: Final = 60.0
_HOUR: Final = 3600.0
_DAY: Final = 86400.0


def seconds(value: Any) -> str:
    """Return a duration such as "0.4 ms", "120 ms", "0.5 s", "15 s", "3 min" or "2 h"."""
    amount_of_time = number(value)
    if abs(amount_of_time) < 0.1:  # noqa: PLR2004 - milliseconds are easier to read
        return f"{amount_of_time * 1000:.3g} ms" if amount_of_time else "0 s"
    if abs(amount_of_time) < 2 * _MINUTE:
        return f"{amount_of_time:.3g} s"
    if abs(amount_of_time) < 2 * _HOUR:
        return f"{amount_of_time / _MINUTE:.3g} min"
    if abs(amount_of_time) < 2 * _DAY:
        return f"{amount_of_time / _HOUR:.3g} h"
    return f"{amount(round(amount_of_time / _DAY))} days"


def until_probe(retry_after: Any) -> str:
    """Return how long an open breaker refuses calls: until the next call is a probe."""
    if retry_after is None:
        return "calls are refused"
    left = round(number(retry_after), 1)
    return f"calls are refused for {seconds(left)} more" if left > 0 else "the next call probes"


def share(value: Any) -> str:
    """Return a share in percent, such as "10 %"."""
    return f"{number(value) * 100:.3g} %"


def amount(value: Any) -> str:
    """Return a number for reading: integers in full, others with three digits."""
    figure = number(value)
    return str(int(figure)) if figure == int(figure) else f"{figure:.3g}"


def truth(value: bool) -> str:  # noqa: FBT001 - the value itself
    """Return yes or no."""
    return "yes" if value else "no"


def rate(value: Any) -> str:
    """Return a rate per second."""
    return f"{number(value):.3g}/s"


def several(value: Any, one: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 call", "3 calls"."""
    count = amount(value)
    return f"{count} {one if count == '1' else many or one + 's'}"


def use(used: Any, of: Any) -> str:
    """Return the used part of something: "3 of 20 in use"."""
    return f"{amount(used)} of {amount(of)} in use"


def plainly(kind: str) -> str:
    """Return an identifier as readable text: "half_open" becomes "half open"."""
    return shown(kind.replace("_", " "), LONGEST_NAME)


def address(value: Any) -> str:
    """Return an address without possible secrets in its URL."""
    text = str(value)
    return shown(redacted(text) if "@" in text or "?" in text else text, LONGEST_NAME)
