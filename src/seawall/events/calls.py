"""Events of guards: what their policies did to a call, and what became of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seawall.events.bus import Event


@dataclass(slots=True, kw_only=True, eq=False)
class BreakerChanged(Event):
    """A breaker went from one state to another."""

    name = "breaker_changed"
    is_change = True

    before: str
    after: str
    cause: str
    key: object
    """Key of a keyed breaker."""
    reason: str = ""
    """How the call that opened it failed, as in `CallRetried`. Empty if no call's failure opened
    it, or if that is unknown."""
    failure: str = ""
    """Type and message of that error on one short line, redacted."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallRejected(Event):
    """A policy refused a call; in shadow mode (`enforced=False`) it would have."""

    name = "call_rejected"

    policy: str
    reason: str
    enforced: bool
    key: object = None
    """Key of the call, if the policy has keys."""
    message: str = ""
    """First line of the refusal's text, redacted."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallRetried(Event):
    """An attempt failed and another will follow after `delay` seconds."""

    name = "call_retried"

    attempt: int
    """Number of the attempt that failed."""
    delay: float
    reason: str
    """A word with few values: the status of an HTTP answer ("503"), the code of a gRPC call, the
    `reason` of a Seawall error, otherwise the name of the error's type; or "value"."""
    failure: str = ""
    """A human-readable line about the error ("503 from vendor.example"), redacted."""


@dataclass(slots=True, kw_only=True, eq=False)
class RetryStopped(Event):
    """No further attempt was made although the error is one to retry."""

    name = "retry_stopped"

    attempt: int
    """Number of the last attempt."""
    cause: str
    """What stopped it: attempts, budget, deadline..."""
    reason: str
    """How the last attempt failed, as in `CallRetried`."""
    failure: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class CallHedged(Event):
    """A call was slow, so a second copy was started beside it."""

    name = "call_hedged"

    number: int
    """Number of running copies, including this one."""
    delay: float
    """Seconds from the start of the call to the start of this copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallTimedOut(Event):
    """A call was stopped because its time was over."""

    name = "call_timed_out"

    seconds: float
    """How long the call was allowed to take."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallDegraded(Event):
    """A call got a lesser answer than the real one."""

    name = "call_degraded"

    source: str
    """Name of a fallback's function, "static" or "cache: stale"."""
    level: int
    """Position of the source among the fallbacks; 1 is the first."""
    reason: str
    """Why the fallback was necessary, as in `CallRetried`."""
    message: str = ""
    """First line of that error's text, redacted."""
    age: float | None = None
    """Age of a stale answer in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class ThreadAbandoned(Event):
    """A worker thread keeps running after its caller gave up; `running` such threads exist now."""

    name = "thread_abandoned"

    running: int


@dataclass(slots=True, kw_only=True, eq=False)
class SettingsChanged(Event):
    """A policy's settings were changed at run time."""

    name = "settings_changed"
    is_change = True

    policy: str
    changes: dict[str, Any]
    """The new values."""


@dataclass(slots=True, kw_only=True, eq=False)
class SettingsDiffer(Event):
    """Pods share a policy of the same name but disagree on its settings."""

    name = "settings_differ"
    is_change = True

    policy: str
    shared_name: str
    own: str
    """Settings of this pod."""
    other: str
    """Settings that another pod has announced."""


@dataclass(slots=True, kw_only=True, eq=False)
class StoreModeChanged(Event):
    """A shared policy continues without its store, or with it again."""

    name = "store_mode_changed"

    policy: str
    store: str
    before: str
    """The value "shared", or that of `on_store_failure`; so is `after`."""
    after: str
    cause: str


@dataclass(slots=True, kw_only=True, eq=False)
class ImplausibleReport(Event):
    """A limit got an impossible report of a cost or from a vendor, and clipped it."""

    name = "implausible_report"

    policy: str
    limit: str
    what: str
    """What was reported: "cost" or "reset_after"."""
    reported: float
    counted: float
    """The part of it that counts."""
