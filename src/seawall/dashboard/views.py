"""The view of a process: one plain document, the same for the page, the terminal and other pods.

It is all JSON. Names, keys and texts come from users and from other pods: code that displays them
must escape them. `Annotated` has the bounds that `validation` checks: the maximum length of a text,
a list or a mapping, the maximum of a whole number, the range of another number.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from seawall.dashboard import bounds

FORMAT: Final = 1
"""Format number in each view; readers omit views of another format."""

Tone = Literal["ok", "warn", "bad", "off"]
"""State of something: as it should be, worth a look, broken, or switched off."""
WORST: Final[tuple[Tone, ...]] = ("bad", "warn", "ok", "off")
"""The tones in order of urgency."""

Word = Annotated[str, bounds.LONGEST_WORD]
Name = Annotated[str, bounds.LONGEST_NAME]
Text = Annotated[str, bounds.LONGEST_TEXT]
Amount = Annotated[float, 0, bounds.HUGE]
Share = Annotated[float, 0, 1]
Place = Annotated[int, bounds.MOST_NODES - 1]
RowName = Annotated[str, 2 * bounds.LONGEST_NAME]
Track = Annotated[list[float | None], bounds.MOST_POINTS]
Facts = Annotated[list[tuple[Text, Text]], bounds.MOST_FACTS]
"""Labels and values, ready to be shown."""


class Pod(TypedDict):
    """Identity of a process."""

    name: Name
    host: Name
    pid: int
    version: Word
    up_seconds: Amount


class PodTrouble(TypedDict):
    """A current problem. `id` is the same for as long as it lasts."""

    id: Text
    tone: Tone
    where: Name
    what: Text
    """One plain sentence."""
    advice: Text
    """What to check or do; may be empty."""
    since: float
    """Unix seconds."""
    cause: NotRequired[Text]
    """The id of the problem that causes this one, if there is one."""
    degrades: NotRequired[bool]
    """Whether callers get degraded answers because of it."""
    trace: NotRequired[Word]
    """The id of the trace in which it started, if the process is traced."""


class SettingChange(TypedDict):
    """A setting that an operator may change: an argument of `policy.update`."""

    name: Word
    value: Any
    kind: Literal["number", "text"]


class LayerView(TypedDict):
    """One policy of a guard's stack."""

    policy: Word
    """Its kind: "breaker", "rate_limit"..."""
    title: Word
    """As it is written in code: "Breaker"."""
    settings: Text
    """The settings in a few words, such as "3 attempts, backoff from 0.1 s"."""
    tone: Tone
    state: Word
    """In a word or two: "closed", "3 of 20 in use", "shadow"; may be empty."""
    facts: Facts
    sharing: Word
    """Empty if it is this pod's own; otherwise "shared", or its mode without the store: "local"...
    """
    acts: Annotated[list[Word], bounds.MOST_ACTS]
    """The possible actions of an operator: "isolate", "close"."""
    changes: Annotated[list[SettingChange], bounds.MOST_CHANGES]


class Rates(TypedDict):
    """Rates per second since the last sample."""

    succeeded: Amount
    degraded: Amount
    failed: Amount
    rejected: Amount
    cancelled: Amount
    retries: Amount


class GuardView(TypedDict):
    """A guard and its stack, outermost first."""

    name: Name
    tone: Tone
    state: Word
    """The worst state of its stack in a word or two: "open", "shedding"; "well" if nothing is
    wrong.
    """
    edge: bool
    """Whether it is the edge of a service, not a guard of a dependency."""
    breaker: Word | None
    """The state of its breaker, the worst if there are several."""
    rates: Rates
    error_ratio: Share
    last_error: NotRequired[Text]
    """The error of the latest failed attempt, how often in a row, and how long ago."""
    p50: Amount | None
    p95: Amount | None
    p99: Amount | None
    """Latencies in seconds."""
    stack: Annotated[list[LayerView], bounds.MOST_LAYERS]


class SourceReading(TypedDict):
    """One of the readings that a collecting source of a pipeline has."""

    name: Word
    state: Word
    """One of "ok", "stale" and "unavailable"."""
    seconds: Amount
    """Seconds for which it has not answered."""
    cause: Text


class PipeWork(TypedDict):
    """The current work of one worker of a stage."""

    item: Word
    items: int
    """Number of items, in a batch."""
    since: Amount
    """Seconds for which it has been working."""
    waits_for: Word


class PipeNode(TypedDict):
    """A source, a stage, a branch or a sink of a pipeline."""

    name: Word
    kind: Literal["source", "stage", "branch", "sink"]
    tone: Tone
    state: Text
    """In a few words."""
    to: Annotated[list[Place], bounds.MOST_NODES]
    """Indices of the nodes to which its items go."""
    rate: Amount
    """Items per second."""
    waiting: Amount
    capacity: Amount
    """Maximum number of waiting items; 0 if it has no queue."""
    busy: Amount
    workers: Amount
    oldest: Amount
    """Seconds for which the first item in its queue has waited."""
    p50: Amount | None
    p99: Amount | None
    counts: Annotated[dict[Word, Amount], bounds.MOST_FACTS]
    """Counters since the start, without zeros: done, retries, failed, degraded, dropped..."""
    waits_for: Text
    """Why it is blocked, if it is; waiting for the next stage is not a reason."""
    failures: Annotated[list[tuple[Name, int]], bounds.MOST_CAUSES]
    """Causes, the most frequent first."""
    at_work: Annotated[list[PipeWork], bounds.MOST_AT_WORK]
    readings: Annotated[list[SourceReading], bounds.MOST_READINGS]
    facts: Facts


class OldestItem(TypedDict):
    """The item that has been in a pipeline longest."""

    item: Word
    age: Amount
    stage: Word


class Pipes(TypedDict):
    """Data for drawing a pipeline."""

    oldest: OldestItem | None
    nodes: Annotated[list[PipeNode], bounds.MOST_NODES]
    """The sources come first."""
    slow: Place | None
    """Index of the stage that the others wait for, if there is one."""
    more: int
    """Number of omitted nodes."""


class MemberFigures(TypedDict):
    """Facts of a member as numbers for programs."""

    seconds: float
    level: float
    threshold: float
    round_trip: NotRequired[float]


class RowView(TypedDict):
    """Any other object: a limit, a queue, an outbox, a pool, a store..."""

    kind: Word
    name: Name
    tone: Tone
    state: Word
    facts: Facts
    gauge: Share | None
    """How full or used up it is, from 0 to 1; None if it has no size."""
    track: float | None
    """The number whose history is drawn: waiting items, refusals per second..."""
    figures: NotRequired[MemberFigures]
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
    where: Name
    what: Text
    """The last event, as a sentence."""
    about: Text
    """The subject of the events: "the breaker". The whole sentence if they have none."""
    counts: Annotated[dict[Word, int], bounds.MOST_VERBS]
    """How often the subject did what: {"opened": 7, "closed": 6}. {"": 3} if it has no states."""
    trace: NotRequired[Word]
    """The id of the last trace in which it happened, if the process is traced."""


class View(TypedDict):
    """One process at one moment."""

    format: int
    pod: Pod
    at: float
    """Unix seconds."""
    every: Amount
    """Seconds between two samples."""
    load: Amount
    """Utilization: 1.0 is full."""
    operable: bool
    """Whether an operator can act on this pod from where it is shown."""
    troubles: Annotated[list[PodTrouble], bounds.MOST_TROUBLES]
    guards: Annotated[list[GuardView], bounds.MOST_GUARDS]
    all_guards: NotRequired[int]
    """The number of all guards, if that is more than are shown."""
    sections: Annotated[
        dict[Word, Annotated[list[RowView], bounds.MOST_ROWS]], bounds.MOST_SECTIONS
    ]
    """Rows by title, in order of display: "Limits", "Queues", "Outbox and jobs"..."""
    happenings: Annotated[list[PodEvent], bounds.MOST_HAPPENINGS]
    """The latest last."""
    age: NotRequired[Amount]
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

    succeeded: Annotated[list[Amount], bounds.MOST_POINTS]
    degraded: Annotated[list[Amount], bounds.MOST_POINTS]
    failed: Annotated[list[Amount], bounds.MOST_POINTS]
    rejected: Annotated[list[Amount], bounds.MOST_POINTS]
    p50: Annotated[list[Amount | None], bounds.MOST_POINTS]
    p99: Annotated[list[Amount | None], bounds.MOST_POINTS]
    breaker: Annotated[list[Word | None], bounds.MOST_POINTS]


class History(TypedDict):
    """The history of a pod, one point for each sample."""

    at: Annotated[list[float], bounds.MOST_POINTS]
    guards: Annotated[dict[Name, GuardTrack], bounds.MOST_GUARDS]
    rows: Annotated[dict[RowName, Track], bounds.MOST_TRACKS]
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
