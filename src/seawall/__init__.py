"""Seawall: the resilience layer for Python services.

All public names are here, except those of a service's edges (`seawall.web`, `seawall.clients`), of
durable storage (`seawall.durable`) and of tests (`seawall.testing`); all errors and events are
here. Each name is loaded on first use: importing the package costs next to nothing, and a service
pays only for the mechanisms it uses.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # type checkers take it for True; importing typing costs more than this file
if TYPE_CHECKING:
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
        current_tenant,
        current_tier,
        deadline,
        idempotency_key,
        tenant,
        tier,
    )
    from seawall.errors import (
        AmbiguousHeader,
        AnswerNotKept,
        BadSignature,
        BulkheadFull,
        CacheMiss,
        ChannelClosed,
        ChannelFull,
        CircuitOpen,
        Contended,
        DeadlineExceeded,
        DeferredCallsFull,
        FifoFull,
        FifoStateLost,
        JobCancelled,
        JobExpired,
        JobFailed,
        JobLost,
        KeyInFlight,
        KeyMissing,
        KeyReused,
        LeaseLost,
        NotDelivered,
        Overloaded,
        PoolExhausted,
        QueueFull,
        RateLimited,
        RecordedFailure,
        RecordGarbled,
        Rejected,
        ReportedFailure,
        SeawallError,
        StoreUnavailable,
        TimedOut,
        UnknownJob,
        WorkerDied,
    )
    from seawall.events import (
        BreakerChanged,
        CallHedged,
        CallRejected,
        CallRetried,
        CallTimedOut,
        CollectionChanged,
        DeadLetterDropped,
        Degraded,
        Event,
        EventDied,
        FifoGap,
        HealthChanged,
        HostEjected,
        HostRestored,
        ImplausibleReport,
        ItemDied,
        JobDied,
        LeaseChanged,
        LevelChanged,
        LifecycleChanged,
        LoopBlocked,
        MemberChanged,
        OutboxBlocked,
        OverloadChanged,
        OwnPause,
        PipelineEnded,
        ResourceLeaked,
        RetryStopped,
        SettingsChanged,
        SettingsDiffer,
        SoftLimitExceeded,
        SourceChanged,
        StageChanged,
        StoreModeChanged,
        ThreadAbandoned,
        WorkerReplaced,
        subscribe,
    )
    from seawall.family import Family
    from seawall.guard import Guard
    from seawall.jobs import Claim, LocalQueue, Worker
    from seawall.leases.lease import Lease
    from seawall.load.service_levels import ServiceLevels
    from seawall.load.watchdog import LoopWatchdog
    from seawall.models.backoff import (
        Backoff,
        constant,
        decorrelated_jitter,
        exponential,
        full_jitter,
        linear,
        plus_minus,
    )
    from seawall.models.breaker.probes import growing, n_of_m, ramp, single_probe, slow_start
    from seawall.models.budget import InFlightRatio, RequestRatio, SuccessDeposit
    from seawall.models.concurrency.algorithms import aimd, gradient2, vegas
    from seawall.models.contention import Stripes
    from seawall.models.pooling import Advice
    from seawall.models.pressure import Pressure, RetryThresholds
    from seawall.models.service_levels import ServiceLevel
    from seawall.models.shedding.codel import adaptive_lifo, codel
    from seawall.models.shedding.rules import (
        by_cost,
        by_criticality,
        by_deadline,
        by_queue,
        by_tier,
    )
    from seawall.models.shedding.shares import by_chance, by_fraction, by_latency
    from seawall.models.sizing import pool_size, timeout_for
    from seawall.policies.adaptive_limit import AdaptiveLimit
    from seawall.policies.breaker import Breaker
    from seawall.policies.bulkhead import Bulkhead, ThreadBulkhead
    from seawall.policies.cache import Cache
    from seawall.policies.chaos import Chaos
    from seawall.policies.fallback import Fallback, fallback_reason, static
    from seawall.policies.hedge import Hedge, quantile
    from seawall.policies.rate_limit import Limit, Quota, RateLimit, Reservation
    from seawall.policies.retry import Retry, RetryBudget, adaptive_attempts, transient
    from seawall.policies.shed import Shed
    from seawall.policies.throttle import Throttle
    from seawall.policies.timeout import Timeout, adaptive_timeout
    from seawall.redis.queue import PriorityQueue
    from seawall.redis.store import RedisStore
    from seawall.registry import check_threads, explain, get_guard, guards, snapshot
    from seawall.resources.channel.channel import Channel
    from seawall.resources.contention import (
        Serializer,
        aupdate_optimistically,
        update_optimistically,
    )
    from seawall.resources.executors.executors import CpuPool, IoPool
    from seawall.resources.pool.borrowed import Borrowed
    from seawall.resources.pool.pool import Pool
    from seawall.runtime.batch import Batch
    from seawall.runtime.degradation import degradations
    from seawall.runtime.policy import Policy
    from seawall.runtime.result import Result
    from seawall.runtime.streams import primed

__all__ = [
    "AdaptiveLimit",
    "Advice",
    "AmbiguousHeader",
    "AnswerNotKept",
    "Backoff",
    "BadSignature",
    "Batch",
    "Borrowed",
    "Breaker",
    "BreakerChanged",
    "Bulkhead",
    "BulkheadFull",
    "Cache",
    "CacheMiss",
    "CallHedged",
    "CallRejected",
    "CallRetried",
    "CallTimedOut",
    "Channel",
    "ChannelClosed",
    "ChannelFull",
    "Chaos",
    "CircuitOpen",
    "Claim",
    "Clock",
    "CollectionChanged",
    "Contended",
    "CpuPool",
    "Criticality",
    "DeadLetterDropped",
    "Deadline",
    "DeadlineExceeded",
    "DeferredCallsFull",
    "Degraded",
    "Event",
    "EventDied",
    "Fallback",
    "Family",
    "FifoFull",
    "FifoGap",
    "FifoStateLost",
    "Guard",
    "HealthChanged",
    "Hedge",
    "HostEjected",
    "HostRestored",
    "ImplausibleReport",
    "InFlightRatio",
    "IoPool",
    "ItemDied",
    "JobCancelled",
    "JobDied",
    "JobExpired",
    "JobFailed",
    "JobLost",
    "KeyInFlight",
    "KeyMissing",
    "KeyReused",
    "Lease",
    "LeaseChanged",
    "LeaseLost",
    "LevelChanged",
    "LifecycleChanged",
    "Limit",
    "LocalQueue",
    "LoopBlocked",
    "LoopWatchdog",
    "MemberChanged",
    "NotDelivered",
    "OutboxBlocked",
    "OverloadChanged",
    "Overloaded",
    "OwnPause",
    "PipelineEnded",
    "Policy",
    "Pool",
    "PoolExhausted",
    "Pressure",
    "PriorityQueue",
    "QueueFull",
    "Quota",
    "RateLimit",
    "RateLimited",
    "RecordGarbled",
    "RecordedFailure",
    "RedisStore",
    "Rejected",
    "ReportedFailure",
    "RequestRatio",
    "Reservation",
    "ResourceLeaked",
    "Result",
    "Retry",
    "RetryBudget",
    "RetryStopped",
    "RetryThresholds",
    "SeawallError",
    "Serializer",
    "ServiceLevel",
    "ServiceLevels",
    "SettingsChanged",
    "SettingsDiffer",
    "Shed",
    "SoftLimitExceeded",
    "SourceChanged",
    "StageChanged",
    "StoreModeChanged",
    "StoreUnavailable",
    "Stripes",
    "SuccessDeposit",
    "SystemClock",
    "ThreadAbandoned",
    "ThreadBulkhead",
    "Throttle",
    "TimedOut",
    "Timeout",
    "UnknownJob",
    "VirtualClock",
    "Worker",
    "WorkerDied",
    "WorkerReplaced",
    "adaptive_attempts",
    "adaptive_lifo",
    "adaptive_timeout",
    "aimd",
    "aupdate_optimistically",
    "by_chance",
    "by_cost",
    "by_criticality",
    "by_deadline",
    "by_fraction",
    "by_latency",
    "by_queue",
    "by_tier",
    "check_deadline",
    "check_threads",
    "codel",
    "constant",
    "criticality",
    "current_attempt",
    "current_criticality",
    "current_deadline",
    "current_idempotency_key",
    "current_tenant",
    "current_tier",
    "deadline",
    "decorrelated_jitter",
    "degradations",
    "explain",
    "exponential",
    "fallback_reason",
    "full_jitter",
    "get_guard",
    "gradient2",
    "growing",
    "guard_from_table",
    "guards",
    "guards_from_toml",
    "idempotency_key",
    "linear",
    "n_of_m",
    "plus_minus",
    "pool_size",
    "primed",
    "quantile",
    "ramp",
    "single_probe",
    "slow_start",
    "snapshot",
    "static",
    "subscribe",
    "tenant",
    "tier",
    "timeout_for",
    "transient",
    "update_optimistically",
    "vegas",
]

_HOMES = {
    "resources.channel": "Channel",
    "clock": "Clock SystemClock VirtualClock",
    "config": "guard_from_table guards_from_toml",
    "resources.contention": "Serializer aupdate_optimistically update_optimistically",
    "context": (
        "Criticality Deadline check_deadline criticality current_attempt current_criticality "
        "current_deadline current_idempotency_key current_tenant current_tier deadline "
        "idempotency_key tenant tier"
    ),
    "errors": (
        "AmbiguousHeader AnswerNotKept BadSignature BulkheadFull CacheMiss ChannelClosed "
        "ChannelFull CircuitOpen Contended DeadlineExceeded FifoFull FifoStateLost JobCancelled "
        "JobExpired JobFailed JobLost KeyInFlight KeyMissing "
        "KeyReused DeferredCallsFull LeaseLost NotDelivered Overloaded PoolExhausted QueueFull "
        "RateLimited RecordGarbled RecordedFailure Rejected ReportedFailure SeawallError "
        "StoreUnavailable TimedOut UnknownJob WorkerDied"
    ),
    "resources.executors": "CpuPool IoPool",
    "events": (
        "BreakerChanged CallHedged CallRejected CallRetried CallTimedOut CollectionChanged "
        "DeadLetterDropped Degraded Event EventDied FifoGap HealthChanged HostEjected "
        "HostRestored ImplausibleReport ItemDied JobDied LeaseChanged LevelChanged "
        "LifecycleChanged LoopBlocked MemberChanged OutboxBlocked OverloadChanged OwnPause "
        "PipelineEnded ResourceLeaked RetryStopped SettingsChanged SettingsDiffer "
        "SoftLimitExceeded SourceChanged StageChanged StoreModeChanged ThreadAbandoned "
        "WorkerReplaced subscribe"
    ),
    "family": "Family",
    "guard": "Guard",
    "jobs": "Claim LocalQueue Worker",
    "load.service_levels": "ServiceLevels",
    "models.concurrency.algorithms": "aimd gradient2 vegas",
    "models.backoff": (
        "Backoff constant decorrelated_jitter exponential full_jitter linear plus_minus"
    ),
    "models.budget": "InFlightRatio RequestRatio SuccessDeposit",
    "models.shedding.codel": "adaptive_lifo codel",
    "models.contention": "Stripes",
    "models.service_levels": "ServiceLevel",
    "models.pooling": "Advice",
    "models.pressure": "Pressure RetryThresholds",
    "models.breaker.probes": "growing n_of_m ramp single_probe slow_start",
    "models.shedding.shares": "by_chance by_fraction by_latency",
    "models.shedding.rules": "by_cost by_criticality by_deadline by_queue by_tier",
    "models.sizing": "pool_size timeout_for",
    "policies.adaptive_limit": "AdaptiveLimit",
    "policies.breaker": "Breaker",
    "policies.bulkhead": "Bulkhead ThreadBulkhead",
    "policies.cache": "Cache",
    "policies.chaos": "Chaos",
    "policies.fallback": "Fallback fallback_reason static",
    "policies.hedge": "Hedge quantile",
    "policies.rate_limit": "Limit Quota RateLimit Reservation",
    "policies.retry": "Retry RetryBudget adaptive_attempts transient",
    "policies.shed": "Shed",
    "policies.throttle": "Throttle",
    "policies.timeout": "Timeout adaptive_timeout",
    "resources.pool": "Pool",
    "resources.pool.borrowed": "Borrowed",
    "registry": "check_threads explain get_guard guards snapshot",
    "runtime.batch": "Batch",
    "runtime.degradation": "degradations",
    "runtime.policy": "Policy",
    "runtime.result": "Result",
    "runtime.streams": "primed",
    "redis.store": "RedisStore",
    "leases.lease": "Lease",
    "redis.queue": "PriorityQueue",
    "load.watchdog": "LoopWatchdog",
}
"""The public names by the module that defines them."""

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
