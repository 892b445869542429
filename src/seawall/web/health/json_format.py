"""The response to a probe as application/health+json (draft-inadarei-api-health-check-06)."""

from __future__ import annotations

from collections.abc import Iterable
from json import dumps
from typing import Any, Final

from seawall.web.health.watch import State, Watch

CONTENT_TYPE: Final = b"application/health+json"

STATUSES: Final[dict[State, str]] = {"healthy": "pass", "degraded": "warn", "unhealthy": "fail"}


def document(
    state: State, name: str, version: str | None, phase: str, watches: Iterable[Watch] | None
) -> bytes:
    """Return the response body; with the checks if `watches` are given, else the status alone.

    `phase` is the lifecycle phase that keeps the service from being ready even if all checks pass.
    """
    members: dict[str, Any] = {"status": STATUSES[state]}
    if phase:
        members["output"] = phase
    if watches is not None:
        members["serviceId"] = name
        if version is not None:
            members["version"] = version
        members["checks"] = {_key(watch): [_check(watch)] for watch in watches}
    return dumps(members, separators=(",", ":")).encode()


def _key(watch: Watch) -> str:
    result = watch.result
    measured = result is not None and result.value is not None
    measurement = getattr(watch.check, "measurement", "value") if measured else "responseTime"
    return f"{watch.name}:{measurement}"


def _check(watch: Watch) -> dict[str, Any]:
    result = watch.result
    members: dict[str, Any] = {
        "componentId": watch.name,
        "componentType": getattr(watch.check, "component_type", "component"),
        # The check's own state: `critical` only affects the status of the service.
        "status": STATUSES["unhealthy" if result is None else result.state],
    }
    if result is None:
        return members
    if result.value is None:
        members["observedValue"], members["observedUnit"] = round(result.seconds * 1000, 3), "ms"
    else:
        members["observedValue"] = result.value
        if result.unit:
            members["observedUnit"] = result.unit
    members["time"] = _rfc3339(result.at)
    if result.output:
        members["output"] = result.output
    return members


def _rfc3339(wall: float) -> str:
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return "1970-01-01T00:00:00.000+00:00"
