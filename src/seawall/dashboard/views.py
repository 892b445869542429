"""The view of a process: one plain document, the same for the page, the terminal and other pods.

It is all JSON. Names, keys and texts come from users and from other pods: code that displays them
must escape them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

FORMAT: Final = 1
"""Format number in each view; readers omit views of another format."""

Tone = Literal["ok", "warn", "bad", "off"]
"""State of something: as it should be, worth a look, broken, or switched off."""


class Pod(TypedDict):
    """Identity of a process."""

    name: str
    host: str
    pid: int
    version: str
    up_seconds: float


class PodTrouble(TypedDict):
    """A current problem. `id` is the same for as long as it lasts."""

    id: str
    tone: Tone
    where: str
    what: str
    """One plain sentence."""
    advice: str
    """What to check or do; may be empty."""
    since: float
    """Unix seconds."""
    cause: NotRequired[str]
    """The id of the problem that causes this one, if there is one."""
    degrades: NotRequired[bool]
    """Whether callers get degraded answers because of it."""
    trace: NotRequired[str]
    """The id of the trace in which it started, if the process is traced."""


class SettingChange(TypedDict):
    """A setting that an operator may change: an argument of `policy.update`."""

    name: str
    value: Any
    kind: Literal["number", "text"]


class LayerView(TypedDict):
    """One policy of a guard's stack."""

    policy: str
    """Its kind: "breaker", "rate_limit"..."""
    title: str
    """As it is written in code: "Breaker"."""
    settings: str
    """The settings in a few words, such as "3 attempts, backoff from 0.1 s"."""
    tone: Tone
    state: str
    """In a word or two: "closed", "3 of 20 in use", "shadow"; may be empty."""
    facts: list[tuple[str, str]]
    """Further facts as label and value, ready to be shown."""
    sharing: str
    """Empty if it is this pod's own; otherwise "shared", or its mode without the store: "local"...
    """
    acts: list[str]
    """The possible actions of an operator: "isolate", "close"."""
    changes: list[SettingChange]


class Rates(TypedDict):
    """Rates per second since the last sample."""

    succeeded: float
    degraded: float
    failed: float
    rejected: float
    cancelled: float
    retries: float


class GuardView(TypedDict):
    """A guard and its stack, outermost first."""

    name: str
    tone: Tone
    state: str
    """The worst state of its stack in a word or two: "open", "shedding"; "well" if nothing is
    wrong.
    """
    edge: bool
    """Whether it is the edge of a service, not a guard of a dependency."""
    breaker: str | None
    """The state of its breaker, the worst if there are several."""
    rates: Rates
    error_ratio: float
    last_error: NotRequired[str]
    """The error of the latest failed attempt, how often in a row, and how long ago."""
    p50: float | None
    p95: float | None
    p99: float | None
    """Latencies in seconds."""
    stack: list[LayerView]


class SourceReading(TypedDict):
    """One of the readings that a collecting source of a pipeline has."""

    name: str
    state: str
    """One of "ok", "stale" and "unavailable"."""
    seconds: float
    """Seconds for which it has not answered."""
    cause: str


class PipeWork(TypedDict):
    """The current work of one worker of a stage."""

    item: str
    items: int
    """Number of items, in a batch."""
    since: float
    """Seconds for which it has been working."""
    waits_for: str


class PipeNode(TypedDict):
    """A source, a stage, a branch or a sink of a pipeline."""

    name: str
    kind: Literal["source", "stage", "branch", "sink"]
    tone: Tone
    state: str
    """In a few words."""
    to: list[int]
    """Indices of the nodes to which its items go."""
    rate: float
    """Items per second."""
    waiting: float
    capacity: float
    """Maximum number of waiting items; 0 if it has no queue."""
    busy: float
    workers: float
    oldest: float
    """Seconds for which the first item in its queue has waited."""
    p50: float | None
    p99: float | None
    counts: dict[str, float]
    """Counters since the start, without zeros: done, retries, failed, degraded, dropped..."""
    waits_for: str
    """Why it is blocked, if it is; waiting for the next stage is not a reason."""
    failures: list[tuple[str, int]]
    """Causes, the most frequent first."""
    at_work: list[PipeWork]
    readings: list[SourceReading]
    facts: list[tuple[str, str]]


class OldestItem(TypedDict):
    """The item that has been in a pipeline longest."""

    item: str
    age: float
    stage: str


class Pipes(TypedDict):
    """Data for drawing a pipeline."""

    oldest: OldestItem | None
    nodes: list[PipeNode]
    """The sources come first."""
    slow: int | None
    """Index of the stage that the others wait for, if there is one."""
    more: int
    """Number of omitted nodes."""


class RowView(TypedDict):
    """Any other object: a limit, a queue, an outbox, a pool, a store..."""

    kind: str
    name: str
    tone: Tone
    state: str
    facts: list[tuple[str, str]]
    gauge: float | None
    """How full or used up it is, from 0 to 1; None if it has no size."""
    track: float | None
    """The number whose history is drawn: waiting items, refusals per second..."""
    figures: NotRequired[dict[str, float]]
    """Facts of a member as numbers for programs: seconds, level, threshold, round_trip."""
    pipes: NotRequired[Pipes]
    """Data for drawing, if it is a pipeline."""


class PodEvent(TypedDict):
    """An event or several: a breaker opened, a store was lost.

    Events of the same subject that follow each other closely are one entry.
    """

    at: float
    """Time of the last event."""
    began: float
    """Time of the first event."""
    tone: Tone
    """Tone of the last event."""
    where: str
    what: str
    """The last event, as a sentence."""
    about: str
    """The subject of the events: "the breaker". The whole sentence if they have none."""
    counts: dict[str, int]
    """How often the subject did what: {"opened": 7, "closed": 6}. {"": 3} if it has no states."""
    trace: NotRequired[str]
    """The id of the last trace in which it happened, if the process is traced."""


class View(TypedDict):
    """One process at one moment."""

    format: int
    pod: Pod
    at: float
    """Unix seconds."""
    every: float
    """Seconds between two samples."""
    load: float
    """Utilization: 1.0 is full."""
    operable: bool
    """Whether an operator can act on this pod from where it is shown."""
    troubles: list[PodTrouble]
    guards: list[GuardView]
    all_guards: NotRequired[int]
    """The number of all guards, if that is more than are shown."""
    sections: dict[str, list[RowView]]
    """Rows by title, in order of display: "Limits", "Queues", "Outbox and jobs"..."""
    happenings: list[PodEvent]
    """The latest last."""
    age: NotRequired[float]
    """Age of another pod's view in seconds, by the store's clock."""
    gone: NotRequired[float]
    """Time since which a pod is gone, in Unix seconds."""


class ServiceTrouble(PodTrouble):
    """A problem with all pods that have it, and with its consequences."""

    pods: list[str]
    runbook: NotRequired[str]
    """The address of its runbook."""
    trace_link: NotRequired[str]
    """The address of the trace in which it started."""
    consequences: list[ServiceTrouble]
    """The worst first. These have no consequences of their own."""


class ServiceVerdict(TypedDict):
    """The overall state of all pods, in a few words."""

    tone: Tone
    words: str


class ServiceEvent(TypedDict):
    """The events of one subject on all pods, in one sentence."""

    at: float
    """Time of the last event."""
    began: float
    tone: Tone
    where: str
    what: str
    pods: list[str]
    trace_link: NotRequired[str]
    """The address of the last trace in which it happened."""


class GuardTrack(TypedDict):
    """The history of a guard: lists of equal length, the oldest first."""

    succeeded: list[float]
    degraded: list[float]
    failed: list[float]
    rejected: list[float]
    p50: list[float | None]
    p99: list[float | None]
    breaker: list[str | None]


class History(TypedDict):
    """The history of a pod, one point for each sample."""

    at: list[float]
    guards: dict[str, GuardTrack]
    rows: dict[str, list[float | None]]
    """By "kind/name"; the rates of a pipeline's nodes by "pipe/pipeline/node"."""


class DashboardMessage(TypedDict):
    """A message to the page and the terminal, sent each `every` seconds; `history` only once."""

    title: str
    at: float
    operator: str | None
    """The operator who may act; None if it is read-only."""
    verdict: ServiceVerdict
    troubles: list[ServiceTrouble]
    """The problems of all pods, by cause: the worst first, then the oldest."""
    happened: list[ServiceEvent]
    """The events of all pods, the latest first."""
    views: list[View]
    history: dict[str, History] | None
    """Histories by pod."""
    extra: dict[str, Any] | None
    """Additional data of a derived page, such as the demo."""
