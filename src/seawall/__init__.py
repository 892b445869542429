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
    from seawall.config import guards_from_toml as guards_from_toml
    from seawall.context import Criticality as Criticality
    from seawall.context import check_deadline as check_deadline
    from seawall.context import criticality as criticality
    from seawall.context import current_deadline as current_deadline
    from seawall.context import deadline as deadline
    from seawall.errors import BulkheadFull as BulkheadFull
    from seawall.errors import CircuitOpen as CircuitOpen
    from seawall.errors import DeadlineExceeded as DeadlineExceeded
    from seawall.errors import Overloaded as Overloaded
    from seawall.errors import RateLimited as RateLimited
    from seawall.errors import Rejected as Rejected
    from seawall.errors import SeawallError as SeawallError
    from seawall.errors import TimedOut as TimedOut
    from seawall.events import subscribe as subscribe
    from seawall.family import Family as Family
    from seawall.guard import Guard as Guard
    from seawall.models.backoff import full_jitter as full_jitter
    from seawall.policies.adaptive_limit import AdaptiveLimit as AdaptiveLimit
    from seawall.policies.breaker import Breaker as Breaker
    from seawall.policies.bulkhead import Bulkhead as Bulkhead
    from seawall.policies.bulkhead import ThreadBulkhead as ThreadBulkhead
    from seawall.policies.cache import Cache as Cache
    from seawall.policies.chaos import Chaos as Chaos
    from seawall.policies.fallback import Fallback as Fallback
    from seawall.policies.fallback import static as static
    from seawall.policies.hedge import Hedge as Hedge
    from seawall.policies.rate_limit import RateLimit as RateLimit
    from seawall.policies.retry import Retry as Retry
    from seawall.policies.retry import RetryBudget as RetryBudget
    from seawall.policies.retry import transient as transient
    from seawall.policies.shed import Shed as Shed
    from seawall.policies.throttle import Throttle as Throttle
    from seawall.policies.timeout import Timeout as Timeout
    from seawall.redis.store import RedisStore as RedisStore
    from seawall.registry import explain as explain
    from seawall.registry import get_guard as get_guard
    from seawall.registry import guards as guards
    from seawall.registry import snapshot as snapshot
    from seawall.runtime.batch import Batch as Batch
    from seawall.runtime.degradation import degradations as degradations
    from seawall.runtime.policy import Policy as Policy
    from seawall.runtime.result import Result as Result

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
"""The public names by the module that defines them; `lazily` makes `__all__` of them."""

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
