"""What a breaker and the store say to each other: `lua/breaker.lua` has the list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from seawall._redaction import LONGEST as LONGEST_LINE
from seawall._redaction import printable
from seawall.errors import StoreUnavailable
from seawall.models.breaker.probes import Probes, Ramp, SlowStart
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import Cause, State, Told

MICROSECONDS: Final = 1_000_000
LONGEST: Final = 2**52
"""Microseconds: more than a hundred years, and far from where floats are no whole numbers.

Nothing that the store says is larger: epochs and counts neither.
"""

KEPT_FOR: Final = 3600
"""Seconds for which the store remembers a breaker that nobody asks for, or longer if it breaks."""

ISOLATED_FOR: Final = 7 * 24 * 3600
VOTE_FOR: Final = 30.0
"""Seconds for which a vote counts where there is no time window that says it."""

MOST_CALLS: Final = 10_000
"""The largest count window that pods may share."""

_FIELDS: Final = 11
_PUSHED: Final = 9
_LONGEST_PUSH: Final = 4096
_LONGEST_NAME: Final = 100
_DIGITS: Final = 16

_CAUSES: Final = {cause.value: cause for cause in Cause}
_STATES: Final = {state.value: state for state in State}


class Standing(NamedTuple):
    """How a breaker stands in the store. `epoch` grows with each change, within one `lineage`."""

    lineage: str
    epoch: int
    state: State
    left: float
    """Seconds of the break."""
    opens: int
    cause: Cause | Told
    age: float = 0.0
    """Seconds since it was closed for the last time."""
    failure: str = ""
    """The last failure of the pod that opened it, in words."""


class Nonsense(NamedTuple):
    """An answer that cannot be understood."""

    why: str


class Reply(NamedTuple):
    """What the store answers for one breaker."""

    standing: Standing
    places: Sequence[int | None]
    """Where the last call of each entry of the report was counted; None if nothing was."""
    granted: Sequence[str]
    """The ids of the probes that were asked for; empty where there is no room."""
    totals: tuple[int, int, int]
    """Calls, failed and slow ones in the window of all pods."""


def microseconds(seconds: float) -> int:
    """Return whole microseconds, at least one."""
    return max(1, min(LONGEST, round(seconds * MICROSECONDS)))


def settings_text(settings: BreakerSettings, quorum: int | None) -> str:
    """Return the settings as the script wants them."""
    s = settings
    kind, plan, step = _trial(s.probes)
    longest = max(s.window or 0.0, s.probe_timeout, s.break_after(1), s.break_after(2))
    told: dict[str, Any] = {
        "window": None if s.window is None else microseconds(s.window),
        "window_calls": s.window_calls,
        "min_calls": s.min_calls,
        "failure_ratio": s.failure_ratio,
        "slow_ratio": s.slow_ratio,
        "slow_after": None if s.slow_after is None else microseconds(s.slow_after),
        "plan": json.dumps(plan),
        "kind": kind,
        "step": step,
        "threshold": s.failure_ratio or 0.5,
        "probe_timeout": microseconds(min(s.probe_timeout, s.slow_after or s.probe_timeout)),
        "quorum": quorum,
        "vote_for": microseconds(vote_for(s)),
        "kept_for": microseconds(KEPT_FOR + 2 * longest) // 1000,
        "isolated_for": microseconds(ISOLATED_FOR) // 1000,
    }
    return json.dumps({name: value for name, value in told.items() if value is not None})


def _trial(probes: Probes) -> tuple[str, list[float], int]:
    """Return what kind of trial it is, its numbers, and its step in microseconds."""
    if isinstance(probes, Ramp):
        return "ramp", list(probes.shares), microseconds(probes.step)
    if isinstance(probes, SlowStart):
        return "slow_start", [], microseconds(probes.step)
    return "counted", list(probes), 1


def fingerprint(settings: BreakerSettings, quorum: int | None) -> str:
    """Return the settings as text that is the same in every process that has the same."""
    given = {name: value for name, value in settings._asdict().items() if value is not None}
    if callable(settings.break_for):
        given["break_for"] = [settings.break_after(opens) for opens in range(1, 5)]
    if quorum is not None:
        given["quorum"] = quorum
    return ", ".join(f"{name}={value!r}" for name, value in sorted(given.items()))[:1000]


def window_part(settings: BreakerSettings) -> str:
    """Return the name of the window: pods that count otherwise have another, but the same state."""
    if settings.window is not None:
        return f"t{microseconds(settings.window)}"
    return "none" if settings.window_calls is None else f"c{settings.window_calls}"


class Breaks:
    """The lengths of the next two breaks; the user's function is asked once for each."""

    __slots__ = ("_lengths", "_question")

    def __init__(self) -> None:
        self._question: object = None
        self._lengths: list[int] = []

    def after(self, settings: BreakerSettings, opens: int) -> list[int]:
        """Return them in microseconds, after so many opens in a row."""
        if self._question != (settings, opens):
            lengths = [settings.break_after(opens + more) for more in (1, 2)]
            self._question = settings, opens
            self._lengths = [microseconds(length) for length in lengths]
        return self._lengths


def vote_for(settings: BreakerSettings) -> float:
    """Return for how many seconds a vote counts."""
    return settings.window or VOTE_FOR


def parse_replies(reply: object, count: int) -> list[Reply | Nonsense]:
    """Return what is answered for each of `count` breakers; raise `StoreUnavailable` if nothing is.

    One that makes no sense says nothing against the others.
    """
    if not isinstance(reply, list) or len(reply) != count:
        said = f"{len(reply)} answers" if isinstance(reply, list) else type(reply).__name__
        raise StoreUnavailable(f"the store's answer makes no sense: {said}") from ValueError(said)
    return [_parsed(one) for one in reply]


def answered(error: StoreUnavailable) -> bool:
    """Tell whether the store did answer, though with nothing of use: as it will the next time."""
    from redis.exceptions import ResponseError

    return isinstance(error.__cause__, (ResponseError, ValueError))


def parse_push(message: bytes) -> tuple[str, Standing] | None:
    """Return whose state was pushed, and what it is; None if the message makes no sense."""
    try:
        parts = json.loads(message) if len(message) <= _LONGEST_PUSH else None
        if not isinstance(parts, list) or len(parts) != _PUSHED:
            return None
        tag, *rest = parts
        return (tag, _standing(rest)) if isinstance(tag, str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _parsed(fields: Any) -> Reply | Nonsense:
    try:
        return _reply(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Nonsense(f"the store's answer makes no sense: {error!r:.200}")


def _reply(fields: list[Any]) -> Reply:
    if len(fields) != _FIELDS:
        raise ValueError(f"{len(fields)} fields")
    *known, places, granted, totals = fields
    calls, failures, slow = (_number(number) for number in totals)
    return Reply(
        _standing([field.decode() for field in known]),
        [_number(place) if place else None for place in places],
        [id_.decode() for id_ in granted],
        (calls, failures, slow),
    )


def _standing(fields: list[str]) -> Standing:
    lineage, epoch, state, left, opens, cause, age, failure = fields
    if not isinstance(lineage, str) or not 0 < len(lineage) <= _LONGEST_NAME:
        raise ValueError(f"lineage {lineage!r:.100}")
    if not isinstance(failure, str):
        raise TypeError(f"failure {failure!r:.100}")
    return Standing(
        lineage,
        _number(epoch),
        _STATES[state],
        _number(left) / MICROSECONDS,
        _number(opens),
        _CAUSES.get(cause, Told.STORE),
        _number(age) / MICROSECONDS,
        printable(failure, LONGEST_LINE),
    )


def _number(said: str | bytes | int) -> int:
    """Return a whole number that is neither below 0 nor too large to be counted on."""
    number = said if isinstance(said, int) else int(said[:_DIGITS])
    if not 0 <= number <= LONGEST or (not isinstance(said, int) and len(said) > _DIGITS):
        raise ValueError(f"the number {said!r:.100}")
    return number
