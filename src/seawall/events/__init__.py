"""Typed events: what changed or went wrong, for logs, metrics, alerts and tests.

`subscribe(listener, *types)` calls a function for each event. All events are dataclasses with a
stable `name`. Each is loaded on first use.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.events.bus import Event as Event
    from seawall.events.bus import subscribe as subscribe
    from seawall.events.calls import BreakerChanged as BreakerChanged
    from seawall.events.calls import CallHedged as CallHedged
    from seawall.events.calls import CallRejected as CallRejected
    from seawall.events.calls import CallRetried as CallRetried
    from seawall.events.calls import CallTimedOut as CallTimedOut
    from seawall.events.calls import Degraded as Degraded
    from seawall.events.calls import ImplausibleReport as ImplausibleReport
    from seawall.events.calls import RetryStopped as RetryStopped
    from seawall.events.calls import SettingsChanged as SettingsChanged
    from seawall.events.calls import SettingsDiffer as SettingsDiffer
    from seawall.events.calls import StoreModeChanged as StoreModeChanged
    from seawall.events.calls import ThreadAbandoned as ThreadAbandoned
    from seawall.events.services import HealthChanged as HealthChanged
    from seawall.events.services import HostEjected as HostEjected
    from seawall.events.services import HostRestored as HostRestored
    from seawall.events.services import LeaseChanged as LeaseChanged
    from seawall.events.services import LevelChanged as LevelChanged
    from seawall.events.services import LifecycleChanged as LifecycleChanged
    from seawall.events.services import LoopBlocked as LoopBlocked
    from seawall.events.services import MemberChanged as MemberChanged
    from seawall.events.services import OverloadChanged as OverloadChanged
    from seawall.events.services import OwnPause as OwnPause
    from seawall.events.services import ResourceLeaked as ResourceLeaked
    from seawall.events.services import SoftLimitExceeded as SoftLimitExceeded
    from seawall.events.services import WorkerReplaced as WorkerReplaced
    from seawall.events.work import CollectionChanged as CollectionChanged
    from seawall.events.work import DeadLetterDropped as DeadLetterDropped
    from seawall.events.work import EventDied as EventDied
    from seawall.events.work import FifoGap as FifoGap
    from seawall.events.work import ItemDied as ItemDied
    from seawall.events.work import JobDied as JobDied
    from seawall.events.work import OutboxBlocked as OutboxBlocked
    from seawall.events.work import PipelineEnded as PipelineEnded
    from seawall.events.work import SourceChanged as SourceChanged
    from seawall.events.work import StageChanged as StageChanged

_HOMES = {
    "events.bus": "Event subscribe",
    "events.calls": """
        BreakerChanged CallHedged CallRejected CallRetried CallTimedOut Degraded ImplausibleReport
        RetryStopped SettingsChanged SettingsDiffer StoreModeChanged ThreadAbandoned
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
"""The names by the module that defines them; `lazily` makes `__all__` of them."""

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
