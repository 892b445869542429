"""The result of a run without a page: its phases, a table, and a verdict."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from seawall_demo._settings import PROTECTED, SIDES, UNPROTECTED

OUTAGE: Final = "outage"
"""Name of the group of phases in which the vendor is not well."""

ERROR_SHARE: Final = 0.25
"""Contained means: the error rate is below this share of the unprotected one's..."""
SLOWNESS_SHARE: Final = 0.5
"""...and p99 below this share of its p99."""

Results = dict[str, dict[str, Any]]
"""Results of `_tally.summary` by phase and side."""


class Phase(NamedTuple):
    """A part of the run: its name, its share of the time, and what is broken in it."""

    name: str
    share: float
    broken: str | None = None


PHASES: Final = (
    Phase("calm", 0.20),
    Phase("vendor broken", 0.30, "broken"),
    Phase("recovery", 0.15),
    Phase("vendor slow", 0.20, "slow"),
    Phase("calm again", 0.15),
)

COLUMNS: Final = (
    "phase", "side", "requests", "good", "degraded", "limited", "errors", "p50", "p99"
)  # fmt: skip


def groups() -> dict[str, list[str]]:
    """Return the reported groups: each phase, and the outage as a whole."""
    broken = [phase.name for phase in PHASES if phase.broken is not None]
    return {**{phase.name: [phase.name] for phase in PHASES}, OUTAGE: broken}


def rows(results: Results) -> list[tuple[str, ...]]:
    """Return the table as text, a row for each phase and side."""
    found = []
    for phase in PHASES:
        for side in SIDES:
            one = results[phase.name][side]
            shares = [f"{one[key]:.1%}" for key in ("good", "degraded", "limited", "error")]
            times = [duration(one["p50"]), duration(one["p99"])]
            name = phase.name if side == SIDES[0] else ""
            found.append((name, side, str(one["requests"]), *shares, *times))
    return found


def duration(seconds: float | None) -> str:
    """Format seconds for reading: in milliseconds below one second."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def table(results: Results) -> str:
    """Return the table as text."""
    lines = [COLUMNS, *rows(results)]
    widths = [max(len(line[number]) for line in lines) for number in range(len(COLUMNS))]
    shown = []
    for line in lines:
        names = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        numbers = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        shown.append("  ".join([*names, *numbers]).rstrip())
    return "\n".join(shown)


def verdict(results: Results) -> tuple[bool, str]:
    """Return whether the outage was contained, and a sentence with the numbers."""
    ours, theirs = results[OUTAGE][PROTECTED], results[OUTAGE][UNPROTECTED]
    seen = (
        f"errors {ours['error']:.1%} against {theirs['error']:.1%},"
        f" p99 {duration(ours['p99'])} against {duration(theirs['p99'])}"
    )
    if not ours["requests"] or not theirs["requests"] or not theirs["error"]:
        return False, f"The outage was not seen: {seen}."
    contained = (
        ours["error"] < ERROR_SHARE * theirs["error"]
        and ours["p99"] is not None
        and theirs["p99"] is not None
        and ours["p99"] < SLOWNESS_SHARE * theirs["p99"]
    )
    words = "The outage was contained" if contained else "The outage was not contained"
    return contained, f"{words}: {seen}."
