"""Limits on what is shown, and sanitizing of users' texts.

Names, keys and causes come from users, and views from other pods: all of it is bounded here, so
that no page grows without limit and no name can manipulate a terminal or a log.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Any, Final

from seawall._redaction import printable

MOST_GUARDS: Final = 200
MOST_LAYERS: Final = 32
MOST_ROWS: Final = 500
MOST_SECTIONS: Final = 20
MOST_TROUBLES: Final = 100
MOST_HAPPENINGS: Final = 100
MOST_VERBS: Final = 8
"""Maximum number of different verbs that an event group counts."""
MOST_FACTS: Final = 16
MOST_CHANGES: Final = 16
MOST_ACTS: Final = 8
MOST_KEYS: Final = 5
"""Maximum number of keys of a keyed policy that are shown by name: they are users' data."""
MOST_NODES: Final = 40
"""Maximum number of sources and stages drawn for one pipeline."""
MOST_DRAWN: Final = 80
"""The same for all pipelines of a process; the others are summarized in a line."""
MOST_TRACKS: Final = MOST_ROWS + MOST_DRAWN
"""Maximum number of rows, sources and stages whose history is kept."""
MOST_POINTS: Final = 3600
"""Maximum number of points of a history: more than a screen can show."""
MOST_AT_WORK: Final = 4
"""Maximum number of workers of a stage that are shown with their current item."""
MOST_CAUSES: Final = 5
"""Maximum number of causes of a stage's failures, the most frequent first."""
MOST_READINGS: Final = 16
"""Maximum number of readings of a collecting source, the missing ones first."""
LONGEST_KEY: Final = 40
LONGEST_WORD: Final = 80
"""Maximum length of a state, a label or a setting's name."""
LONGEST_NAME: Final = 120
LONGEST_TEXT: Final = 200
"""Maximum length of a sentence, a value or a description of settings."""
MOST_BYTES: Final = 240 * 1024
"""Maximum size of a view as JSON: it is sent each second, so it has to stay small."""
HUGE: Final = 1e15
"""Largest number that is shown: all clients can represent it, as a float or not."""


def shown(value: object, longest: int = LONGEST_TEXT) -> str:
    """Return `value` as text of at most `longest` characters, control characters escaped.

    Terminal control sequences, direction overrides and lone surrogates are escaped too.
    """
    text = value if isinstance(value, str) else str(value)
    if len(text) <= longest and text.isprintable():
        return text
    return _escaped(text[: longest + 1], longest)


# The names that need escaping are the same each time.
_escaped = lru_cache(maxsize=1024)(printable)


def number(value: Any, default: float = 0.0) -> float:
    """Return `value` if it is a number that can be shown, otherwise `default`; reject bools.

    Larger numbers are clamped to the largest one that is shown.
    """
    kind = type(value)
    if (kind is float or kind is int) and -HUGE <= value <= HUGE:  # the usual case, and not a NaN
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    if isinstance(value, float) and not isfinite(value):
        return default
    return float(min(HUGE, max(-HUGE, value)))
