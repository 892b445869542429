"""Recent values from a guard's snapshot and counters, for the view and for rules.

No function raises, whatever a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import LONGEST_TEXT, number, shown
from seawall.dashboard._moves import Moves
from seawall.dashboard.views import Tone
from seawall.telemetry import _thresholds as limits
from seawall.telemetry._readings import spent_share

Seen = Mapping[str, Any]

BudgetState = Literal["", "low", "unfilled", "refusing"]
"""State of a retry budget; see `budget_state`."""

ENDS: Final = ("succeeded", "failed", "rejected", "cancelled")

ENOUGH_CALLS: Final = 5.0
"""Minimum number of calls in the last `LONG` seconds for a share of them to be meaningful."""


LONGEST_AGO: Final = 40
"""Maximum length of the text about how often and when an error occurred."""


def policies_of(guard: Seen) -> list[Seen]:
    """Return the policies in a guard's snapshot."""
    policies = guard.get("policies")
    if not isinstance(policies, (list, tuple)):
        return []
    return [policy for policy in policies if isinstance(policy, (dict, Mapping))]


def time_of(seen: Seen, key: str) -> float | None:
    """Return a duration in seconds, if there is one."""
    value = number(seen.get(key), -1.0)
    return round(value, 6) if value >= 0 else None


def calls_lately(name: str, moves: Moves) -> float:
    """Return the number of calls that ended recently in a guard."""
    return sum(moves.lately(("guard", name, end)) for end in ENDS)


def failing(seen: Seen, moves: Moves) -> Tone | None:
    """Return how bad the error rate of a guard is, or None if it is not."""
    ratio = number(seen.get("error_rate"))
    if ratio <= limits.ERROR_RATIO_WARN:
        return None
    name = str(seen.get("name", ""))
    if sum(moves.for_long(("guard", name, end)) for end in ENDS) < ENOUGH_CALLS:
        return None
    return "bad" if ratio > limits.ERROR_RATIO else "warn"


def degraded_share(name: str, moves: Moves) -> float:
    """Return the share of degraded ones among the recent answers of a guard, from 0 to 1.

    Failures do not count: a fallback's answer is counted as a failed or refused attempt as well.
    """
    degraded = moves.lately(("guard", name, "degraded"))
    return degraded / (degraded + moves.lately(("guard", name, "succeeded"))) if degraded else 0.0


def share_lately(name: str, place: int, counter: str, moves: Moves) -> float:
    """Return the recent share of a guard's calls that a policy's counter has counted."""
    counted = moves.lately(("layer", name, place, counter))
    return counted / max(counted, calls_lately(name, moves)) if counted else 0.0


def budget_spent(seen: Seen) -> float | None:
    """Return the share of a retry budget that is spent, from 0 to 1; None if there is none."""
    try:
        return spent_share(seen["budget"])
    except (KeyError, TypeError):  # none, or one of another shape
        return None


def note_retries(name: str, place: int, seen: Seen, moves: Moves) -> None:
    """Record the counters of a retry that `budget_state` needs."""
    moves.rate(("layer", name, place, "retries"), seen.get("retries"))
    refused = mapping(seen.get("stopped")).get("budget")
    moves.rate(("layer", name, place, "refused_by_budget"), refused)


def refused_by_budget(name: str, place: int, moves: Moves) -> float:
    """Return the number of recent calls that were not retried because the budget was spent."""
    return moves.lately(("layer", name, place, "refused_by_budget"))


def budget_state(name: str, place: int, seen: Seen, moves: Moves) -> BudgetState:
    """Return the state of a retry budget, if it matters now; otherwise "".

    "refusing": recent calls were not retried because it was spent. "unfilled": none was refused,
    but the next retry would be, since successes have not refilled it. "low": it is nearly spent by
    current retries.
    """
    if refused_by_budget(name, place, moves):
        return "refusing"
    spent = budget_spent(seen)
    if spent is None:
        return ""
    # Only a budget refilled by successes stays spent without traffic; the others show their last
    # state.
    if spent >= limits.BUDGET_SPENT and "maximum" in mapping(seen.get("budget")):
        return "unfilled"
    retried = moves.lately(("layer", name, place, "retries"))
    return "low" if retried and spent >= limits.BUDGET_SPENT_WARN else ""


def full(seen: Seen) -> bool:
    """Return whether all slots are taken and callers wait."""
    slots = number(seen.get("limit", seen.get("workers")))
    return 0 < slots <= number(seen.get("in_flight")) and number(seen.get("waiting")) > 0


def mapping(value: Any) -> Seen:
    """Return `value` if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def last_error(seen: Seen, *, when: bool = True) -> str:
    """Return the last error of a guard in a line, with its count and `when`; "" if none."""
    last = seen.get("last_error")
    if not isinstance(last, Mapping):
        return ""
    text = shown(last.get("text", ""), LONGEST_TEXT - LONGEST_AGO)
    if not when:
        return text
    times, age = say.several(last.get("count"), "time"), number(last.get("age"))
    ago = "just now" if age < 1 else f"{say.seconds(int(age))} ago"
    return f"{text}, {times}, {ago}"
