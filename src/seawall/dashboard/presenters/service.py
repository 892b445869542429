"""The service itself: health, lifecycle, level of service, and the event loop's watchdog."""

from __future__ import annotations

from typing import Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import number
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    Presenter,
    RowContent,
    Seen,
    Troubles,
    counted,
    listed,
    mapping,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits

_HEALTH: Final[dict[str, Tone]] = {"healthy": "ok", "degraded": "warn", "unhealthy": "bad"}

_WORST: Final = ("unhealthy", "degraded", "healthy")


def _health_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    levels = mapping(seen["levels"])
    worst = worst_health(seen)
    facts: Facts = [(say.plainly(str(level)), str(state)) for level, state in levels.items()]
    ill = ill_checks(seen)
    if ill:
        facts.append(("failing checks", listed(ill)))
    return RowContent(worst, _HEALTH.get(worst, "off"), facts)


def worst_health(seen: Seen) -> str:
    """Return the worst of the levels of a service's health."""
    states = {str(state) for state in mapping(seen.get("levels")).values()}
    return next((state for state in _WORST if state in states), "unknown")


def ill_checks(seen: Seen) -> list[str]:
    """Return the names of the failing checks."""
    checks = mapping(seen.get("checks")).items()
    return [
        str(name)
        for name, check in checks
        if mapping(check).get("state") in ("degraded", "unhealthy")
    ]


def _health_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    worst = worst_health(seen)
    if worst in ("degraded", "unhealthy"):
        ill = ill_checks(seen)
        what = f"The service is {worst}" + (f": {listed(ill)}" if ill else "")
        tone: Tone = "bad" if worst == "unhealthy" else "warn"
        key = f"health:{name}"
        yield FoundTrouble(key, tone, name, what, "", key, degrades=True)


def _lifecycle_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    state = str(seen["state"])
    in_flight = number(seen.get("in_flight"))
    facts: Facts = [("in flight", say.amount(in_flight))]
    waits = seen.get("warming_up")
    if isinstance(waits, (list, tuple)) and waits:
        facts.append(("warming up", listed([str(one) for one in waits])))
    facts += counted(seen, ("refused", "cut"))
    tone: Tone = "ok" if state == "ready" else "off" if state == "stopped" else "warn"
    return RowContent(state, tone, facts, None, in_flight)


def _lifecycle_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    if seen.get("state") == "draining":
        what = f"The service is draining, {say.several(seen.get('in_flight'), 'request')} in flight"
        yield FoundTrouble(f"lifecycle:{name}", "warn", name, what, "", f"lifecycle:{name}")


def _service_levels_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    level = str(seen["level"])
    facts: Facts = [("for", say.seconds(seen.get("seconds")))]
    if seen.get("pinned") is True:
        facts.append(("pinned", "yes"))
    load = mapping(seen.get("load"))
    if "value" in load:
        facts.append(("load", say.share(load["value"])))
    needs = mapping(seen.get("depends_on")).items()
    ill = [str(name) for name, one in needs if mapping(one).get("in_trouble")]
    if ill:
        facts.append(("in trouble", listed(ill)))
    return RowContent(level, "ok" if level == "full" else "warn", facts)


def _service_levels_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    level = str(seen["level"])
    if level != "full":
        pinned = ", since somebody pinned it" if seen.get("pinned") is True else ""
        what = f"The level of service is {say.plainly(level)}{pinned}"
        tone: Tone = "bad" if level == "maintenance" else "warn"
        key = f"service_levels:{name}"
        yield FoundTrouble(key, tone, name, what, "", key, degrades=True)


def _watchdog_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    lag = number(seen["lag"])
    facts: Facts = [
        ("loops", say.amount(seen.get("loops"))),
        ("blocks", say.amount(seen.get("blocks"))),
        ("longest", say.seconds(seen.get("longest"))),
    ]
    late = lag > limits.LOOP_LAG_SECONDS
    return RowContent(f"{say.seconds(lag)} late", "bad" if late else "ok", facts, None, lag)


def _watchdog_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    lag = number(seen.get("lag"))
    if lag > limits.LOOP_LAG_SECONDS:
        what = f"The event loop is {say.seconds(lag)} late, and so are all its requests"
        advice = "Move what blocks it to an executor: LoopBlocked tells where it stands"
        yield FoundTrouble(f"watchdog:{name}", "bad", name, what, advice, f"watchdog:{name}")


PRESENTERS: Final = {
    "health": Presenter(_health_row, _health_troubles),
    "lifecycle": Presenter(_lifecycle_row, _lifecycle_troubles),
    "service_levels": Presenter(_service_levels_row, _service_levels_troubles),
    "watchdog": Presenter(_watchdog_row, _watchdog_troubles),
}
