"""What a guard's snapshot and counters say of the last seconds: for what is shown, and for rules.

Nothing raises, whatever a snapshot holds.
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
"""How a retry budget is; see `budget_state`."""

ENDS: Final = ("succeeded", "failed", "rejected", "cancelled")

ENOUGH_CALLS: Final = 5.0
"""Calls of the last `LONG` seconds from which on a share of them says something."""


LONGEST_AGO: Final = 40
"""Characters for how often an error occurred, and when."""


def policies_of(guard: Seen) -> list[Seen]:
    """Return what a guard's snapshot tells of its policies."""
    policies = guard.get("policies")
    if not isinstance(policies, (list, tuple)):
        return []
    return [policy for policy in policies if isinstance(policy, (dict, Mapping))]


def time_of(seen: Seen, key: str) -> float | None:
    """Return seconds, if there are any."""
    value = number(seen.get(key), -1.0)
    return round(value, 6) if value >= 0 else None


def calls_lately(name: str, moves: Moves) -> float:
    """Return how many calls a guard has ended lately."""
    return sum(moves.lately(("guard", name, end)) for end in ENDS)


def failing(seen: Seen, moves: Moves) -> Tone | None:
    """Return how bad it is that a guard's attempts fail, or None if it is not."""
    ratio = number(seen.get("error_rate"))
    if ratio <= limits.ERROR_RATIO_WARN:
        return None
    name = str(seen.get("name", ""))
    if sum(moves.for_long(("guard", name, end)) for end in ENDS) < ENOUGH_CALLS:
        return None
    return "bad" if ratio > limits.ERROR_RATIO else "warn"


def degraded_share(name: str, moves: Moves) -> float:
    """Return the share of lesser ones among the recent answers of a guard, from 0 to 1.

    Failures do not count: what a fallback answers is a failed or refused attempt as well.
    """
    degraded = moves.lately(("guard", name, "degraded"))
    return degraded / (degraded + moves.lately(("guard", name, "succeeded"))) if degraded else 0.0


def share_lately(name: str, place: int, counter: str, moves: Moves) -> float:
    """Return what share of a guard's calls a policy's counter has counted lately."""
    counted = moves.lately(("layer", name, place, counter))
    return counted / max(counted, calls_lately(name, moves)) if counted else 0.0


def budget_spent(seen: Seen) -> float | None:
    """Return the share of a retry budget that is spent, from 0 to 1; None if there is none."""
    try:
        return spent_share(seen["budget"])
    except (KeyError, TypeError):  # none, or one of another shape
        return None


def note_retries(name: str, place: int, seen: Seen, moves: Moves) -> None:
    """Note the counters of a retry that `budget_state` asks for."""
    moves.rate(("layer", name, place, "retries"), seen.get("retries"))
    refused = mapping(seen.get("stopped")).get("budget")
    moves.rate(("layer", name, place, "refused_by_budget"), refused)


def refused_by_budget(name: str, place: int, moves: Moves) -> float:
    """Return how many calls were not retried lately because the budget was spent."""
    return moves.lately(("layer", name, place, "refused_by_budget"))


def budget_state(name: str, place: int, seen: Seen, moves: Moves) -> BudgetState:
    """Return how a retry budget is, as far as it matters now; "" if it does not.

    "refusing": calls were not retried for want of it lately. "unfilled": none was, but the next one
    would be, since successes have not refilled it. "low": it is nearly spent, by retries of now.
    """
    if refused_by_budget(name, place, moves):
        return "refusing"
    spent = budget_spent(seen)
    if spent is None:
        return ""
    # Only one that successes refill stays spent in a calm; the others tell how they last were.
    if spent >= limits.BUDGET_SPENT and "maximum" in mapping(seen.get("budget")):
        return "unfilled"
    retried = moves.lately(("layer", name, place, "retries"))
    return "low" if retried and spent >= limits.BUDGET_SPENT_WARN else ""


def full(seen: Seen) -> bool:
    """Tell whether all slots are taken and somebody waits."""
    slots = number(seen.get("limit", seen.get("workers")))
    return 0 < slots <= number(seen.get("in_flight")) and number(seen.get("waiting")) > 0


def mapping(value: Any) -> Seen:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def last_error(seen: Seen, *, when: bool = True) -> str:
    """Return the last error of a guard in a line, with how often and `when`; "" if it had none."""
    last = seen.get("last_error")
    if not isinstance(last, Mapping):
        return ""
    text = shown(last.get("text", ""), LONGEST_TEXT - LONGEST_AGO)
    if not when:
        return text
    times, age = say.several(last.get("count"), "time"), number(last.get("age"))
    ago = "just now" if age < 1 else f"{say.seconds(int(age))} ago"
    return f"{text}, {times}, {ago}"
