"""Seawall: the resilience layer for Python services.

All public names are here. Each is loaded when it is first used: importing the package costs next to
nothing, and a service pays only for the mechanisms it has.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; importing typing costs more than this file
if TYPE_CHECKING:
    from typing import Any

    from seawall.clock import Clock, SystemClock, VirtualClock
    from seawall.config import guard_from_table, guards_from_toml
    from seawall.context import (
        Criticality,
        Deadline,
        check_deadline,
        criticality,
        current_attempt,
        current_criticality,
        current_deadline,
        current_idempotency_key,
        deadline,
        idempotency_key,
    )
    from seawall.errors import (
        BulkheadFull,
        CacheMiss,
        CircuitOpen,
        DeadlineExceeded,
        Rejected,
        SeawallError,
        TimedOut,
    )
    from seawall.guard import Guard
    from seawall.models.backoff import (
        Backoff,
        constant,
        decorrelated_jitter,
        exponential,
        full_jitter,
        linear,
        plus_minus,
    )
    from seawall.models.budget import InFlightRatio, RequestRatio, SuccessDeposit
    from seawall.models.pressure import Pressure
    from seawall.models.probes import growing, n_of_m, ramp, single
    from seawall.models.sizing import pool_size, timeout_for
    from seawall.policies.breaker import Breaker
    from seawall.policies.budget import RetryBudget
    from seawall.policies.bulkhead import Bulkhead
    from seawall.policies.cache import Cache
    from seawall.policies.fallback import Fallback, fallback_reason, static
    from seawall.policies.retry import Retry, adaptive_attempts
    from seawall.policies.thread_bulkhead import ThreadBulkhead
    from seawall.policies.timeout import Timeout, adaptive
    from seawall.registry import check_threads, get_guard, guards
    from seawall.runtime.events import (
        BreakerChanged,
        CallRejected,
        CallRetried,
        CallTimedOut,
        Event,
        FallbackUsed,
        RetryStopped,
        SettingsChanged,
        ThreadAbandoned,
        subscribe,
    )
    from seawall.runtime.policy import Policy
    from seawall.runtime.result import Result

__all__ = [
    "Backoff",
    "Breaker",
    "BreakerChanged",
    "Bulkhead",
    "BulkheadFull",
    "Cache",
    "CacheMiss",
    "CallRejected",
    "CallRetried",
    "CallTimedOut",
    "CircuitOpen",
    "Clock",
    "Criticality",
    "Deadline",
    "DeadlineExceeded",
    "Event",
    "Fallback",
    "FallbackUsed",
    "Guard",
    "InFlightRatio",
    "Policy",
    "Pressure",
    "Rejected",
    "RequestRatio",
    "Result",
    "Retry",
    "RetryBudget",
    "RetryStopped",
    "SeawallError",
    "SettingsChanged",
    "SuccessDeposit",
    "SystemClock",
    "ThreadAbandoned",
    "ThreadBulkhead",
    "TimedOut",
    "Timeout",
    "VirtualClock",
    "adaptive",
    "adaptive_attempts",
    "check_deadline",
    "check_threads",
    "constant",
    "criticality",
    "current_attempt",
    "current_criticality",
    "current_deadline",
    "current_idempotency_key",
    "deadline",
    "decorrelated_jitter",
    "exponential",
    "fallback_reason",
    "full_jitter",
    "get_guard",
    "growing",
    "guard_from_table",
    "guards",
    "guards_from_toml",
    "idempotency_key",
    "linear",
    "n_of_m",
    "plus_minus",
    "pool_size",
    "ramp",
    "single",
    "static",
    "subscribe",
    "timeout_for",
]

_HOMES = {
    "Backoff": "models.backoff",
    "Breaker": "policies.breaker",
    "BreakerChanged": "runtime.events",
    "Bulkhead": "policies.bulkhead",
    "BulkheadFull": "errors",
    "Cache": "policies.cache",
    "CacheMiss": "errors",
    "CallRejected": "runtime.events",
    "CallRetried": "runtime.events",
    "CallTimedOut": "runtime.events",
    "CircuitOpen": "errors",
    "Clock": "clock",
    "Criticality": "context",
    "Deadline": "context",
    "DeadlineExceeded": "errors",
    "Event": "runtime.events",
    "Fallback": "policies.fallback",
    "FallbackUsed": "runtime.events",
    "Guard": "guard",
    "InFlightRatio": "models.budget",
    "Policy": "runtime.policy",
    "Pressure": "models.pressure",
    "Rejected": "errors",
    "RequestRatio": "models.budget",
    "Result": "runtime.result",
    "Retry": "policies.retry",
    "RetryBudget": "policies.budget",
    "RetryStopped": "runtime.events",
    "SeawallError": "errors",
    "SettingsChanged": "runtime.events",
    "SuccessDeposit": "models.budget",
    "SystemClock": "clock",
    "ThreadAbandoned": "runtime.events",
    "ThreadBulkhead": "policies.thread_bulkhead",
    "TimedOut": "errors",
    "Timeout": "policies.timeout",
    "VirtualClock": "clock",
    "adaptive": "policies.timeout",
    "adaptive_attempts": "policies.retry",
    "check_deadline": "context",
    "check_threads": "registry",
    "constant": "models.backoff",
    "criticality": "context",
    "current_attempt": "context",
    "current_criticality": "context",
    "current_deadline": "context",
    "current_idempotency_key": "context",
    "deadline": "context",
    "decorrelated_jitter": "models.backoff",
    "exponential": "models.backoff",
    "fallback_reason": "policies.fallback",
    "full_jitter": "models.backoff",
    "get_guard": "registry",
    "growing": "models.probes",
    "guard_from_table": "config",
    "guards": "registry",
    "guards_from_toml": "config",
    "idempotency_key": "context",
    "linear": "models.backoff",
    "n_of_m": "models.probes",
    "plus_minus": "models.backoff",
    "pool_size": "models.sizing",
    "ramp": "models.probes",
    "single": "models.probes",
    "static": "policies.fallback",
    "subscribe": "runtime.events",
    "timeout_for": "models.sizing",
}
"""In which module each public name is at home."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'seawall' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"seawall.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
