"""The events of pipelines: failures and recoveries, dead letters, and the end of a run.

They are published and subscribed to like all others, see `seawall.runtime.events`.
"""

from __future__ import annotations

from seawall.runtime.events import Event


class ItemDied(Event):
    """An item was set aside as a dead letter; `guard` is the pipeline's name."""

    __slots__ = ("attempts", "cause", "item", "stage")
    name = "item_died"
    is_change = True

    def __init__(self, guard: str, *, item: str, stage: str, attempts: int, cause: str) -> None:
        """Hold its id, the stage where it failed, its attempts there, and why it failed."""
        super().__init__(guard)
        self.item = item
        self.stage = stage
        self.attempts = attempts
        self.cause = cause


class SourceChanged(Event):
    """A source failed, or is back; `guard` is the name of its pipeline, or of its `Collect`.

    The states are ok and failing; for a source of a `Collect`, ok and missing.
    """

    __slots__ = ("after", "before", "cause", "duration", "source")
    name = "source_changed"
    is_change = True

    def __init__(
        self, guard: str, *, source: str, before: str, after: str, cause: str, duration: float
    ) -> None:
        """Describe the change; `duration` is how many seconds the trouble has lasted."""
        super().__init__(guard)
        self.source = source
        self.before = before
        self.after = after
        self.cause = cause
        self.duration = duration


class StageChanged(Event):
    """A stage is blocked, or flows again; `guard` is the pipeline's name.

    It is blocked while an item that failed cannot be stored as a dead letter.
    """

    __slots__ = ("after", "before", "cause", "duration", "item", "stage")
    name = "stage_changed"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        stage: str,
        before: str,
        after: str,
        item: str,
        cause: str,
        duration: float,
    ) -> None:
        """Describe the change; `duration` is how many seconds it was blocked."""
        super().__init__(guard)
        self.stage = stage
        self.before = before
        self.after = after
        self.item = item
        self.cause = cause
        self.duration = duration


class CollectionChanged(Event):
    """A `Collect` has too few values, or enough again; `guard` is its name."""

    __slots__ = ("after", "before", "minimum", "missing", "values")
    name = "collection_changed"
    is_change = True

    def __init__(
        self, guard: str, *, before: str, after: str, values: int, minimum: int, missing: str
    ) -> None:
        """Hold the states (enough, too_few), the numbers, and the names of missing sources."""
        super().__init__(guard)
        self.before = before
        self.after = after
        self.values = values
        self.minimum = minimum
        self.missing = missing


class PipelineEnded(Event):
    """A run of a pipeline ended; `guard` is its name.

    The result is over (its sources were), stopped or failed.
    """

    __slots__ = ("cause", "dead_letters", "dropped", "read", "result", "returned", "stored")
    name = "pipeline_ended"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        result: str,
        read: int,
        stored: int,
        dead_letters: int,
        dropped: int,
        returned: int,
        cause: str,
    ) -> None:
        """Hold the result, the counts of all items, and why it failed, if it did."""
        super().__init__(guard)
        self.result = result
        self.read = read
        self.stored = stored
        self.dead_letters = dead_letters
        self.dropped = dropped
        self.returned = returned
        self.cause = cause
