"""How a stage calls its function: behind its timeout and guard, with one value or with a batch.

Promises: every attempt at an item is counted, whoever makes it; of a batch only those members are
tried again that have failed, and none that its source has lost to another process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from seawall.pipeline.counts import Counts
from seawall.pipeline.item import CURRENT, Item
from seawall.pipeline.stage import BatchFailed, Stage
from seawall.policies.breaker import Breaker
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.rate_limit import RateLimit
from seawall.policies.timeout import Timeout
from seawall.runtime.functions import kind_of

LOST: Final = LookupError("the source has lost the item to another process")
"""Why an item ends that its source does not hold any more: it is given back."""
CALLING_ONCE: Final = (Breaker, Bulkhead, RateLimit, Timeout)
"""Policies of a guard that call the function at most once."""


class Members:
    """The members of a batch that are not done yet."""

    def __init__(self, items: list[Item], counts: Counts, *, is_sink: bool, may_lose: bool) -> None:
        """Begin with all of them."""
        self._counts = counts
        self.left = items
        self.lost: list[tuple[Item, Exception]] = []
        """Those that their sources have lost to another process."""
        self._may_lose = may_lose
        self.done: list[Item] = []
        self._errors: dict[Item, Exception] = {}
        """Why a member failed last, if the function has said so."""
        self._is_sink = is_sink

    def failures(self, failure: Exception) -> Iterator[tuple[Item, Exception]]:
        """Return those that are left, each with its error: its own, or that of the batch."""
        for item in self.left:
            yield item, self._errors.get(item, failure)

    def _leave_lost(self) -> None:
        """Remove those that their sources have lost."""
        held = []
        for item in self.left:
            if is_lost(item):
                self.lost.append((item, LOST))
            else:
                held.append(item)
        self.left = held

    async def attempt(self, function: Callable[[list[Any]], Any], *, awaits: bool) -> None:
        """Call `function` with those that are left, and keep what it has done."""
        self._errors.clear()
        if self._may_lose:
            self._leave_lost()
            if not self.left:
                return
        if self.left[0].attempts:
            self._counts.retries += len(self.left)
        values = [item.value for item in self.left]
        for item in self.left:
            item.attempts += 1
        try:
            results = function(values)
            if awaits:
                results = await results
        except BatchFailed as partial:
            unknown = [place for place in partial.failures if not 0 <= place < len(values)]
            if unknown:
                raise ValueError(
                    f"BatchFailed names the places {unknown!r:.80} of a batch of {len(values)}:"
                    " they count from 0"
                ) from partial
            self._keep(partial.results, partial.failures)
            if not self.left:
                return
            # A guard judges the batch by the first of its errors.
            raise self._errors[self.left[0]] from partial
        self._keep(results, {})

    def _keep(self, results: Any, failures: dict[int, Exception]) -> None:
        """Separate those that are done from those that failed."""
        items = self.left
        if not self._is_sink:
            if not hasattr(results, "__len__") or len(results) != len(items):
                raise TypeError(
                    f"a stage with batch= got {len(items)} items, and its results are"
                    f" {results!r:.80}: return a list with one result for each, or raise"
                    " BatchFailed(failures, results)"
                )
            for place, (item, result) in enumerate(zip(items, results, strict=True)):
                if place not in failures:
                    item.value = result
        if not failures:
            self.done += items
            self.left = []
            return
        self.left = []
        for place, item in enumerate(items):
            if place in failures:
                self._errors[item] = failures[place]
                self.left.append(item)
            else:
                self.done.append(item)


def bound_call(
    stage: Stage, counts: Counts, *, in_memory: bool
) -> tuple[Callable[[Any], Awaitable[Any]], bool]:
    """Return the function of `stage` with its timeout and its guard around it.

    Also return whether it counts the attempts at an item itself, as a guard may try several times;
    else each call is one attempt, and its caller counts it.

    For a stage with `batch=` its argument is `Members`, so that a retry of the guard calls the
    function only with those that are left.
    """
    function, pool = stage.function, None if in_memory else stage.pool
    run: Callable[[Any], Any] = function
    if pool is not None:
        run = lambda value: pool.arun(function, value)  # noqa: E731 - as short as it gets
    awaits = pool is not None or kind_of(function) == "async"
    current = CURRENT.get
    policies = getattr(stage.guard, "policies", () if stage.guard is None else None)
    counts_attempts = policies is None or not all(isinstance(one, CALLING_ONCE) for one in policies)
    call: Any
    if stage.batch is not None:

        async def call(members: Members) -> None:
            await members.attempt(run, awaits=awaits)

    elif counts_attempts or not awaits or pool is not None:

        async def call(value: Any) -> Any:
            if counts_attempts and not _is_counted(current(), counts):
                return LOST
            return await run(value) if awaits else run(value)

    else:
        call = function
    if call is not function:
        call.__name__ = call.__qualname__ = stage.name
    if stage.timeout is not None:
        call = Timeout(stage.timeout)(call)
    return call if stage.guard is None else stage.guard(call), counts_attempts


def _is_counted(item: Item, counts: Counts) -> bool:
    """Count an attempt at an item, unless it is a further one and its source has lost the item."""
    if item.attempts:
        if is_lost(item):
            return False
        counts.retries += 1
    item.attempts += 1
    return True


def is_lost(item: Item) -> bool:
    """Tell whether the source of an item has lost it to another process."""
    holds = getattr(item.source, "holds", None)
    return holds is not None and not holds(item.handle)
