"""How much is shown at most, and how text of users is made fit to be shown.

Names, keys and causes come from users, and views from other pods: all of it is bounded here, so
that no page grows without end and no name plays tricks on a terminal or a log.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Any, Final

from seawall._redaction import printable
from seawall.dashboard.views import Tone

MOST_GUARDS: Final = 200
MOST_LAYERS: Final = 32
MOST_ROWS: Final = 500
MOST_SECTIONS: Final = 20
MOST_TROUBLES: Final = 100
MOST_HAPPENINGS: Final = 100
MOST_VERBS: Final = 8
"""Different things that a happening counts of its subject."""
MOST_FACTS: Final = 16
MOST_CHANGES: Final = 16
MOST_ACTS: Final = 8
MOST_KEYS: Final = 5
"""Keys of a keyed policy that are shown by name: they are users' data."""

MOST_NODES: Final = 40
"""Sources and stages of a pipeline that are drawn."""
MOST_DRAWN: Final = 80
"""The same of all pipelines of a process: the others are told in a line."""
MOST_TRACKS: Final = MOST_ROWS + MOST_DRAWN
"""Rows, sources and stages whose past is kept."""
MOST_AT_WORK: Final = 4
"""Workers of a stage that are shown with what they do."""
MOST_CAUSES: Final = 5
"""Causes of a stage's failures, the most frequent first."""
MOST_READINGS: Final = 16
"""Readings of a source that collects many, the missing ones first."""

LONGEST_KEY: Final = 40
LONGEST_WORD: Final = 80
"""Of a state, a label, a setting's name."""
LONGEST_NAME: Final = 120
LONGEST_TEXT: Final = 200
"""Of a sentence, a value, a description of settings."""

MOST_BYTES: Final = 240 * 1024
"""Of a view as JSON: what is sent of it each second has to stay small."""

TONES: Final = ("ok", "warn", "bad", "off")

WORST: Final[tuple[Tone, ...]] = ("bad", "warn", "ok", "off")
"""The tones in the order in which they ask for attention."""

HUGE: Final = 1e15
"""Numbers are shown up to here: all readers can tell them, as a float or not."""


def shown(value: object, longest: int = LONGEST_TEXT) -> str:
    """Return `value` as text of at most `longest` characters, control characters escaped.

    What steers a terminal or turns text around is escaped too, and so is half a character.
    """
    text = value if isinstance(value, str) else str(value)
    if len(text) <= longest and text.isprintable():
        return text
    return _escaped(text[: longest + 1], longest)


# The names that need escaping are the same at each look.
_escaped = lru_cache(maxsize=1024)(printable)


def number(value: Any, default: float = 0.0) -> float:
    """Return `value` if it is a number that can be shown, else `default`. True and False are not.

    What is beyond all measure is shown as the largest number there is.
    """
    kind = type(value)
    if (kind is float or kind is int) and -HUGE <= value <= HUGE:  # the usual, and not a NaN
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    if isinstance(value, float) and not isfinite(value):
        return default
    return float(min(HUGE, max(-HUGE, value)))
