"""Seawall: the resilience layer for Python services.

Here are the names that almost every service uses: `Guard`, the policies, deadlines, the base
errors. The others are where they belong:

    seawall.errors, events, backoff, shedding, limits, context, clock, config
    seawall.policies.*       what belongs to one policy: probes of breakers, budgets of retries ...
    seawall.resources        pools, channels, executors, contention
    seawall.load             signals, service levels, the loop watchdog
    seawall.redis, leases    what pods share
    seawall.jobs             queues and workers
    seawall.durable          effects that happen once
    seawall.members, pipeline, web, clients, telemetry, dashboard, testing

Each name is loaded on first use: importing the package costs next to nothing, and a service pays
only for the mechanisms it uses.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # type checkers take it for True; importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.config import guards_from_toml
    from seawall.context import Criticality, check_deadline, criticality, current_deadline, deadline
    from seawall.errors import (
        BulkheadFull,
        CircuitOpen,
        DeadlineExceeded,
        Overloaded,
        RateLimited,
        Rejected,
        SeawallError,
        TimedOut,
    )
    from seawall.events import subscribe
    from seawall.family import Family
    from seawall.guard import Guard
    from seawall.models.backoff import full_jitter
    from seawall.policies.adaptive_limit import AdaptiveLimit
    from seawall.policies.breaker import Breaker
    from seawall.policies.bulkhead import Bulkhead, ThreadBulkhead
    from seawall.policies.cache import Cache
    from seawall.policies.chaos import Chaos
    from seawall.policies.fallback import Fallback, static
    from seawall.policies.hedge import Hedge
    from seawall.policies.rate_limit import RateLimit
    from seawall.policies.retry import Retry, RetryBudget, transient
    from seawall.policies.shed import Shed
    from seawall.policies.throttle import Throttle
    from seawall.policies.timeout import Timeout
    from seawall.redis.store import RedisStore
    from seawall.registry import explain, get_guard, guards, snapshot
    from seawall.runtime.batch import Batch
    from seawall.runtime.degradation import degradations
    from seawall.runtime.policy import Policy
    from seawall.runtime.result import Result

__all__ = [
    "AdaptiveLimit",
    "Batch",
    "Breaker",
    "Bulkhead",
    "BulkheadFull",
    "Cache",
    "Chaos",
    "CircuitOpen",
    "Criticality",
    "DeadlineExceeded",
    "Fallback",
    "Family",
    "Guard",
    "Hedge",
    "Overloaded",
    "Policy",
    "RateLimit",
    "RateLimited",
    "RedisStore",
    "Rejected",
    "Result",
    "Retry",
    "RetryBudget",
    "SeawallError",
    "Shed",
    "ThreadBulkhead",
    "Throttle",
    "TimedOut",
    "Timeout",
    "check_deadline",
    "criticality",
    "current_deadline",
    "deadline",
    "degradations",
    "explain",
    "full_jitter",
    "get_guard",
    "guards",
    "guards_from_toml",
    "snapshot",
    "static",
    "subscribe",
    "transient",
]

_HOMES = {
    "config": "guards_from_toml",
    "context": "Criticality check_deadline criticality current_deadline deadline",
    "errors": (
        "BulkheadFull CircuitOpen DeadlineExceeded Overloaded RateLimited Rejected SeawallError "
        "TimedOut"
    ),
    "events": "subscribe",
    "family": "Family",
    "guard": "Guard",
    "models.backoff": "full_jitter",
    "policies.adaptive_limit": "AdaptiveLimit",
    "policies.breaker": "Breaker",
    "policies.bulkhead": "Bulkhead ThreadBulkhead",
    "policies.cache": "Cache",
    "policies.chaos": "Chaos",
    "policies.fallback": "Fallback static",
    "policies.hedge": "Hedge",
    "policies.rate_limit": "RateLimit",
    "policies.retry": "Retry RetryBudget transient",
    "policies.shed": "Shed",
    "policies.throttle": "Throttle",
    "policies.timeout": "Timeout",
    "redis.store": "RedisStore",
    "registry": "explain get_guard guards snapshot",
    "runtime.batch": "Batch",
    "runtime.degradation": "degradations",
    "runtime.policy": "Policy",
    "runtime.result": "Result",
}
"""The public names by the module that defines them."""

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
