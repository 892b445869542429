"""One check: when it runs, for how long, and how its last results are interpreted.

For any number of callers, the check runs once at a time in each event loop (a plain function once
per process), and its result is valid for `ttl` seconds. A caller that gives up does not affect the
others. A check that does not return is reported, and not started a second time in parallel.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, Task, TimerHandle, get_running_loop
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from seawall import _checks as check
from seawall._failures import described, log_failure
from seawall._redaction import safe_line
from seawall.clock import Clock
from seawall.errors import BulkheadFull
from seawall.events import HealthChanged
from seawall.events.bus import emit
from seawall.web.registered_calls import RegisteredCall, legible

State: TypeAlias = Literal["healthy", "degraded", "unhealthy"]
Level: TypeAlias = Literal["live", "ready", "deep"]

RANKS: Final[dict[State, int]] = {"healthy": 0, "degraded": 1, "unhealthy": 2}


class CheckFinding:
    """Result of a check: `Healthy`, `Degraded` or `Unhealthy`, with a text and a measured value.

    The text is shown to every caller that may see details: it must not contain secrets.
    """

    __slots__ = ("output", "unit", "value")

    state: State = "healthy"

    def __init__(self, output: str = "", *, value: float | None = None, unit: str = "") -> None:
        """Describe the result in a few words; `value` is the measured value, in `unit`."""
        if not isinstance(output, str) or not isinstance(unit, str):
            raise TypeError(f"{type(self).__name__}({output!r}, unit={unit!r}): write text")
        number = isinstance(value, (int, float)) and isfinite(value)
        self.output = safe_line(output)
        self.value = value if number else None
        self.unit = legible(unit)

    def __repr__(self) -> str:
        measured = "" if self.value is None else f", value={self.value!r}, unit={self.unit!r}"
        return f"{type(self).__name__}({self.output!r}{measured})"


class Healthy(CheckFinding):
    """Finding: the component works."""

    __slots__ = ()


class Degraded(CheckFinding):
    """Finding: the component works, but needs attention."""

    __slots__ = ()
    state: State = "degraded"


class Unhealthy(CheckFinding):
    """Finding: the component does not work."""

    __slots__ = ()
    state: State = "unhealthy"


class CheckResult(NamedTuple):
    """Last result of a check, as it is reported: `state` is the state after damping."""

    state: State
    output: str
    """Text for every reader."""
    cause: str
    """The same text for logs and events: with the message of an exception, if there was one."""
    value: float | None
    unit: str
    seconds: float
    """Duration of the check."""
    at: float
    """Wall-clock time of the result."""


class Damping:
    """State that worsens after `failures` consecutive results, and improves after `successes`.

    The first result is accepted immediately.
    """

    def __init__(self, failures: int, successes: int) -> None:
        self._failures = check.count("failures", failures)
        self._successes = check.count("successes", successes)
        self._in_a_row = 0
        self._is_worsening = False
        self.state: State | None = None

    def update(self, seen: State) -> State:
        """Return the state after the result `seen`."""
        if self.state is None or seen == self.state:
            self._in_a_row = 0
            self.state = seen
            return seen
        worse = RANKS[seen] > RANKS[self.state]
        self._in_a_row = self._in_a_row + 1 if worse is self._is_worsening else 1
        self._is_worsening = worse
        if self._in_a_row >= (self._failures if worse else self._successes):
            self._in_a_row = 0
            self.state = seen
        return self.state


@dataclass(eq=False, repr=False)
class Watch:
    """A registered check and its known results."""

    service: str
    name: str
    call: RegisteredCall
    level: Level
    timeout: float
    ttl: float
    critical: bool
    damping: Damping
    clock: Clock
    wall: Callable[[], float]
    result: CheckResult | None = None
    run_count: int = 0
    _fresh_until: float = float("-inf")
    _runs: dict[AbstractEventLoop, _Run] = field(default_factory=dict)
    """Runs in progress, by event loop; a loop cannot wait for a run of another loop, which may
    never end."""

    @property
    def check(self) -> Callable[[], Any]:
        """The function of the check."""
        return self.call.function

    @property
    def state(self) -> State | None:
        """The effect on the service's state: a failing non-critical check only degrades it."""
        result = self.result
        if result is None:
            return None
        return "degraded" if result.state == "unhealthy" and not self.critical else result.state

    def refresh(self) -> Future[None] | None:
        """Return None if the result is fresh, else a future that is done when it is.

        All callers share the future: wait for it in a way that does not cancel it.
        """
        now = self.clock.now()
        if now < self._fresh_until:
            return None
        loop = get_running_loop()
        run = self._runs.get(loop)
        if run is None:
            for ended in [known for known in list(self._runs) if known.is_closed()]:
                self._runs.pop(ended, None)
            self.run_count += 1
            run = self._runs[loop] = _Run(self, loop, now)
            return run.future
        if not run.future.done():
            return run.future
        # The check neither ended nor could be cancelled: report that once per `ttl`.
        seconds = now - run.began
        finding = Unhealthy(f"it has been running for {seconds:.1f} s and does not stop")
        self._record(finding, finding.output, seconds)
        return None

    def _record(self, finding: CheckFinding, cause: str, seconds: float) -> None:
        before = self.damping.state
        state = self.damping.update(finding.state)
        self.result = CheckResult(
            state, finding.output, cause, finding.value, finding.unit, seconds, self._wall_time()
        )
        self._fresh_until = self.clock.now() + self.ttl
        if state != (before or "healthy"):
            emit(
                HealthChanged, self.service, check=self.name, before=before or "unknown",
                after=state, output=cause,
            )  # fmt: skip

    def _wall_time(self) -> float:
        """Return the time of a result; 0.0 if the user's function fails: the service is not ill."""
        try:
            return float(self.wall())
        except Exception:  # noqa: BLE001 - logged
            log_failure("health: wall() failed; the time of a check is not known")
            return 0.0

    def snapshot(self) -> dict[str, Any]:
        """Return the known results of the check."""
        result = self.result
        return {
            "level": self.level,
            "critical": self.critical,
            "state": "unknown" if result is None else result.state,
            "output": "" if result is None else result.cause,
            "value": None if result is None else result.value,
            "seconds": None if result is None else result.seconds,
            "runs": self.run_count,
            "abandoned": self.call.hung,
        }


class _Run:
    """One run of a check: ends with the check, or at its timeout."""

    def __init__(self, watch: Watch, loop: AbstractEventLoop, now: float) -> None:
        self._watch = watch
        self.loop = loop
        self.began = now
        self.future: Future[None] = loop.create_future()
        call = watch.call
        context = call.context.copy()
        self._task: Task[Any] = loop.create_task(call(), context=context)
        self._task.add_done_callback(self._on_end, context=context)
        self._timer: TimerHandle = loop.call_later(watch.timeout, self._time_out, context=context)

    def _time_out(self) -> None:
        seconds = self._watch.timeout
        finding = Unhealthy(f"no answer within {seconds:g} s")
        try:
            self._finish(finding, finding.output)
        finally:
            self._task.cancel()

    def _on_end(self, task: Task[Any]) -> None:
        self._timer.cancel()
        error = None if task.cancelled() else task.exception()
        try:
            if self.future.done():
                return
            if task.cancelled():  # by the check itself, or because the loop ends
                self._finish(Unhealthy("it was cancelled"), "it was cancelled")
            elif error is None:
                finding = _finding_of(task.result())
                self._finish(finding, finding.output)
            elif isinstance(error, BulkheadFull) and not self._watch.call.hung:
                self.future.set_result(None)  # another loop is running the check: its result counts
            else:
                self._finish(*_finding_of_error(error, hung=bool(self._watch.call.hung)))
        finally:
            self._watch._runs.pop(self.loop, None)

    def _finish(self, finding: CheckFinding, cause: str) -> None:
        watch = self._watch
        try:
            watch._record(finding, cause, watch.clock.now() - self.began)
        finally:  # in any case, so that no caller waits forever
            self.future.set_result(None)


def _finding_of(value: object) -> CheckFinding:
    """Return the finding for a check's return value."""
    if isinstance(value, CheckFinding):
        return value
    if value is None or value is True:
        return Healthy()
    if value is False:
        return Unhealthy("it returned False")
    if isinstance(value, str):
        return Degraded(value)
    return Unhealthy(f"it returned {type(value).__name__}: return None, text or a finding")


def _finding_of_error(error: BaseException, *, hung: bool) -> tuple[CheckFinding, str]:
    """Return the finding for a check's exception: its type only; its text may hold a password."""
    if hung and isinstance(error, BulkheadFull):
        finding = Unhealthy("its last run still hangs in a thread")
        return finding, finding.output
    return Unhealthy(type(error).__name__), described(error)
