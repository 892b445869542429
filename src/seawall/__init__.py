"""Seawall: the resilience layer for Python services."""

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
