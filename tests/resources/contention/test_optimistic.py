"""Optimistic updates and stripes: what they promise and what they refuse."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import DeadlineExceeded, deadline
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.errors import Contended
from seawall.models.contention import _encoded
from seawall.resources import Stripes, aupdate_optimistically, update_optimistically
from seawall.testing import run_virtual, virtual_time
from tests.support import SEEDS, falsified, let_pass


def _task(awaitable: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(awaitable)


class Changed(Exception):
    """Stands for a driver's own way to say that somebody else was faster."""


class Cell:
    """A value with a version; the first `disturbed` writes find that somebody was faster."""

    def __init__(self, value: int = 0, *, disturbed: int = 0, raising: bool = False) -> None:
        self.value = value
        self.version = 0
        self.disturbed = disturbed
        self.raising = raising
        self.reads = self.writes = 0

    def read(self) -> tuple[int, int]:
        self.reads += 1
        return self.value, self.version

    def write(self, new: int, version: int) -> bool:
        self.writes += 1
        if self.disturbed:
            self.disturbed -= 1
            self.value += 100
            self.version += 1
        if version != self.version:
            if self.raising:
                raise Changed
            return False
        self.value, self.version = new, version + 1
        return True

    async def aread(self) -> tuple[int, int]:
        await let_pass(0.25)
        return self.read()

    async def awrite(self, new: int, version: int) -> bool:
        await let_pass(0.25)
        return self.write(new, version)


def _plus_one(value: int) -> int:
    return value + 1


# Optimistic updates


def test_an_update_that_nobody_disturbs_reads_and_writes_once() -> None:
    """It returns what was written, and no time passes."""
    clock = VirtualClock()
    cell = Cell(41)
    assert update_optimistically(cell.read, _plus_one, cell.write, clock=clock) == 42
    assert (cell.value, cell.reads, cell.writes, clock.now()) == (42, 1, 1, 0.0)


@pytest.mark.parametrize("raising", [False, True])
def test_a_disturbed_update_begins_again_from_what_is_there(raising: bool) -> None:  # noqa: FBT001
    """The change is made to the new value, whichever way the conflict is told."""
    with virtual_time() as clock:
        cell = Cell(disturbed=3, raising=raising)
        new = update_optimistically(
            cell.read, _plus_one, cell.write, on=Changed, backoff=constant(0.5)
        )
        assert new == cell.value == 301
        assert (cell.reads, clock.now()) == (4, 1.5)


def test_an_async_update_follows_the_same_rules() -> None:
    """Reads and writes are awaited, and so are the pauses."""

    async def main() -> None:
        cell = Cell(disturbed=2)
        new = await aupdate_optimistically(
            cell.aread, _plus_one, cell.awrite, backoff=constant(1.0)
        )
        assert (new, asyncio.get_running_loop().time()) == (201, 3.5)
        plain = await aupdate_optimistically(cell.read, _plus_one, cell.write)
        assert plain == 202

    run_virtual(main())


def test_who_is_always_late_is_told_so() -> None:
    """After so many attempts it is `Contended`, with their number, and nothing was written."""
    with virtual_time():
        cell = Cell(disturbed=99, raising=True)
        with pytest.raises(Contended, match="others were faster each time") as caught:
            update_optimistically(cell.read, _plus_one, cell.write, on=Changed, attempts=4)
        assert (cell.reads, cell.value) == (4, 400)
        assert caught.value.reason == "contended"
        assert caught.value.__notes__[0].startswith("seawall: 4 attempts in ")
        assert isinstance(caught.value.__cause__, Changed)


def test_pauses_are_jittered_and_replayable() -> None:
    """They come from the rng that was passed in, and differ from caller to caller."""

    def elapsed(seed: int) -> float:
        with virtual_time() as clock:
            cell = Cell(disturbed=5)
            update_optimistically(cell.read, _plus_one, cell.write, rng=Random(seed))
            return clock.now()

    assert elapsed(1) == elapsed(1) != elapsed(2)
    assert 0 < elapsed(1) <= 0.005 * (1 + 2 + 4 + 8 + 16)


def test_a_refusal_of_the_change_passes_through() -> None:
    """It is an answer, not a conflict: nothing is written or tried again."""
    cell = Cell(7)

    def refuse(value: int) -> int:
        raise Changed(value)

    with pytest.raises(Changed):
        update_optimistically(cell.read, refuse, cell.write, on=Changed)
    assert (cell.reads, cell.writes) == (1, 0)


@pytest.mark.parametrize("where", ["read", "write"])
def test_other_errors_pass_through(where: str) -> None:
    """Only what `on` names means that somebody was faster; StopIteration is no exception."""
    for kind in (KeyError, StopIteration):
        cell = Cell()

        def broken(*_: Any, kind: type[Exception] = kind) -> Any:
            raise kind("broken")

        functions: dict[str, Any] = {"read": cell.read, "write": cell.write, where: broken}
        with pytest.raises(kind, match="broken"):
            update_optimistically(functions["read"], _plus_one, functions["write"], on=Changed)


def test_a_read_may_be_disturbed_as_well() -> None:
    """A database may abort the reading transaction: that is a conflict too."""
    answers = iter([Changed, Changed, None])
    cell = Cell()

    def read() -> tuple[int, int]:
        error = next(answers)
        if error is not None:
            raise error
        return cell.read()

    with virtual_time():
        assert update_optimistically(read, _plus_one, cell.write, on=(Changed, OSError)) == 1


def test_the_deadline_ends_the_attempts() -> None:
    """It does not pause beyond the deadline, and does not begin after it."""
    with virtual_time() as clock:
        cell = Cell(disturbed=99)
        with deadline(2.5), pytest.raises(Contended, match="the deadline leaves no time"):
            update_optimistically(cell.read, _plus_one, cell.write, backoff=constant(1.0))
        assert (clock.now(), cell.reads) == (2.0, 3)
        with deadline(0.0), pytest.raises(DeadlineExceeded):
            update_optimistically(cell.read, _plus_one, cell.write)
        assert cell.reads == 3


def test_a_pause_that_takes_too_long_ends_the_attempts() -> None:
    """The deadline passed meanwhile: what was tried is told, and nothing more is tried."""

    class Sluggish(VirtualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds + 9.0)

    with virtual_time(Sluggish()):
        cell = Cell(disturbed=99)
        with deadline(5.0), pytest.raises(Contended, match="the deadline") as caught:
            update_optimistically(cell.read, _plus_one, cell.write)
        assert caught.value.__notes__[0].startswith("seawall: 1 attempt in 9")
        assert cell.reads == 1


def test_a_cancelled_update_has_stopped() -> None:
    """Cancelled in a pause, a read or a write, it goes no further."""

    async def main() -> None:
        for stop in (0.125, 0.375, 0.75, 1.625):
            cell = Cell(disturbed=9)
            task = _task(
                aupdate_optimistically(cell.aread, _plus_one, cell.awrite, backoff=constant(1.0))
            )
            await let_pass(stop)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            before = cell.reads, cell.writes
            await let_pass(9.0)
            assert (cell.reads, cell.writes) == before

    run_virtual(main())


class Contest(NamedTuple):
    """Callers that each add one to the same cell, at the same time."""

    callers: int
    attempts: int
    seed: int


CONTESTS = st.builds(Contest, callers=st.integers(1, 6), attempts=st.integers(1, 4), seed=SEEDS)


def _check_contest(case: Contest) -> None:
    async def main() -> None:
        cell = Cell()
        rng = Random(case.seed)
        tries = [0] * case.callers

        def read(number: int) -> Any:
            tries[number] += 1
            return cell.aread()

        results = await asyncio.gather(
            *(
                aupdate_optimistically(
                    lambda n=n: read(n), _plus_one, cell.awrite, attempts=case.attempts, rng=rng
                )
                for n in range(case.callers)
            ),
            return_exceptions=True,
        )
        written = [result for result in results if not isinstance(result, BaseException)]
        assert sorted(written) == list(range(1, cell.value + 1))
        assert all(isinstance(result, (int, Contended)) for result in results)
        assert max(tries) <= case.attempts

    run_virtual(main(), seed=case.seed)


@given(CONTESTS)
def test_no_update_is_lost_and_attempts_are_bounded(case: Contest) -> None:
    """What was written is the sum of those who succeeded; the others were told."""
    _check_contest(case)


def test_without_comparing_updates_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write without looking at the version, and the property is falsified."""

    def write(cell: Cell, new: int, _version: int) -> bool:
        cell.value = new
        return True

    monkeypatch.setattr(Cell, "write", write)
    assert falsified(_check_contest, CONTESTS)


def _late_of_fifty(attempts: int) -> int:
    """Return how many of fifty that add to one cell at once, 2 ms away, are told `Contended`."""

    class Remote(Cell):
        async def aread(self) -> tuple[int, int]:
            await let_pass(0.001 + rng.random() * 0.002)
            return self.read()

        async def awrite(self, new: int, version: int) -> bool:
            await let_pass(0.001 + rng.random() * 0.002)
            return self.write(new, version)

    async def main() -> int:
        cell = Remote()
        update = partial(aupdate_optimistically, cell.aread, _plus_one, cell.awrite)
        updates = (update(attempts=attempts, rng=rng) for _ in range(50))
        results = await asyncio.gather(*updates, return_exceptions=True)
        return sum(isinstance(result, Contended) for result in results)

    rng = Random(7)
    return run_virtual(main())


def test_the_default_is_enough_for_fifty_at_once() -> None:
    """As the docs say: all get through with ten attempts, and many do not with five."""
    assert _late_of_fifty(10) == 0
    assert 10 <= _late_of_fifty(5) <= 25


def test_bad_arguments_are_refused_with_advice() -> None:
    """The message says what to write, or return, instead."""
    cell = Cell()
    with pytest.raises(TypeError, match="aupdate_optimistically"):
        update_optimistically(cell.aread, _plus_one, cell.write)  # type: ignore[type-var,arg-type]
    with pytest.raises(TypeError, match="change=None"):
        update_optimistically(cell.read, None, cell.write)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attempts=0"):
        update_optimistically(cell.read, _plus_one, cell.write, attempts=0)
    with pytest.raises(TypeError, match="on="):
        update_optimistically(cell.read, _plus_one, cell.write, on=KeyboardInterrupt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"return \(value, version\)"):
        update_optimistically(lambda: 7, _plus_one, cell.write)  # type: ignore[arg-type,return-value]
    for answer in (None, -1, "yes"):
        with pytest.raises(TypeError, match="return whether it was written"):
            update_optimistically(cell.read, _plus_one, lambda *_, a=answer: a)  # type: ignore[misc]


# Stripes

KEYS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=4,
)


@given(KEYS, st.integers(1, 64))
def test_a_key_has_one_stripe(key: Any, n: int) -> None:
    """Always the same part of those there are."""
    stripes = Stripes(n, object)
    assert stripes[key] is stripes[key]
    assert 0 <= stripes.index(key) < n == len(stripes) == len(set(stripes))


INDICES = [406, 168, 798, 555, 555, 978, 790, 590, 44, 605]


def test_stripes_are_the_same_in_every_process() -> None:
    """The numbers are fixed for ever: pods of any version agree on them."""
    stripes = Stripes(1024, object)
    keys: list[Any] = ["alice", b"alice", 7, True, 1, None, ("alice", 7), ("", "alice7"), ((),), -7]
    assert [stripes.index(key) for key in keys] == INDICES


def test_keys_that_differ_in_shape_are_different() -> None:
    """A tuple's parts cannot run together, and kinds are not confused."""
    keys: list[Any] = [("a", "b"), ("ab",), ("a", "b", ""), "ab", b"ab", 1, "1", (1,), None, ()]
    assert len({_encoded(key) for key in keys}) == len(keys)


def test_keys_spread_evenly() -> None:
    """No stripe has much more than its share, for keys as people number them."""
    stripes = Stripes(64, object)
    for keys in ([f"user-{n}" for n in range(64_000)], list(range(64_000))):
        counts = [0] * 64
        for key in keys:
            counts[stripes.index(key)] += 1
        assert 800 < min(counts) <= max(counts) < 1200


def test_keys_without_a_stable_form_are_refused() -> None:
    """Their `hash` may differ from process to process."""
    stripes = Stripes(4, object)
    for key in (object(), 1.5, frozenset("a"), ("a", 2.5)):
        with pytest.raises(TypeError, match=r"such as str\(key\)"):
            stripes[key]
    with pytest.raises(ValueError, match="n=0"):
        Stripes(0, object)
    with pytest.raises(TypeError, match="make="):
        Stripes(4, None)  # type: ignore[arg-type]
    assert repr(Stripes(4, threading.Event)) == "<Stripes 4 of Event>"


def test_numbers_of_any_size_are_keys() -> None:
    """Also those that Python would not write as decimals."""
    stripes = Stripes(1000, object)
    numbers = [sign * 10**power for power in (600, 700, 5000) for sign in (1, -1)]
    assert len({_encoded(number) for number in numbers}) == 6
    assert stripes.index(10**5000) == stripes.index(10**5000)
    assert _encoded(10) == b"i10"


# Work that would run elsewhere


async def _plus_one_later(value: int) -> int:
    return value + 1


def _plus_one_lazily(value: int) -> Any:
    yield value + 1


@pytest.mark.parametrize("kind", ["async", "awaitable", "generator"])
def test_a_change_that_takes_time_is_refused_before_anything_is_written(kind: str) -> None:
    """The store would hold a coroutine else."""
    changes: dict[str, Any] = {
        "async": _plus_one_later,
        "awaitable": lambda value: _plus_one_later(value),  # noqa: PLW0108 - what users write
        "generator": _plus_one_lazily,
    }
    cell = Cell()
    with pytest.raises(TypeError, match="plain function"):
        update_optimistically(cell.read, changes[kind], cell.write)
    with pytest.raises(TypeError, match="plain function"):
        run_virtual(aupdate_optimistically(cell.read, changes[kind], cell.write))
    assert (cell.value, cell.writes) == (0, 0)


@pytest.mark.parametrize("which", ["read", "write"])
def test_an_awaitable_in_a_plain_update_is_refused(which: str) -> None:
    """A lambda around an async function is found out when it is called."""
    cell = Cell()
    functions: dict[str, Any] = {"read": cell.read, "write": cell.write}
    functions[which] = lambda *_: let_pass(0.0)
    with pytest.raises(TypeError, match="write `await aupdate_optimistically"):
        update_optimistically(functions["read"], _plus_one, functions["write"])


@pytest.mark.parametrize("rng", [7, Random])
def test_chance_is_a_random(rng: Any) -> None:
    """A seed alone is none."""
    with pytest.raises(TypeError, match=r"pass a random.Random, such as random.Random\(7\)"):
        update_optimistically(lambda: (1, 0), _plus_one, lambda *_: True, rng=rng)


# Memory


@pytest.mark.parametrize("raising", [True, False])
def test_who_gives_up_is_freed_at_once(raising: bool) -> None:  # noqa: FBT001
    """Nothing leads from the error back to itself: it would live until the next collection."""
    gc.collect()
    gc.disable()
    try:
        for is_async in (False, True):
            assert _freed(is_async=is_async, raising=raising)
    finally:
        gc.enable()


def _freed(*, is_async: bool, raising: bool) -> bool:
    cell = Cell(disturbed=9, raising=raising)
    options: dict[str, Any] = {"on": Changed, "attempts": 2}

    async def give_up() -> list[weakref.ref[BaseException]]:
        try:
            if is_async:
                await aupdate_optimistically(cell.read, _plus_one, cell.write, **options)
            else:
                update_optimistically(cell.read, _plus_one, cell.write, **options)
        except Contended as error:
            known = [weakref.ref[BaseException](error)]
            if error.__cause__ is not None:
                known.append(weakref.ref(error.__cause__))
            return known
        raise AssertionError

    known = run_virtual(give_up())
    assert len(known) == 1 + raising
    return not any(one() for one in known)
