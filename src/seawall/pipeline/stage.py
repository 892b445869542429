"""What a stage is made of: a function, what it needs, and what happens when it fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.pipeline.source import checked_name, name_for
from seawall.resources.executors.executors import CpuPool, IoPool
from seawall.runtime.functions import kind_of

MOST_WORKERS: Final = 10_000
LEAST_CAPACITY: Final = 64
"""How many items wait in front of a stage, unless its workers or its batches need more."""

OnFailure = Literal["dead_letter", "drop", "stop"]
WhenBlocked = Literal["block", "set_aside"]


class NotBefore(Exception):
    """Raised by a stage or a sink that wants no items for a while: they wait."""

    def __init__(self, seconds: float, why: str = "") -> None:
        """Take items again after this many seconds."""
        self.seconds = check.seconds("seconds", seconds, zero=True)
        self.why = why
        super().__init__(f"not before {self.seconds:g} s from now{why and f': {why}'}")

    def __reduce__(self) -> tuple[type[NotBefore], tuple[float, str]]:
        return NotBefore, (self.seconds, self.why)  # it may come from a worker process


class BatchFailed(Exception):
    """Raised by a stage with `batch=`: only some members failed, the others are done."""

    def __init__(
        self, failures: dict[int, Exception], results: Sequence[Any] | None = None
    ) -> None:
        """Give the error of each failed member, by its place in the batch.

        A stage that is no sink also gives its `results`: one for each member, whatever it is for
        those that failed.
        """
        if not failures or not all(
            type(place) is int and isinstance(error, Exception) for place, error in failures.items()
        ):
            raise TypeError(f"BatchFailed({failures!r}): write {{place: error}} of each member")
        if results is not None and not hasattr(results, "__len__"):
            raise TypeError(f"BatchFailed(failures, {results!r:.80}): write a list of results")
        super().__init__(f"{len(failures)} of the batch failed")
        self.failures = failures
        self.results = results

    def __reduce__(self) -> tuple[type[BatchFailed], tuple[Any, ...]]:
        return BatchFailed, (self.failures, self.results)  # it may come from a worker process


class Degrade(NamedTuple):
    """See `degrade`."""

    function: Callable[[Any, Exception], Any]


def degrade(function: Callable[[Any, Exception], Any], /) -> Degrade:
    """Go on with a degraded item: `function(value, error)` makes it, plain or async.

    Of a sink, the function is the fallback: it stores the value elsewhere. If it fails too, the
    item is a dead letter.
    """
    return Degrade(check.function("degrade", function))


class BatchSize(NamedTuple):
    """How many items make a batch, and how long its first one waits for the others."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stage:
    """The settings of one stage."""

    name: str
    function: Callable[..., Any]
    is_sink: bool
    guard: Callable[[Any], Any] | None
    workers: int
    """Maximum number of items at work; 0 where an item is done on its way."""
    pool: CpuPool | IoPool | None
    """Where a plain function runs; None for an async one, or on the way."""
    owns_pool: bool
    timeout: float | None
    batch: BatchSize | None
    ordered_by: Callable[[Any], Hashable] | None
    when_failed: WhenBlocked
    on_failure: OnFailure | Degrade
    most_deaths: int
    capacity: int
    """Maximum number of items that wait here."""

    @property
    def is_inline(self) -> bool:
        """Whether the caller that brings an item runs the function, without a worker."""
        return self.workers == 0


def make_stage(
    function: Any,
    *,
    name: str | None,
    is_sink: bool,
    guard: Any,
    workers: int | CpuPool | IoPool | None,
    timeout: float | None,
    batch: tuple[int, float] | None,
    ordered_by: Callable[[Any], Hashable] | None,
    when_failed: WhenBlocked,
    on_failure: OnFailure | Degrade,
    most_deaths: int = 3,
    capacity: int | None,
) -> Stage:
    """Return the stage, or raise an error that says what to write instead."""
    name = checked_name(name_for(function, name), example="enrich")
    function, kind = _checked_function(name, function)
    if guard is not None and not callable(guard):
        raise TypeError(f"stage {name!r}: guard={guard!r}: pass a Guard, or family(by=...)")
    pool, count, owns = _workers(name, kind, workers)
    if isinstance(pool, CpuPool) and pool.kind == "process":
        _check_sendable(name, function)
    size = None if batch is None else _batch(name, batch)
    if ordered_by is not None:
        check.plain_function("ordered_by", ordered_by)
    if count == 0 and (guard, timeout, size, ordered_by) != (None, None, None, None):
        count = 1
    _check_failure_settings(name, when_failed, on_failure, ordered_by)
    if timeout is not None and kind == "sync" and pool is None:
        raise ValueError(
            f"stage {name!r}: timeout= cannot stop a plain function in the event loop; write"
            " workers=4 for threads, or a CpuPool for processes"
        )
    room = max(2 * count, 2 * (size.size if size else 1), LEAST_CAPACITY)
    return Stage(
        name=name,
        function=function,
        is_sink=is_sink,
        guard=guard,
        workers=count,
        pool=pool,
        owns_pool=owns,
        timeout=None if timeout is None else check.seconds("timeout", timeout),
        batch=size,
        ordered_by=ordered_by,
        when_failed=when_failed,
        on_failure=on_failure,
        most_deaths=check.count("most_deaths", most_deaths),
        capacity=room if capacity is None else check.count("capacity", capacity),
    )


def _check_failure_settings(
    name: str,
    when_failed: WhenBlocked,
    on_failure: OnFailure | Degrade,
    ordered_by: Callable[[Any], Hashable] | None,
) -> None:
    if when_failed not in ("block", "set_aside"):
        raise ValueError(f"when_failed={when_failed!r}: write 'block' or 'set_aside'")
    if when_failed == "block" and ordered_by is None:
        raise ValueError(
            f"stage {name!r}: when_failed='block' needs ordered_by=, whose key it blocks"
        )
    if not isinstance(on_failure, Degrade) and on_failure not in ("dead_letter", "drop", "stop"):
        raise ValueError(
            f"stage {name!r}: on_failure={on_failure!r}: write 'dead_letter', 'drop', 'stop' or"
            " degrade(function); retrying is a Retry in guard="
        )


def _checked_function(name: str, function: Any) -> tuple[Callable[..., Any], str]:
    """Return the function of a stage, and how it runs."""
    if isinstance(function, type):
        function = partial(function)  # int, str and the like: called as a function
    check.function("function", function)
    kind = kind_of(function)
    if kind not in ("sync", "async"):
        raise TypeError(
            f"stage {name!r}: {function!r} is a {kind}; write a function that returns one value for"
            " each item"
        )
    return function, kind


def _check_sendable(name: str, function: Any) -> None:
    """Raise if the function cannot be sent to a worker process."""
    from multiprocessing.reduction import ForkingPickler  # that of the pool

    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        raise TypeError(
            f"stage {name!r}: {function!r} cannot be sent to a worker process ({error}): pass a"
            " function from the top level of a module"
        ) from error


def _workers(
    name: str, kind: str, workers: int | CpuPool | IoPool | None
) -> tuple[CpuPool | IoPool | None, int, bool]:
    """Return where the function runs, how many at once, and whether the pool is the pipeline's."""
    if isinstance(workers, CpuPool | IoPool):
        if kind == "async":
            raise TypeError(
                f"stage {name!r}: workers={workers!r} runs plain functions, and this one is async;"
                " write workers=20, a number of tasks"
            )
        return workers, workers.workers, False
    if workers is None:
        return None, 1 if kind == "async" else 0, False
    count = check.count("workers", workers, maximum=MOST_WORKERS)
    if kind == "async":
        return None, count, False
    return IoPool(f"{name} threads", workers=count), count, True


def closed_stage(stage: Stage) -> Stage:
    """Close the threads of a stage that are its own; return it with others, for another run."""
    if not stage.owns_pool or stage.pool is None:
        return stage
    stage.pool.close(0.0)
    return replace(stage, pool=IoPool(f"{stage.name} threads", workers=stage.workers))


def _batch(name: str, batch: Any) -> BatchSize:
    try:
        size, seconds = batch
    except (TypeError, ValueError):
        raise TypeError(f"stage {name!r}: batch={batch!r}: write (size, seconds)") from None
    return BatchSize(check.count("batch", size), check.seconds("batch", seconds, zero=True))
