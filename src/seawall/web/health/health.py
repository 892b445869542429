"""Health endpoints: whether the process is alive, ready to serve, and the state of dependencies.

Promises:

- All checks of a level run concurrently, each under its own timeout, off the event loop if they
  block.
- Results are cached briefly and shared, so that a thousand probes run each check once.
- A probe that disconnects stops no check.
- A check that hangs is reported and never started a second time in parallel.
- No response contains the text of an exception.
"""

from __future__ import annotations

import time
from asyncio import wait
from collections.abc import Callable, Mapping
from functools import partial
from json import dumps
from typing import Any, Final, Literal, TypeAlias, TypeVar, overload

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.events import HealthChanged
from seawall.events.bus import emit
from seawall.web.asgi_types import Headers, Message, Receive, Scope, Send
from seawall.web.health.watch import (
    RANKS,
    CheckFinding,
    Damping,
    Degraded,
    Healthy,
    Level,
    State,
    Unhealthy,
    Watch,
)
from seawall.web.lifecycle import Lifecycle
from seawall.web.registered_calls import RegisteredCall, legible
from seawall.web.request import path_below_root

__all__ = ["CheckFinding", "Degraded", "Health", "Healthy", "Unhealthy"]

Check: TypeAlias = Callable[[], Any]
C = TypeVar("C", bound=Check)
Details: TypeAlias = Literal["never", "deep", "always"] | Callable[[Mapping[str, Any]], bool]

LEVELS: Final[tuple[Level, ...]] = ("live", "ready", "deep")
"""Each level includes the checks of the levels before it."""

TIMEOUTS: Final[dict[Level, float]] = {"live": 1.0, "ready": 5.0, "deep": 30.0}
TTLS: Final[dict[Level, float]] = {"live": 1.0, "ready": 5.0, "deep": 30.0}
CONTENT_TYPE: Final = b"application/health+json"  # draft-inadarei-api-health-check-06
STATUSES: Final[dict[State, str]] = {"healthy": "pass", "degraded": "warn", "unhealthy": "fail"}
MOST_CHECKS: Final = 100
"""Maximum number of checks. More than a service has: beyond it, the same checks are probably being
added repeatedly."""


class Health:
    """A service's health: `/health/live`, `/health/ready` and `/health/deep`, and their checks.

    A pure ASGI app: the edge calls it for its `paths`; it can also be mounted or served alone.
    """

    def __init__(
        self,
        *,
        name: str = "service",
        version: str | None = None,
        prefix: str = "/health",
        lifecycle: Lifecycle | None = None,
        details: Details = "deep",
        clock: Clock | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        """Answer below `prefix`; be ready only while `lifecycle` is.

        `details` says where a response lists the checks: "never", on "deep", "always", or where a
        function of the request's scope returns True. Otherwise the response contains only the
        status. `wall` returns the wall-clock time, as `time.time` does.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'orders'")
        if not isinstance(prefix, str) or (prefix and not prefix.startswith("/")):
            raise ValueError(f"prefix={prefix!r}: write a path, such as '/health'")
        if version is not None and not isinstance(version, str):
            raise TypeError(f"version={version!r}: write text, such as '1.4.2'")
        if lifecycle is not None and not isinstance(lifecycle, Lifecycle):
            raise TypeError(f"lifecycle={lifecycle!r}: write Lifecycle(), that of the edge")
        if callable(details):
            check.plain_function("details", details)
        else:
            check.choice("details", details, ("never", "deep", "always"))
        self.name = name
        self.version = None if version is None else legible(version)
        self.lifecycle = lifecycle
        self._prefix = prefix.rstrip("/")
        self.paths: dict[str, Level] = {f"{self._prefix}/{level}": level for level in LEVELS}
        self._details = details
        self._warned_of_details = False
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._wall = time.time if wall is None else check.plain_function("wall", wall)  # noqa: TID251 - the default of a parameter
        self._watches: dict[str, Watch] = {}
        self._states: dict[Level, State] = {}
        registry.enter(self, "health", name)

    def __repr__(self) -> str:
        return f"<Health {self.name!r}: {len(self._watches)} checks>"

    # Checks

    @overload
    def add(
        self, name: str, check: C, /, *, level: Level = ..., timeout: float | None = ...,
        ttl: float | None = ..., critical: bool = ..., failures: int = ..., successes: int = ...,
    ) -> C: ...  # fmt: skip
    @overload
    def add(
        self, name: str, /, *, level: Level = ..., timeout: float | None = ...,
        ttl: float | None = ..., critical: bool = ..., failures: int = ..., successes: int = ...,
    ) -> Callable[[C], C]: ...  # fmt: skip
    def add(
        self,
        name: str,
        check_: Check | None = None,
        /,
        *,
        level: Level = "ready",
        timeout: float | None = None,
        ttl: float | None = None,
        critical: bool = True,
        failures: int = 1,
        successes: int = 1,
    ) -> Any:
        """Register a check called `name`; without a check, return a decorator for one.

        A check is a function without arguments, plain (run in a thread) or async. None or True
        means healthy, text means degraded, an exception means unhealthy; or it returns a finding. A
        check that is not `critical` at most degrades the service. It counts for its `level` and
        those above, has `timeout` seconds, and its result is valid for `ttl` seconds (both 1, 5 or
        30 by level). `failures` and `successes` are the numbers of consecutive results that it
        takes to change the state for the worse or for the better.
        """
        if check_ is None:
            return partial(
                self.add, name, level=level, timeout=timeout, ttl=ttl, critical=critical,
                failures=failures, successes=successes,
            )  # fmt: skip
        self._check_name(name)
        check.choice("level", level, LEVELS)
        self._watches[name] = Watch(
            self.name,
            name,
            RegisteredCall(name, check_, "a function without arguments, def or async def"),
            level,
            TIMEOUTS[level] if timeout is None else check.seconds("timeout", timeout),
            TTLS[level] if ttl is None else check.seconds("ttl", ttl, zero=True),
            check.flag("critical", critical),
            Damping(failures, successes),
            self._clock,
            self._wall,
        )
        return check_

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not name or ":" in name or name != legible(name):
            raise ValueError(f"name={name!r}: write a short name without ':', such as 'db'")
        if name in self._watches or name in LEVELS:
            raise ValueError(f"name={name!r} is taken: choose another, or remove({name!r}) first")
        if len(self._watches) >= MOST_CHECKS:
            raise ValueError(f"at most {MOST_CHECKS} checks; add each of them once")

    def remove(self, name: str) -> None:
        """Remove the check called `name`."""
        if self._watches.pop(name, None) is None:
            raise KeyError(f"there is no check {name!r}")

    async def state_of(self, level: Level) -> State:
        """Return the state of the service at this level, from fresh results."""
        check.choice("level", level, LEVELS)
        watches = self._watches_of(level)
        refreshed = [watch.refresh() for watch in watches]
        running = [future for future in refreshed if future is not None]
        if running:
            await wait(running)  # does not cancel them if this task is cancelled
        return self._worst_state(level, watches)

    def _watches_of(self, level: Level) -> list[Watch]:
        rank = LEVELS.index(level)
        return [watch for watch in self._watches.values() if LEVELS.index(watch.level) <= rank]

    def _worst_state(self, level: Level, watches: list[Watch]) -> State:
        """Return the worst known state, and emit an event if it has changed."""
        states = [watch.state or "unhealthy" for watch in watches]
        if level != "live" and self._phase():
            states.append("unhealthy")
        state: State = max(states, key=RANKS.__getitem__, default="healthy")
        before = self._states.get(level)
        self._states[level] = state
        if state != (before or "healthy"):
            emit(
                HealthChanged, self.name, check=level, before=before or "unknown", after=state,
                output=self._phase(),
            )  # fmt: skip
        return state

    def _phase(self) -> str:
        """Return the lifecycle phase that keeps the service from being ready, or ""."""
        if self.lifecycle is None:
            return ""
        self.lifecycle.start_if_needed()
        return "" if self.lifecycle.state == "ready" else self.lifecycle.state

    def snapshot(self) -> dict[str, Any]:
        """Return the known states of levels and checks; run no check."""
        return {
            "name": self.name,
            "levels": {level: self._states.get(level, "unknown") for level in LEVELS},
            "lifecycle": None if self.lifecycle is None else self.lifecycle.state,
            "checks": {name: watch.snapshot() for name, watch in list(self._watches.items())},
        }

    # Probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a probe, as an ASGI app."""
        if scope["type"] != "http":
            raise RuntimeError(f"health answers HTTP requests, not {scope['type']!r}")
        status, headers, body = await self.answer(scope)
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async def answer(self, scope: Mapping[str, Any]) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of the response to a probe."""
        level = self._level_of(scope)
        method = scope["method"]
        if level is None:
            return _answer(404, b'{"status":"fail","output":"no such level"}', method)
        if method not in {"GET", "HEAD"}:
            return _answer(405, b'{"status":"fail","output":"GET or HEAD"}', method)
        state = await self.state_of(level)
        members: dict[str, Any] = {"status": STATUSES[state]}
        if level != "live" and self._phase():  # not ready, even if all checks pass
            members["output"] = self._phase()
        if self._shows_details(level, scope):
            members["serviceId"] = self.name
            if self.version is not None:
                members["version"] = self.version
            members["checks"] = dict(map(_result_of, self._watches_of(level)))
        body = dumps(members, separators=(",", ":")).encode()
        return _answer(503 if state == "unhealthy" else 200, body, method)

    def _level_of(self, scope: Mapping[str, Any]) -> Level | None:
        """Return the requested level: also below a root path, or mounted at its own prefix."""
        below, root = path_below_root(scope), (scope.get("root_path") or "").rstrip("/")
        mounted = self._prefix + below if self._prefix and root.endswith(self._prefix) else below
        return self.paths.get(scope["path"]) or self.paths.get(below) or self.paths.get(mounted)

    def _shows_details(self, level: Level, scope: Mapping[str, Any]) -> bool:
        details = self._details
        if callable(details):
            try:
                return details(scope) is True
            except Exception:
                if not self._warned_of_details:  # once, so that probes cannot fill the log
                    import logging

                    self._warned_of_details = True
                    logging.getLogger("seawall").exception("health: details() fails: none shown")
                return False
        return details in {"always", level}


def _answer(status: int, body: bytes, method: str) -> tuple[int, Headers, bytes]:
    headers = [
        (b"content-type", CONTENT_TYPE),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if status == 405:  # noqa: PLR2004
        headers.append((b"allow", b"GET, HEAD"))
    return status, headers, b"" if method == "HEAD" else body


def _result_of(watch: Watch) -> tuple[str, list[dict[str, Any]]]:
    """Return the last result of a check, by the name of what was measured."""
    result, measured = watch.result, "responseTime"
    members: dict[str, Any] = {
        "componentId": watch.name,
        "componentType": getattr(watch.check, "component_type", "component"),
        # The check's own state: `critical` only affects the status of the service.
        "status": STATUSES["unhealthy" if result is None else result.state],
    }
    if result is not None:
        if result.value is None:
            value, unit = round(result.seconds * 1000, 3), "ms"
        else:
            value, unit = result.value, result.unit
            measured = getattr(watch.check, "measurement", "value")
        members["observedValue"] = value
        if unit:
            members["observedUnit"] = unit
        members["time"] = _rfc3339(result.at)
        if result.output:
            members["output"] = result.output
    return f"{watch.name}:{measured}", [members]


def _rfc3339(wall: float) -> str:
    from datetime import UTC, datetime

    try:
        at = datetime.fromtimestamp(wall, UTC)
    except (OverflowError, ValueError, OSError):  # a clock of the user
        at = datetime.fromtimestamp(0.0, UTC)
    return at.isoformat(timespec="milliseconds")
