"""A pipeline: a source, stages and sinks, in a few lines.

    pipeline = Pipeline("orders")
    (
        pipeline.read(orders)
        .stage(parse, on_failure="drop")
        .stage(enrich, guard=vendor, workers=20, on_failure=degrade(without_profile))
        .sink(store, batch=(100, 1.0))
    )
    await pipeline.run()

What it promises is in `seawall.pipeline.run`, `reader`, `worker`, `batch_worker` and `stage_queue`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.clock import new_random
from seawall.pipeline.counts import StageCounts, idle_snapshot
from seawall.pipeline.dead_letters import DeadLetters, MemoryDeadLetters
from seawall.pipeline.dead_letters.replay import LetterSource, ReplayReader, letter_ids
from seawall.pipeline.item import DeadLetter, Ending, Item, ItemResult
from seawall.pipeline.nodes import Branch, Exit, InlineStage, Node, WorkerStage
from seawall.pipeline.reader import SourceReader, source_snapshot
from seawall.pipeline.run import PipelineRun
from seawall.pipeline.source import IterableSource, Source, as_source, checked_name
from seawall.pipeline.stage import Degrade, OnFailure, Stage, WhenBlocked, closed_stage, make_stage
from seawall.resources.executors.executors import CpuPool, IoPool
from seawall.runtime.functions import kind_of
from seawall.runtime.stop_signals import run_until_signal
from seawall.runtime.virtual import run as run_virtual

T = TypeVar("T")
U = TypeVar("U")


@dataclass(eq=False, slots=True)
class _GraphPart:
    """A source, a stage, a sink or a branch, and where its items go."""

    name: str
    what: Any
    """The `Source`, the `Stage`, or the predicate of a branch."""
    ways: dict[str, _GraphPart | None]
    """The part behind each way: "following", or "yes" and "no" of a branch; none of a sink."""


class SinkSettings(TypedDict, Generic[T], total=False):
    """The settings of `ItemFlow.sink`, for type checkers; see there."""

    name: str | None
    guard: Callable[[Any], Any] | None
    workers: int | CpuPool | IoPool | None
    timeout: float | None
    ordered_by: Callable[[T], Hashable] | None
    when_failed: WhenBlocked
    on_failure: OnFailure | Degrade
    capacity: int | None


class StageSettings(SinkSettings[T], Generic[T], total=False):
    """The settings of `ItemFlow.stage`."""

    most_deaths: int


_End = tuple[_GraphPart, str]
"""A way on which items leave a part."""


class ItemFlow(Generic[T]):
    """Items of one type on their way, to be sent through stages and into a sink."""

    def __init__(self, pipeline: Pipeline, ends: list[_End]) -> None:
        self._pipeline = pipeline
        self._ends = ends

    def __repr__(self) -> str:
        return f"<ItemFlow of pipeline {self._pipeline.name!r}>"

    @overload
    def stage(
        self,
        function: Callable[[list[T]], Awaitable[Sequence[U]]],
        /,
        *,
        batch: tuple[int, float],
        **settings: Unpack[StageSettings[T]],
    ) -> ItemFlow[U]: ...
    @overload
    def stage(
        self,
        function: Callable[[list[T]], Sequence[U]],
        /,
        *,
        batch: tuple[int, float],
        **settings: Unpack[StageSettings[T]],
    ) -> ItemFlow[U]: ...
    @overload
    def stage(
        self, function: Callable[[T], Awaitable[U]], /, **settings: Unpack[StageSettings[T]]
    ) -> ItemFlow[U]: ...
    @overload
    def stage(
        self, function: Callable[[T], U], /, **settings: Unpack[StageSettings[T]]
    ) -> ItemFlow[U]: ...
    def stage(
        self,
        function: Any,
        /,
        *,
        batch: tuple[int, float] | None = None,
        name: str | None = None,
        guard: Callable[[Any], Any] | None = None,
        workers: int | CpuPool | IoPool | None = None,
        timeout: float | None = None,
        ordered_by: Callable[[Any], Hashable] | None = None,
        when_failed: WhenBlocked = "set_aside",
        on_failure: OnFailure | Degrade = "dead_letter",
        most_deaths: int = 3,
        capacity: int | None = None,
    ) -> ItemFlow[Any]:
        """Send each item through `function(value)`, whose result takes its place.

        An async function runs in `workers` tasks. A plain one runs on the way, in the event loop;
        with `workers=8` in threads, with a `CpuPool` in processes. `guard` is a `Guard`, or
        `family(by=...)`. While it refuses calls, items wait. With `batch=(size, seconds)` the
        function takes a list, and returns one with a result for each; if some have failed, it
        raises `BatchFailed(failures, results)`.

        `ordered_by(value)` is a key: items with the same key are done one after the other, in the
        order in which they come. When one has failed, `when_failed="block"` tries it again, with
        pauses, for as long as it takes, and its key waits; "set_aside" goes on with the next.

        `on_failure` is what becomes of an item that has failed for good: "dead_letter", "drop",
        "stop", or `degrade(function)`. An item of which `most_deaths` worker processes have died
        has failed. At most `capacity` items wait here.
        """
        return self._add(
            make_stage(
                function,
                name=name,
                is_sink=False,
                guard=guard,
                workers=workers,
                timeout=timeout,
                batch=batch,
                ordered_by=ordered_by,
                when_failed=when_failed,
                on_failure=on_failure,
                most_deaths=most_deaths,
                capacity=capacity,
            )
        )

    @overload
    def sink(
        self,
        function: Callable[[list[T]], Any],
        /,
        *,
        batch: tuple[int, float],
        **settings: Unpack[SinkSettings[T]],
    ) -> Pipeline: ...
    @overload
    def sink(
        self, function: Callable[[T], Any], /, **settings: Unpack[SinkSettings[T]]
    ) -> Pipeline: ...
    def sink(
        self,
        function: Any,
        /,
        *,
        batch: tuple[int, float] | None = None,
        name: str | None = None,
        guard: Callable[[Any], Any] | None = None,
        workers: int | CpuPool | IoPool | None = None,
        timeout: float | None = None,
        ordered_by: Callable[[Any], Hashable] | None = None,
        when_failed: WhenBlocked = "set_aside",
        on_failure: OnFailure | Degrade = "dead_letter",
        capacity: int | None = None,
    ) -> Pipeline:
        """Store each item by `function(value)`; then it has ended, and its source is informed.

        The settings are those of `stage`. The function of `degrade` is a fallback sink here. A sink
        that wants nothing for a while raises `NotBefore(seconds)`.
        """
        self._add(
            make_stage(
                function,
                name=name,
                is_sink=True,
                guard=guard,
                workers=workers,
                timeout=timeout,
                batch=batch,
                ordered_by=ordered_by,
                when_failed=when_failed,
                on_failure=on_failure,
                capacity=capacity,
            )
        )
        return self._pipeline

    def branch(
        self, predicate: Callable[[T], bool], /, *, name: str | None = None
    ) -> tuple[ItemFlow[T], ItemFlow[T]]:
        """Return two flows: the items for which `predicate(value)` is true, and the others."""
        check.plain_function("predicate", predicate)
        name = str(getattr(predicate, "__name__", "branch")) if name is None else name
        checked_name(name, example="is_large")
        fork = _GraphPart(name, predicate, {"yes": None, "no": None})
        self._connect(fork)
        return ItemFlow(self._pipeline, [(fork, "yes")]), ItemFlow(self._pipeline, [(fork, "no")])

    def merge(self, *others: ItemFlow[T]) -> ItemFlow[T]:
        """Return one flow of the items of this one and of `others`."""
        for other in others:
            if not isinstance(other, ItemFlow) or other._pipeline is not self._pipeline:  # noqa: SLF001 - of this class
                raise TypeError(f"merge({other!r}): pass flows of the same pipeline")
        ends = [end for flow in (self, *others) for end in flow._ends]  # noqa: SLF001 - of this class
        return ItemFlow(self._pipeline, ends)

    def _add(self, stage: Stage) -> ItemFlow[Any]:
        part = _GraphPart(stage.name, stage, {} if stage.is_sink else {"following": None})
        self._connect(part)
        return ItemFlow(self._pipeline, [(part, "following")])

    def _connect(self, part: _GraphPart) -> None:
        if any(origin.ways[way] is not None for origin, way in self._ends):
            raise ValueError(
                "this flow leads somewhere already: items go one way; write branch(predicate) for"
                " two"
            )
        self._pipeline._add_step(part)  # noqa: SLF001 - its builder
        for origin, way in self._ends:
            origin.ways[way] = part


class Pipeline:
    """Items that are read, sent through stages and stored; see the module's docstring."""

    def __init__(
        self,
        name: str,
        *,
        dead_letters: DeadLetters | Callable[[DeadLetter], Awaitable[None]] | None = None,
        rng: Random | None = None,
    ) -> None:
        """Begin without a source; `read` adds one.

        `dead_letters` stores items that were set aside: a `DatabaseDeadLetters` of this name, or an
        async function of one letter; `MemoryDeadLetters` by default.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Pipeline({name!r}): write a name, such as 'orders'")
        letters: Any = MemoryDeadLetters(name) if dead_letters is None else dead_letters
        if not isinstance(letters, DeadLetters) and kind_of(letters) != "async":
            raise TypeError(
                f"dead_letters={letters!r}: pass DatabaseDeadLetters(database, {name!r}), or an"
                " async function of one letter"
            )
        if isinstance(letters, DeadLetters) and letters.name != name:
            raise ValueError(
                f"Pipeline({name!r}): dead_letters= are those of pipeline {letters.name!r}: make"
                " them with the same name"
            )
        self.name = name
        self.dead_letters: Any = letters
        """What was passed, or the `MemoryDeadLetters` of this pipeline."""
        self._rng = new_random(name) if rng is None else check.chance("rng", rng)
        self._reads: list[_GraphPart] = []
        self._steps: list[_GraphPart] = []
        self._run: PipelineRun | None = None
        self._last: PipelineRun | None = None
        """The run that has ended last."""
        self._stop_grace: float | None = None
        registry.enter(self, "pipeline", name)

    def __repr__(self) -> str:
        state = "running" if self._run is not None else "not running"
        return f"<Pipeline {self.name!r}, {state}>"

    # Building

    def read(
        self, source: Source[T] | Iterable[T] | AsyncIterable[T], /, *, name: str | None = None
    ) -> ItemFlow[T]:
        """Return the flow of the items of `source`."""
        number = len(self._reads)
        usual = "items" if not number else f"items-{number + 1}"
        made = as_source(source, name, usual)
        if name is not None and made.name != name:
            raise ValueError(f"name={name!r}: this source is named {made.name!r} already")
        self._check_name(made.name)
        read = _GraphPart(made.name, made, {"following": None})
        self._reads.append(read)
        return ItemFlow(self, [(read, "following")])

    def _add_step(self, step: _GraphPart) -> None:
        self._check_name(step.name)
        self._steps.append(step)

    def _check_name(self, name: str) -> None:
        if any(part.name == name for part in (*self._reads, *self._steps)):
            raise ValueError(
                f"pipeline {self.name!r} has two parts named {name!r}: write name= for one of them"
            )

    def _check_complete(self) -> None:
        if not self._reads:
            raise ValueError(f"pipeline {self.name!r} has no source: write pipeline.read(...)")
        for part in (*self._reads, *self._steps):
            if None in part.ways.values():
                raise ValueError(
                    f"pipeline {self.name!r}: {part.name!r} leads nowhere: end it with .sink(...)"
                )

    def explain(self) -> str:
        """Return a drawing of it, and what is dangerous in it."""
        self._check_complete()
        lines = [f"pipeline {self.name!r}"]
        shown: set[int] = set()
        for read in self._reads:
            lines.append(f"  read {read.name}")
            lines += _drawn(read.ways["following"], "  ", shown)
        lines += [f"danger: {danger}" for danger in self.dangers()]
        return "\n".join(lines)

    def dangers(self) -> list[str]:
        """Return what may surprise: order that is lost on the way."""
        found: dict[str, None] = {}
        ways = [(read.ways["following"], "") for read in reversed(self._reads)]
        visited: set[tuple[int, str]] = set()
        while ways:
            step, before = ways.pop()
            if step is None or (id(step), before) in visited:
                continue
            visited.add((id(step), before))
            stage = step.what
            if isinstance(stage, Stage):
                if stage.ordered_by is not None and before:
                    found[
                        f"stage {stage.name!r} keeps the order in which items come to it, but"
                        f" {before!r} before it works at several at once: write ordered_by= there"
                    ] = None
                if stage.workers > 1 and stage.ordered_by is None:
                    before = stage.name
            ways += [(following, before) for following in reversed(step.ways.values())]
        return list(found)

    # Running

    async def run(self) -> bool:
        """Run until all sources are over and every item has ended, or until `stop`.

        Return whether it came to the end of its sources. A stage with on_failure="stop" ends it
        with its error, and so does a source that fails. Run again, it goes on behind what has
        ended: at its place in a file or table, with what is left of a stream or queue. Only an
        iterator hands out nothing twice.
        """
        self._check_complete()
        if self._run is not None:
            raise RuntimeError(f"{self!r} runs already")
        store = self.dead_letters
        letters = LetterSource(store) if isinstance(store, DeadLetters) else None
        bury = store if letters is None else letters.add
        sources = [read.what for read in self._reads]
        run = PipelineRun(
            self.name,
            dead_letters=bury,
            rng=self._rng,
            may_lose_items=any(hasattr(source, "holds") for source in sources),
            letter_id=letter_ids(store),
        )
        self._build(run, sources, letters, in_memory=False)
        if self._stop_grace is not None:
            run.stop(run.now() + self._stop_grace)
        try:
            return await self._carry_out(run)
        finally:
            self._stop_grace = None
            for step in self._steps:
                if isinstance(step.what, Stage):
                    step.what = closed_stage(step.what)

    async def _carry_out(self, run: PipelineRun) -> bool:
        self._run = run
        try:
            is_over = await run.run()
        except asyncio.CancelledError:
            run.emit_end("stopped")
            raise
        except BaseException as error:
            run.emit_end("failed", described(error))
            raise
        else:
            run.emit_end("over" if is_over else "stopped")
            return is_over
        finally:
            self._last, self._run = run, None

    def run_sync(self, drain: float = 10.0) -> bool:
        """Run in this thread, for programs without an event loop; return what `run` does.

        In the main thread SIGTERM and Ctrl-C stop it: the first by `stop(drain)`, a second one by
        `stop(0)`.
        """
        _refuse_in_loop("run_sync()", "await pipeline.run()")
        ended: list[bool] = []

        async def main() -> None:
            ended.append(await self.run())

        run_until_signal(main, self.stop, drain)
        return ended == [True]

    def stop(self, grace: float = 10.0) -> None:
        """Read no more, and finish what was read within `grace` seconds; the rest is given back.

        It returns at once, and `run` when that is done. From any thread or signal handler. Stopped
        again, it takes the shorter grace.
        """
        seconds = check.seconds("grace", grace, zero=True)
        if self._stop_grace is None or seconds < self._stop_grace:
            self._stop_grace = seconds
        run = self._run
        if run is not None:
            try:
                run.loop.call_soon_threadsafe(lambda: run.stop(run.now() + seconds))
            except RuntimeError:
                pass  # the loop is closed: it has stopped

    def snapshot(self) -> dict[str, Any]:
        """Return the account of all items, and what each source and each stage is doing now.

        From any thread. Ages and times are in seconds.
        """
        running = self._run
        run = running or self._last
        seen = self._unread() if run is None else run.snapshot()
        return {
            "name": self.name,
            "running": running is not None,
            **seen,
            "links": [
                [origin.name, following.name]
                for origin in (*self._reads, *self._steps)
                for following in origin.ways.values()
                if following is not None
            ],
            "missing": [one for source in seen["sources"] for one in source.get("missing", ())],
        }

    def _unread(self) -> dict[str, Any]:
        """Return the snapshot of a pipeline that has never run."""
        return {
            **dict.fromkeys(("read", "in_flight", *map(str, Ending), "degraded", "replayed"), 0),
            "oldest": None,
            "sources": [source_snapshot(read.what) for read in self._reads],
            "stages": [
                idle_snapshot(
                    step.what if isinstance(step.what, Stage) else step.name, StageCounts()
                )
                for step in self._steps
            ],
        }

    def test(
        self, items: Iterable[Any], *, call_sinks: bool = False, seed: int = 0
    ) -> list[ItemResult]:
        """Run it in memory on virtual time, and return how each of `items` ended, in their order.

        `items` take the place of every source, and plain functions run without pools. Stages are
        called; sinks only with `call_sinks`, for tests whose sinks write to nothing that matters.
        """
        _refuse_in_loop("test()", "a plain test function, not an async one")
        self._check_complete()
        check.flag("call_sinks", call_sinks)
        ended: dict[int, ItemResult] = {}
        """By place among `items`."""

        async def keep(_letter: DeadLetter) -> None:
            """Do nothing: the end of the item says it all."""

        def on_end(item: Item, how: ItemResult) -> None:
            ended[item.handle] = how

        async def main() -> None:
            run = PipelineRun(self.name, dead_letters=keep, rng=Random(seed), on_end=on_end)  # noqa: S311 - a test
            source = IterableSource(items)
            sources: list[Source[Any]] = [source]
            sources += [IterableSource((), name=f"none-{n}") for n in range(1, len(self._reads))]
            self._build(run, sources, None, in_memory=True, call_sinks=call_sinks)
            await self._carry_out(run)

        run_virtual(main())
        return [ended[place] for place in sorted(ended)]

    def _build(
        self,
        run: PipelineRun,
        sources: list[Source[Any]],
        letters: LetterSource | None,
        *,
        in_memory: bool,
        call_sinks: bool = True,
    ) -> None:
        """Make the nodes of a run from the steps, the last one first."""
        exit_node = Exit(run)
        nodes: dict[int, Node] = {}
        for step in reversed(self._steps):  # a step is older than those that follow it
            made: InlineStage | WorkerStage | Branch
            ways = [nodes[id(following)] for following in step.ways.values()]
            stage = step.what
            if not isinstance(stage, Stage):
                made = Branch(run, step.name, stage, *ways)
            else:
                following = exit_node if stage.is_sink else ways[0]
                if stage.is_sink and not call_sinks:
                    without_effect = replace(stage, function=lambda _value: None, workers=0)
                    made = InlineStage(run, without_effect, following)
                elif stage.is_inline:
                    made = InlineStage(run, stage, following)
                else:
                    made = WorkerStage(run, stage, following, in_memory=in_memory)
            run.nodes.insert(0, made)
            nodes[id(step)] = made.queue if isinstance(made, WorkerStage) else made
        run.readers = [
            SourceReader(run, source, nodes[id(read.ways["following"])])
            for source, read in zip(sources, self._reads, strict=True)
        ]
        if letters is not None:
            by_name = {step.name: nodes[id(step)] for step in self._steps}
            run.replay = ReplayReader(run, letters, by_name)


def _refuse_in_loop(called: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"pipeline.{called} runs an event loop of its own, and one runs here: use {instead}"
    )


def _drawn(part: _GraphPart | None, indent: str, shown: set[int]) -> list[str]:
    lines: list[str] = []
    while part is not None:
        if id(part) in shown:
            return [*lines, f"{indent}-> {part.name}"]
        shown.add(id(part))
        if not isinstance(part.what, Stage):
            for way, following in part.ways.items():
                lines.append(f"{indent}? {part.name}: {way}")
                lines += _drawn(following, f"{indent}  ", shown)
            return lines
        lines.append(f"{indent}{_described(part.what)}")
        part = part.ways.get("following")
    return lines


def _described(stage: Stage) -> str:
    facts = ["on the way" if stage.is_inline else _workers_of(stage)]
    if stage.guard is not None:
        facts.append(f"guard {getattr(stage.guard, 'name', 'by key')!r}")
    if stage.timeout is not None:
        facts.append(f"timeout {stage.timeout:g} s")
    if stage.batch is not None:
        facts.append(f"batches of {stage.batch.size} within {stage.batch.seconds:g} s")
    if stage.ordered_by is not None:
        after = "tried until it is done" if stage.when_failed == "block" else "set aside"
        facts.append(f"in order by key, a failed item is {after}")
    action = stage.on_failure
    facts.append(f"on failure: {'degrade' if isinstance(action, Degrade) else action}")
    return f"{'sink' if stage.is_sink else 'stage'} {stage.name}: {', '.join(facts)}"


def _workers_of(stage: Stage) -> str:
    if stage.pool is None:
        kind, several = "task", "tasks"
    elif isinstance(stage.pool, CpuPool):
        kind, several = "process", "processes"
    else:
        kind, several = "thread", "threads"
    return f"{stage.workers} {kind if stage.workers == 1 else several}"
