"""What Hedge always keeps to, under random programs and orders; and that its safeguards matter."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Bulkhead, Cache, Hedge, RetryBudget, Timeout
from seawall.policies.hedge.policy import HedgeBound
from seawall.policies.hedge.race import Race
from seawall.policies.hedge.tasks import TaskCopies
from seawall.policies.retry import InFlightRatio
from seawall.testing import run_virtual
from tests.support import SEEDS, falsified, let_pass, new_guard, quarters
from tests.test_cancellation import HOWS, HOWS_OF, attempt, bounded, call, crowd, enforced, retry
from tests.test_cancellation import alone as undisturbed
from tests.test_cancellation import sweep as cancel_everywhere


class Copy(NamedTuple):
    """What one copy does: it takes so long, ends so, and may ignore that it is cancelled."""

    seconds: float
    ends: str
    stubborn: bool


class Visit(NamedTuple):
    """One call: when it comes, what its copies do, and whether it is cancelled, and when."""

    at: float
    copies: list[Copy]
    cancel: tuple[float, int] | None
    idempotent: bool


class Day(NamedTuple):
    """Calls under one hedge."""

    delay: float
    most: int
    cap: float
    burst: int
    slots: int
    visits: list[Visit]
    seed: int


COPIES = st.builds(
    Copy,
    seconds=quarters(12),
    ends=st.sampled_from(["value", "value", "error"]),
    stubborn=st.sampled_from([False, False, True]),
)
VISITS = st.builds(
    Visit,
    at=quarters(12),
    copies=st.lists(COPIES, min_size=4, max_size=4),
    cancel=st.none() | st.tuples(quarters(12), st.integers(0, 3)),
    idempotent=st.sampled_from([True, True, True, False]),
)
DAYS = st.builds(
    Day,
    delay=quarters(4, least=1),
    most=st.integers(2, 4),
    cap=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    burst=st.integers(1, 3),
    slots=st.integers(1, 12),
    visits=st.lists(VISITS, min_size=1, max_size=8),
    seed=SEEDS,
)


class Desk:
    """Carries out the calls of a day, and keeps books from outside."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self.budget = RetryBudget(InFlightRatio(floor=100))
        self.disposed: list[object] = []
        self.made: list[object] = []
        self.taken: list[object] = []
        self.open = 0
        self.begun = 0
        self.extra = 0
        self.broken: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        hedge = Hedge(
            day.delay,
            most=day.most,
            cap=day.cap,
            burst=day.burst,
            budget=self.budget,
            dispose=self.disposed.append,
        )
        self.slots = Bulkhead(day.slots)
        self.guards = {
            flag: new_guard(hedge, self.slots, idempotent=flag) for flag in (True, False)
        }

    async def visit(self, visit: Visit) -> None:  # noqa: C901 - a list of what must hold
        started = 0
        won_at: list[float] = []
        loop = asyncio.get_running_loop()

        async def function() -> object:
            nonlocal started
            copy = visit.copies[started]
            started += 1
            self.open += 1
            if started == 1 and visit.idempotent:
                self.begun += 1
            elif started > 1:
                self.extra += 1
            allowed = self.day.cap * self.begun + self.day.burst
            if self.extra > allowed:
                self.broken.append(f"{self.extra} copies for {self.begun} calls")
            if started > 1 and not visit.idempotent:
                self.broken.append("a copy of what must not be repeated")
            try:
                await let_pass(copy.seconds)
            except asyncio.CancelledError:
                if not copy.stubborn:
                    raise
            finally:
                self.open -= 1
            if copy.ends == "error":
                raise ConnectionError
            value = object()
            self.made.append(value)
            won_at.append(loop.time())
            return value

        try:
            self.taken.append(await self.guards[visit.idempotent].acall(function))
        except Exception:  # noqa: BLE001, S110 - refused or failed: so be it
            pass
        else:
            if loop.time() != won_at[0]:
                self.broken.append("the answer was held up by a copy that lost")

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
            return
        task.cancel()

    async def run(self) -> None:
        loop: Any = asyncio.get_running_loop()
        for visit in sorted(self.day.visits, key=lambda visit: visit.at):
            await let_pass(visit.at - loop.time())
            task = loop.create_task(self.visit(visit))
            self.tasks.append(task)
            if visit.cancel is not None:
                after, turns = visit.cancel
                loop.call_later(after, self.cancel, task, turns)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        # All copies have ended with their calls: nothing is given a turn before this is checked.
        assert self.open == 0, "something is left open"
        assert self.slots.in_flight == 0
        assert not self.broken, self.broken
        state = self.budget.snapshot()
        assert (state["active"], state["retries"]) == (0, 0)
        handed = self.taken + self.disposed
        assert len(handed) == len(self.made), "a value was lost, or handed out twice"
        assert set(map(id, handed)) == set(map(id, self.made))
        await let_pass(20.0)
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]
        assert len(asyncio.all_tasks()) == 1


def keeps_to_all(day: Day) -> None:
    """Run a day; Desk.run asserts."""
    run_virtual(Desk(day).run(), seed=day.seed)


def shown(guard: Any) -> Any:
    return guard.snapshot()["policies"][0]


@given(DAYS)
def test_whatever_happens_the_books_are_right(day: Day) -> None:
    """Copies within the cap, none of what must not repeat, all ended, each value in one hand."""
    keeps_to_all(day)


@given(SEEDS)
def test_the_hedge_shares_the_load_it_may_add(seed: int) -> None:
    """Over a long run of calls, the extra load never exceeds the share at any prefix."""

    async def main() -> None:
        chance = Random(seed)
        cap, burst = chance.choice([0.02, 0.05, 0.2]), chance.randint(1, 5)
        guard = new_guard(Hedge(0.5, cap=cap, burst=burst))
        for _ in range(100):
            await guard.acall(let_pass, chance.random())
            assert shown(guard)["hedges"] <= cap * shown(guard)["calls"] + burst

    run_virtual(main())


def _never_cancel(self: TaskCopies, **_: Any) -> None:
    self.stop_copying()


async def _keep(*_: Any) -> None:
    pass


async def _do_not_wait(_self: TaskCopies, race: Race) -> Any:
    return race.value


def _any_call(self: HedgeBound, *_: Any) -> float | None:
    self.calls += 1
    self.policy._calls += 1
    return self.policy.delay  # type: ignore[return-value]


def _second_value_too(self: Race, number: int, value: Any) -> bool:
    self.over, self.value, self.winner = True, value, number
    self.failure = None
    return True


ABLATIONS: dict[str, tuple[Any, str, Any]] = {
    "no cap": (Hedge, "_try_hedge", lambda _: True),
    "any call is repeated": (HedgeBound, "begin", _any_call),
    "losers are not cancelled": (TaskCopies, "_cancel", _never_cancel),
    "losers are not waited for": (TaskCopies, "_answer", _do_not_wait),
    "values are not disposed of": (TaskCopies, "_dispose", _keep),
    "a later value wins too": (Race, "returned", _second_value_too),
    "the budget is not told of ends": (HedgeBound, "report_end", lambda _: None),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_safeguard_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, some day breaks the books."""
    owner, attribute, instead = ABLATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)
    assert falsified(keeps_to_all, DAYS)


# Cancellation at every await point

STACKS: dict[str, Any] = {
    "hedge": lambda: [Hedge(0.03)],
    "three copies": lambda: [Hedge(0.03, most=3, cap=1.0)],
    "inside": lambda: [Hedge(0.03, budget=RetryBudget(InFlightRatio())), Bulkhead(9)],
    "around": lambda: [Bulkhead(9), Hedge(0.03), Bulkhead(1, max_wait=30.0, max_waiting=9)],
    "timed": lambda: [Timeout(60.0), Hedge(0.03), Timeout(2.0)],
    "all": lambda: [
        Cache(5.0),
        Timeout(60.0),
        retry(InFlightRatio()),
        Hedge(0.03),
        Breaker(consecutive=50),
        Bulkhead(9),
        Timeout(2.0),
    ],
}
SCRIPTS: list[tuple[str, ...]] = [(), ("hang",), ("fail",), ("hang", "fail"), ("fail", "hang")]


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("script", SCRIPTS, ids=repr)
def test_a_hedged_call_stopped_anywhere_leaves_nothing_behind(name: str, script: Any) -> None:
    """Wherever and however it is stopped: no copy, slot, timer or context is left over."""
    build = STACKS[name]
    assert cancel_everywhere(build, script=script, prepare=undisturbed) >= 2
    assert cancel_everywhere(build, script=script, prepare=crowd, hows=("soon", "closed")) >= 1


@pytest.mark.parametrize("act", [call, attempt, bounded, enforced])
def test_the_same_in_a_deadline_and_for_a_result(act: Any) -> None:
    """However the call is made."""
    hows = HOWS_OF.get(act, HOWS)
    assert cancel_everywhere(STACKS["all"], act=act, script=("hang",), hows=hows) >= 2


def _cancellations_of_others_are_ours(self: TaskCopies, race: Race, error: BaseException) -> Any:
    self._cancelling = 99
    return real_first_failed(self, race, error)


real_first_failed = TaskCopies.first_failed


async def _no_stop(_self: TaskCopies, _race: Race, error: BaseException) -> Any:
    raise error


SWEPT_ABLATIONS: dict[str, tuple[Any, str, Any]] = {
    "copies are not stopped": (TaskCopies, "_stop", _no_stop),
    "copies are not let go": (TaskCopies, "_let_go", lambda *_: None),
    "others' cancellations are swallowed": (
        TaskCopies,
        "first_failed",
        _cancellations_of_others_are_ours,
    ),
}


@pytest.mark.parametrize("name", SWEPT_ABLATIONS)
def test_the_sweep_finds_what_is_taken_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these safeguards it fails."""
    owner, attribute, instead = SWEPT_ABLATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)

    def sweep_all() -> None:
        for script in SCRIPTS:
            cancel_everywhere(STACKS["hedge"], script=script)

    with pytest.raises((AssertionError, RuntimeError, asyncio.CancelledError)):
        sweep_all()


def test_a_watch_that_comes_late_is_told_at_once() -> None:
    """What was decided before anybody watched is not waited for."""
    guard = new_guard(Hedge(1.0))
    bound: Any = guard.bounds[0]
    race = Race(bound, 0.0)
    assert race.returned(1, "value")
    race.ended(1)
    rung: list[bool] = []
    watch = race.decision()
    watch.publish(lambda: rung.append(True) or True)
    assert rung == [True]
    assert watch.claim()
