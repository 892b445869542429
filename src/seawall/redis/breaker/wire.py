"""The messages between a breaker and the store: `lua/breaker.lua` lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from seawall._redaction import LONGEST as LONGEST_LINE
from seawall._redaction import printable
from seawall.errors import StoreUnavailable
from seawall.models.breaker.probes import Probes, Ramp, SlowStart
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerCause, BreakerState, RemoteCause

MICROSECONDS: Final = 1_000_000
LONGEST: Final = 2**52
"""Microseconds: more than a hundred years, and still exact as a float.

It also bounds all other numbers from the store: epochs and counts.
"""

KEPT_FOR: Final = 3600
"""Seconds for which the store keeps a breaker that no pod asks for; longer if its breaks are."""

ISOLATED_FOR: Final = 7 * 24 * 3600
VOTE_FOR: Final = 30.0
"""Lifetime of a vote in seconds, if there is no time window."""

MOST_CALLS: Final = 10_000
"""The largest count window that pods may share."""

_FIELDS: Final = 11
_PUSHED: Final = 9
_LONGEST_PUSH: Final = 4096
_LONGEST_NAME: Final = 100
_DIGITS: Final = 16

_CAUSES: Final = {cause.value: cause for cause in BreakerCause}
_STATES: Final = {state.value: state for state in BreakerState}


class BreakerStanding(NamedTuple):
    """A breaker's state in the store. `epoch` grows with each change, within one `lineage`."""

    lineage: str
    epoch: int
    state: BreakerState
    left: float
    """Remaining seconds of the break."""
    opens: int
    cause: BreakerCause | RemoteCause
    age: float = 0.0
    """Seconds since it was last closed."""
    failure: str = ""
    """The last failure of the pod that opened it, as text."""


class InvalidReply(NamedTuple):
    """An answer that cannot be parsed."""

    why: str


class BreakerReply(NamedTuple):
    """The store's answer for one breaker."""

    standing: BreakerStanding
    places: Sequence[int | None]
    """Where the last call of each entry of the report was counted; None if nothing was."""
    granted: Sequence[str]
    """The ids of the requested probes; empty where there is no room."""
    totals: tuple[int, int, int]
    """Calls, failed and slow ones in the window of all pods."""


def microseconds(seconds: float) -> int:
    """Return whole microseconds, at least one."""
    return max(1, min(LONGEST, round(seconds * MICROSECONDS)))


def settings_text(settings: BreakerSettings, quorum: int | None) -> str:
    """Return the settings in the script's format."""
    s = settings
    kind, plan, step = _trial(s.probes)
    longest = max(s.window or 0.0, s.probe_timeout, s.break_after(1), s.break_after(2))
    fields: dict[str, Any] = {
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
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def _trial(probes: Probes) -> tuple[str, list[float], int]:
    """Return the kind of trial, its numbers, and its step in microseconds."""
    if isinstance(probes, Ramp):
        return "ramp", list(probes.shares), microseconds(probes.step)
    if isinstance(probes, SlowStart):
        return "slow_start", [], microseconds(probes.step)
    return "counted", list(probes), 1


def fingerprint(settings: BreakerSettings, quorum: int | None) -> str:
    """Return the settings as text that is equal in all processes with equal settings."""
    given = {name: value for name, value in vars(settings).items() if value is not None}
    if callable(settings.break_for):
        given["break_for"] = [settings.break_after(opens) for opens in range(1, 5)]
    if quorum is not None:
        given["quorum"] = quorum
    return ", ".join(f"{name}={value!r}" for name, value in sorted(given.items()))[:1000]


def window_part(settings: BreakerSettings) -> str:
    """Return the window's name: pods with other windows count separately but share the state."""
    if settings.window is not None:
        return f"t{microseconds(settings.window)}"
    return "none" if settings.window_calls is None else f"c{settings.window_calls}"


class BreakLengths:
    """The lengths of the next two breaks; calls the user's function once for each."""

    def __init__(self) -> None:
        self._question: object = None
        self._lengths: list[int] = []

    def after(self, settings: BreakerSettings, opens: int) -> list[int]:
        """Return them in microseconds, after `opens` opens in a row."""
        if self._question != (settings, opens):
            lengths = [settings.break_after(opens + more) for more in (1, 2)]
            self._question = settings, opens
            self._lengths = [microseconds(length) for length in lengths]
        return self._lengths


def vote_for(settings: BreakerSettings) -> float:
    """Return for how many seconds a vote counts."""
    return settings.window or VOTE_FOR


def parse_replies(reply: object, count: int) -> list[BreakerReply | InvalidReply]:
    """Return the answer for each of `count` breakers; raise `StoreUnavailable` if there is none.

    An invalid answer for one breaker does not invalidate the others.
    """
    if not isinstance(reply, list) or len(reply) != count:
        said = f"{len(reply)} answers" if isinstance(reply, list) else type(reply).__name__
        raise StoreUnavailable(f"the store's answer makes no sense: {said}") from ValueError(said)
    return [_parsed(one) for one in reply]


def answered(error: StoreUnavailable) -> bool:
    """Return whether the store answered, but uselessly: the next answer will be the same."""
    from redis.exceptions import ResponseError

    return isinstance(error.__cause__, (ResponseError, ValueError))


def parse_push(message: bytes) -> tuple[str, BreakerStanding] | None:
    """Return whose state was pushed, and the state; None if the message is invalid."""
    try:
        parts = json.loads(message) if len(message) <= _LONGEST_PUSH else None
        if not isinstance(parts, list) or len(parts) != _PUSHED:
            return None
        tag, *rest = parts
        return (tag, _standing(rest)) if isinstance(tag, str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _parsed(fields: Any) -> BreakerReply | InvalidReply:
    try:
        return _reply(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return InvalidReply(f"the store's answer makes no sense: {error!r:.200}")


def _reply(fields: list[Any]) -> BreakerReply:
    if len(fields) != _FIELDS:
        raise ValueError(f"{len(fields)} fields")
    *known, places, granted, totals = fields
    calls, failures, slow = (_number(number) for number in totals)
    return BreakerReply(
        _standing([field.decode() for field in known]),
        [_number(place) if place else None for place in places],
        [id_.decode() for id_ in granted],
        (calls, failures, slow),
    )


def _standing(fields: list[str]) -> BreakerStanding:
    lineage, epoch, state, left, opens, cause, age, failure = fields
    if not isinstance(lineage, str) or not 0 < len(lineage) <= _LONGEST_NAME:
        raise ValueError(f"lineage {lineage!r:.100}")
    if not isinstance(failure, str):
        raise TypeError(f"failure {failure!r:.100}")
    return BreakerStanding(
        lineage,
        _number(epoch),
        _STATES[state],
        _number(left) / MICROSECONDS,
        _number(opens),
        _CAUSES.get(cause, RemoteCause.STORE),
        _number(age) / MICROSECONDS,
        printable(failure, LONGEST_LINE),
    )


def _number(said: str | bytes | int) -> int:
    """Return an integer that is neither negative nor too large to be exact."""
    number = said if isinstance(said, int) else int(said[:_DIGITS])
    if not 0 <= number <= LONGEST or (not isinstance(said, int) and len(said) > _DIGITS):
        raise ValueError(f"the number {said!r:.100}")
    return number
