"""Typed events: what changed or went wrong, for logs, metrics, alerts and tests.

`subscribe(listener, *types)` calls a function for each event. All events are dataclasses with a
stable `name`. Each is loaded on first use.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.events.bus import Event, subscribe
    from seawall.events.calls import (
        BreakerChanged,
        CallDegraded,
        CallHedged,
        CallRejected,
        CallRetried,
        CallTimedOut,
        ImplausibleReport,
        RetryStopped,
        SettingsChanged,
        SettingsDiffer,
        StoreModeChanged,
        ThreadAbandoned,
    )
    from seawall.events.services import (
        HealthChanged,
        HostEjected,
        HostRestored,
        LeaseChanged,
        LevelChanged,
        LifecycleChanged,
        LoopBlocked,
        MemberChanged,
        OverloadChanged,
        OwnPause,
        ResourceLeaked,
        SoftLimitExceeded,
        WorkerReplaced,
    )
    from seawall.events.work import (
        CollectionChanged,
        DeadLetterDropped,
        EventDied,
        FifoGap,
        ItemDied,
        JobDied,
        OutboxBlocked,
        PipelineEnded,
        SourceChanged,
        StageChanged,
    )

__all__ = [
    "BreakerChanged",
    "CallDegraded",
    "CallHedged",
    "CallRejected",
    "CallRetried",
    "CallTimedOut",
    "CollectionChanged",
    "DeadLetterDropped",
    "Event",
    "EventDied",
    "FifoGap",
    "HealthChanged",
    "HostEjected",
    "HostRestored",
    "ImplausibleReport",
    "ItemDied",
    "JobDied",
    "LeaseChanged",
    "LevelChanged",
    "LifecycleChanged",
    "LoopBlocked",
    "MemberChanged",
    "OutboxBlocked",
    "OverloadChanged",
    "OwnPause",
    "PipelineEnded",
    "ResourceLeaked",
    "RetryStopped",
    "SettingsChanged",
    "SettingsDiffer",
    "SoftLimitExceeded",
    "SourceChanged",
    "StageChanged",
    "StoreModeChanged",
    "ThreadAbandoned",
    "WorkerReplaced",
    "subscribe",
]

_HOMES = {
    "events.bus": "Event subscribe",
    "events.calls": """
        BreakerChanged CallDegraded CallHedged CallRejected CallRetried CallTimedOut
        ImplausibleReport RetryStopped SettingsChanged SettingsDiffer StoreModeChanged
        ThreadAbandoned
    """,
    "events.services": """
        HealthChanged HostEjected HostRestored LeaseChanged LevelChanged LifecycleChanged
        LoopBlocked MemberChanged OverloadChanged OwnPause ResourceLeaked SoftLimitExceeded
        WorkerReplaced
    """,
    "events.work": """
        CollectionChanged DeadLetterDropped EventDied FifoGap ItemDied JobDied OutboxBlocked
        PipelineEnded SourceChanged StageChanged
    """,
}
"""The names by the module that defines them."""

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
