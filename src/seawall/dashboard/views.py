"""What is shown of a process: one plain document, the same for the page, the terminal and the pods.

Everything in it is JSON. Names, keys and texts come from users and from other pods: whoever shows
them escapes them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

FORMAT: Final = 1
"""Told in each view; a reader leaves out the views of another format."""

Tone = Literal["ok", "warn", "bad", "off"]
"""How something is: as it should be, worth a look, broken, or switched off."""


class Pod(TypedDict):
    """Which process it is."""

    name: str
    host: str
    pid: int
    version: str
    up_seconds: float


class Trouble(TypedDict):
    """Something that is wrong now. `id` is the same for as long as it lasts."""

    id: str
    tone: Tone
    where: str
    what: str
    """One plain sentence."""
    advice: str
    """What to look at or do; may be empty."""
    since: float
    """Unix seconds."""
    cause: NotRequired[str]
    """The id of the trouble that this one follows from, if it follows from another."""
    degrades: NotRequired[bool]
    """Whether callers get lesser answers because of it."""
    trace: NotRequired[str]
    """The id of the trace in which it began, if the process is traced."""


class Change(TypedDict):
    """A setting that an operator may change: one of `policy.update`'s."""

    name: str
    value: Any
    kind: Literal["number", "text"]


class Layer(TypedDict):
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
    """What else there is to tell, label and value, ready to be shown."""
    sharing: str
    """"" if it is this pod's own; else "shared", or how it goes without its store: "local"..."""
    acts: list[str]
    """What an operator may do: "isolate", "close"."""
    changes: list[Change]


class Rates(TypedDict):
    """How many a second, since the last sample."""

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
    """The worst of its stack in a word or two: "open", "shedding"; "well" if nothing is wrong."""
    edge: bool
    """Whether it is the edge of a service, not the way to a dependency."""
    breaker: str | None
    """The state of its breaker, the worst if there are several."""
    rates: Rates
    error_ratio: float
    last_error: NotRequired[str]
    """What the latest failed attempt failed with, how often in a row, and how long ago."""
    p50: float | None
    p95: float | None
    p99: float | None
    """Seconds."""
    stack: list[Layer]


class Reading(TypedDict):
    """One of the many that a source of a pipeline collects."""

    name: str
    state: str
    """"ok", "stale" or "unavailable"."""
    seconds: float
    """For how long it has not answered."""
    cause: str


class PipeWork(TypedDict):
    """What one worker of a stage does now."""

    item: str
    items: int
    """How many there are, in a batch."""
    since: float
    """For how many seconds."""
    waits_for: str


class PipeNode(TypedDict):
    """A source, a stage, a branch or a sink of a pipeline."""

    name: str
    kind: Literal["source", "stage", "branch", "sink"]
    tone: Tone
    state: str
    """In a few words."""
    to: list[int]
    """The places of the nodes to which its items go."""
    rate: float
    """Items a second."""
    waiting: float
    capacity: float
    """How many may wait; 0 if it has no queue."""
    busy: float
    workers: float
    oldest: float
    """For how many seconds the first in its queue has waited."""
    p50: float | None
    p99: float | None
    counts: dict[str, float]
    """Since the start, what is not 0: done, retries, failed, degraded, dropped, dead_letters..."""
    waits_for: str
    """Why it does not go on, if it does not; the next stage alone is no reason."""
    failures: list[tuple[str, int]]
    """Causes, the most frequent first."""
    at_work: list[PipeWork]
    readings: list[Reading]
    facts: list[tuple[str, str]]


class OldestItem(TypedDict):
    """The item that has been in a pipeline for longest."""

    item: str
    age: float
    stage: str


class Pipes(TypedDict):
    """What a pipeline is drawn from."""

    oldest: OldestItem | None
    nodes: list[PipeNode]
    """The sources first."""
    slow: int | None
    """The place of the stage for which the others wait, if there is one."""
    more: int
    """How many nodes are left out."""


class Row(TypedDict):
    """Anything else that is shown: a limit, a queue, an outbox, a pool, a store..."""

    kind: str
    name: str
    tone: Tone
    state: str
    facts: list[tuple[str, str]]
    gauge: float | None
    """From 0 to 1: how full or used up it is; None if that means nothing."""
    track: float | None
    """The number whose past is drawn: what waits, what is refused a second..."""
    figures: NotRequired[dict[str, float]]
    """Facts of a member as numbers for programs: seconds, level, threshold, round_trip."""
    pipes: NotRequired[Pipes]
    """Of a pipeline: what it is drawn from."""


class Happening(TypedDict):
    """Something that happened: a breaker opened, a store was lost.

    Events of the same subject that follow each other closely are one happening.
    """

    at: float
    """When the last event happened."""
    began: float
    """When the first event happened."""
    tone: Tone
    """Of the last event."""
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
    """How full it is: 1.0 is full."""
    operable: bool
    """Whether an operator can act on this pod from where it is shown."""
    troubles: list[Trouble]
    guards: list[GuardView]
    all_guards: NotRequired[int]
    """How many guards there are, if that is more than are shown."""
    sections: dict[str, list[Row]]
    """By title, in the order in which they are shown: "Limits", "Queues", "Outbox and jobs"..."""
    happenings: list[Happening]
    """The latest last."""
    age: NotRequired[float]
    """Of another pod's view: how many seconds ago it was told, by the store's clock."""
    gone: NotRequired[float]
    """Of a pod that is not heard of any more: since when, in Unix seconds."""


class Problem(Trouble):
    """A trouble of all pods that have it, with the troubles that follow from it."""

    pods: list[str]
    runbook: NotRequired[str]
    """The address of its runbook."""
    trace_link: NotRequired[str]
    """The address of the trace in which it began."""
    consequences: list[Problem]
    """The worst first. These have no consequences of their own."""


class Verdict(TypedDict):
    """How all pods are, in a few words."""

    tone: Tone
    words: str


class Occurrence(TypedDict):
    """What happened to one subject on all pods, in one sentence."""

    at: float
    """When it happened last."""
    began: float
    tone: Tone
    where: str
    what: str
    pods: list[str]
    trace_link: NotRequired[str]
    """The address of the last trace in which it happened."""


class GuardTrack(TypedDict):
    """The past of a guard: lists of the same length, the oldest first, the newest at the end."""

    succeeded: list[float]
    degraded: list[float]
    failed: list[float]
    rejected: list[float]
    p50: list[float | None]
    p99: list[float | None]
    breaker: list[str | None]


class History(TypedDict):
    """The past of a pod, one point for each sample."""

    at: list[float]
    guards: dict[str, GuardTrack]
    rows: dict[str, list[float | None]]
    """By "kind/name"; the rates of a pipeline's nodes by "pipe/pipeline/node"."""


class Message(TypedDict):
    """What the page and the terminal are sent, each `every` seconds; `history` the first time."""

    title: str
    at: float
    operator: str | None
    """Who may act here; None: nobody, it is read only."""
    verdict: Verdict
    troubles: list[Problem]
    """What is wrong on all pods, by cause: the worst first, then the oldest."""
    happened: list[Occurrence]
    """What happened on all pods, the latest first."""
    views: list[View]
    history: dict[str, History] | None
    """By pod."""
    extra: dict[str, Any] | None
    """What a page of another kind shows beside, such as the demo."""
