"""Chaos: which calls are disturbed and how, what sees it, and that it is off until switched on."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    Chaos,
    DeadlineExceeded,
    Guard,
    Retry,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    deadline,
    subscribe,
)
from seawall.events import SettingsChanged
from seawall.policies import chaos as chaos_module
from seawall.policies.timeout import adaptive_timeout
from seawall.testing import ScriptedService, answer, run_virtual, slow, virtual_time
from tests.support import SEEDS, falsified, let_pass, new_guard, without_addresses
from tests.test_cancellation import HOWS, HOWS_OF, attempt, bounded, call, enforced
from tests.test_cancellation import sweep as cancel_everywhere


def now() -> float:
    return asyncio.get_running_loop().time()


def shown(guard: Guard) -> dict[str, Any]:
    return guard.snapshot()["policies"][-1]


def outcomes(chaos: Chaos, calls: int) -> list[bool]:
    """Return which of so many calls were disturbed."""
    guard = new_guard(chaos)
    return [guard.attempt(lambda: "real").value != "real" for _ in range(calls)]


# Whether


def test_nothing_is_disturbed_until_it_is_switched_on() -> None:
    """Off by default: every call is the real one."""
    chaos = Chaos(1.0, error=ConnectionError)
    guard = new_guard(chaos)
    assert guard.call(lambda: "real") == "real"
    assert shown(guard) == {"policy": "chaos", "enabled": False, "share": 1.0, "injected": {}}
    chaos.on()
    with pytest.raises(ConnectionError):
        guard.call(lambda: "real")
    chaos.off()
    assert guard.call(lambda: "real") == "real"
    assert shown(guard)["injected"] == {"error": 1}


def test_switched_on_for_a_block() -> None:
    """At its end it is as it was before, whatever happened in it."""
    chaos = Chaos(1.0, result="wrong")
    guard = new_guard(chaos)
    with chaos.on() as same:
        assert same is chaos
        assert guard.call(lambda: "real") == "wrong"
        with chaos.on():
            pass
        assert chaos.enabled
    assert guard.call(lambda: "real") == "real"
    with pytest.raises(KeyError), chaos.on():
        raise KeyError
    assert not chaos.enabled


def test_blocks_may_overlap() -> None:
    """On until the last of them ends, whichever that is; then as it was before the first."""
    chaos = Chaos(1.0, result="wrong")
    for order in [(0, 1), (1, 0)]:
        blocks = [chaos.on(), chaos.on()]
        for block in reversed(blocks):
            block.__enter__()
        blocks[order[0]].__exit__(None, None, None)
        assert chaos.enabled
        blocks[order[1]].__exit__(None, None, None)
        assert not chaos.enabled


def test_what_is_switched_inside_a_block_lasts() -> None:
    """`on()` without a block stays on, `off()` is off; the end of a block undoes neither."""
    chaos = Chaos(1.0, result="wrong")
    with chaos.on():
        chaos.off()
        assert not chaos.enabled
        with chaos.on():
            assert chaos.enabled
        assert not chaos.enabled
    assert not chaos.enabled
    with chaos.on():
        chaos.on()
    assert chaos.enabled
    chaos.off()
    with chaos.on():
        chaos.update(enabled=True)
    assert chaos.enabled


def test_switching_is_told_to_subscribers() -> None:
    """Whoever watches the service learns that what follows is on purpose."""
    told: list[SettingsChanged] = []
    unsubscribe = subscribe(told.append, SettingsChanged)
    chaos = Chaos(1.0, result="wrong")
    guard = new_guard(chaos)
    with chaos.on():
        pass
    unsubscribe()
    assert [(event.guard, event.policy, event.changes) for event in told] == [
        (guard.name, "chaos", {"enabled": True}),
        (guard.name, "chaos", {"enabled": False}),
    ]


@given(st.floats(0.0, 1.0), SEEDS)
def test_the_same_seed_disturbs_the_same_calls(share: float, seed: int) -> None:
    """Call by call; and none at a share of 0, all at 1."""
    first, second = (
        outcomes(Chaos(share, result="wrong", seed=seed, enabled=True), 30) for _ in range(2)
    )
    assert first == second
    chance = Random(seed)
    assert first == [chance.random() < share for _ in range(30)]


def test_the_share_is_a_share() -> None:
    """Of many calls about that many are disturbed; another seed chooses others."""
    one, two = (outcomes(Chaos(0.1, result=None, seed=seed, enabled=True), 2000) for seed in (1, 2))
    assert sum(one) == pytest.approx(200, abs=40)
    assert one != two


def test_a_seed_given_at_run_time_begins_anew() -> None:
    """Other changes go on with the sequence; bad ones change nothing."""
    chaos = Chaos(0.5, result="wrong", seed=3, enabled=True)
    first = outcomes(chaos, 20)
    chaos.update(seed=3)
    assert outcomes(chaos, 20) == first
    chaos.update(share=1.0, result="other")
    assert new_guard(chaos).call(lambda: "real") == "other"
    with pytest.raises(ValueError, match="one thing"):
        chaos.update(share=0.1, error=ConnectionError, result="another")
    assert (chaos.share, chaos.error) == (1.0, None)
    with pytest.raises(TypeError, match="it takes share"):
        chaos.update(kind="flood")


def test_what_is_named_replaces_what_was_done_before() -> None:
    """One of error, result and hang takes the place of another; latency and hang exclude too."""
    chaos = Chaos(1.0, result="wrong", latency=0.5)
    chaos.update(error=ConnectionError)
    assert repr(chaos) == "<Chaos(1, latency=0.5, error=ConnectionError), off>"
    chaos.update(result=None)
    assert repr(chaos) == "<Chaos(1, latency=0.5, result=None), off>"
    chaos.update(error=None, hang=False)  # neither is one: nothing to replace
    assert repr(chaos) == "<Chaos(1, latency=0.5, result=None), off>"
    chaos.update(hang=True)
    assert repr(chaos) == "<Chaos(1, hang=True), off>"
    chaos.update(latency=0.2)
    assert repr(chaos) == "<Chaos(1, latency=0.2), off>"


def test_a_change_in_the_middle_is_for_later_calls() -> None:
    """What is done to a call is settled when it begins."""

    async def main() -> None:
        chaos = Chaos(1.0, error=ConnectionError, latency=1.0, enabled=True)
        guard = new_guard(chaos)
        for change in ({"error": None}, {"result": "wrong"}, {"hang": True}):
            chaos.update(error=ConnectionError, latency=1.0)
            task = asyncio.create_task(guard.aattempt(let_pass, 0.0))
            await let_pass(0.5)
            chaos.update(**change)
            assert isinstance((await task).error, ConnectionError)

    run_virtual(main())


def test_when_looks_at_the_arguments() -> None:
    """Only calls that it picks are disturbed, or count for the sequence."""
    chaos = Chaos(1.0, result="wrong", enabled=True, when=lambda path, *_: path == "/pay")
    guard = new_guard(chaos)

    @guard
    def get(path: str, size: int = 0) -> str:
        return f"{path} {size}"

    assert get("/pay") == "wrong"
    assert get("/list", size=3) == "/list 3"
    assert shown(guard)["injected"] == {"result": 1}


def test_threads_draw_from_one_sequence() -> None:
    """However many threads call, as many calls are disturbed as one thread would see."""
    chaos = Chaos(0.3, result="wrong", seed=5, enabled=True)
    guard = new_guard(chaos)
    seen: list[Any] = []

    def work() -> None:
        seen.extend(guard.call(lambda: "real") for _ in range(250))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = sum(outcomes(Chaos(0.3, result="wrong", seed=5, enabled=True), 1000))
    assert seen.count("wrong") == alone
    assert shown(guard)["injected"] == {"result": alone}


def test_a_draw_and_its_count_are_one_step() -> None:
    """Both numbers of a latency are drawn, and the call counted, before another thread draws."""
    chaos = Chaos(1.0, latency=(0.1, 0.2), enabled=True)
    guard = new_guard(chaos)
    inside: list[bool] = []

    class Watched(Random):
        def random(self) -> float:
            inside.append(chaos._mutex._is_owned())
            return super().random()

    chaos._rng = Watched(1)
    with virtual_time():
        guard.call(lambda: None)
    assert inside == [True, True]


# How


def test_latency_is_added_before_the_call() -> None:
    """Async and sync alike, on the guard's own time."""
    chaos = Chaos(1.0, latency=0.5, enabled=True)

    async def main() -> None:
        guard = new_guard(chaos)
        service = ScriptedService(slow(1.0, "real"))
        assert await guard.acall(service.acall) == "real"
        assert now() == 1.5
        assert guard.snapshot()["p50"] == pytest.approx(1.5, rel=0.05)
        assert guard.snapshot()["succeeded"] == 1

    run_virtual(main())
    with virtual_time() as clock:
        guard = new_guard(chaos)
        assert guard.call(ScriptedService(slow(1.0, "real")).call) == "real"
        assert clock.now() == 1.5
        assert guard.snapshot()["p50"] == pytest.approx(1.5, rel=0.05)
        assert guard.snapshot()["succeeded"] == 1


def test_latency_may_be_drawn_from_a_range() -> None:
    """Evenly, and by the seed."""

    def times() -> list[float]:
        taken = []
        with virtual_time() as clock:
            guard = new_guard(Chaos(1.0, latency=(0.5, 1.5), seed=7, enabled=True))
            for _ in range(50):
                began = clock.now()
                guard.call(lambda: None)
                taken.append(clock.now() - began)
        return taken

    first = times()
    assert first == times()
    assert all(0.5 <= seconds <= 1.5 for seconds in first)
    assert max(first) - min(first) > 0.5


def test_errors_and_results_come_instead_of_the_call() -> None:
    """The function is not called; with a latency they come after it."""

    async def main() -> None:
        service = ScriptedService(answer("real"))
        failing = Chaos(1.0, error=lambda: ConnectionError("chaos"), latency=2.0, enabled=True)
        guard = new_guard(failing)
        with pytest.raises(ConnectionError, match="chaos"):
            await guard.acall(service.acall)
        assert now() == 2.0
        assert guard.snapshot()["failed"] == 1
        guard = new_guard(Chaos(1.0, result=None, enabled=True))
        assert await guard.acall(service.acall) is None
        assert guard.snapshot()["succeeded"] == 1
        result = await guard.aattempt(service.acall)
        assert (result.ok, result.attempts) == (True, 1)
        assert service.calls == 0

    run_virtual(main())


def test_each_error_is_a_new_one() -> None:
    """One instance raised again and again would grow its traceback without end."""
    guard = new_guard(Chaos(1.0, error=ConnectionError, enabled=True))
    errors = [guard.attempt(lambda: None).error for _ in range(2)]
    assert errors[0] is not errors[1]
    with pytest.raises(TypeError, match="makes a new error"):
        Chaos(1.0, error=ConnectionError())  # type: ignore[arg-type]


def test_a_hang_waits_until_it_is_stopped() -> None:
    """By a timeout, by its caller, or by the deadline."""

    async def main() -> None:
        chaos = Chaos(1.0, hang=True, enabled=True)
        guard = new_guard(Timeout(3.0), chaos)
        with pytest.raises(TimedOut):
            await guard.acall(let_pass, 0.0)
        assert now() == 3.0
        guard = new_guard(chaos)
        with deadline(2.0), pytest.raises(TimedOut, match="while Chaos delayed"):
            await guard.acall(let_pass, 0.0)
        assert now() == 5.0
        task = asyncio.create_task(guard.acall(let_pass, 0.0))
        await let_pass(1000.0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert guard.snapshot()["cancelled"] == 1
        assert guard.snapshot()["failed"] == 1

    run_virtual(main())


def test_a_plain_function_hangs_only_until_a_deadline() -> None:
    """With one it is a timeout at that instant; without one it would never end, and is refused."""
    chaos = Chaos(1.0, hang=True, enabled=True)
    with virtual_time() as clock:
        guard = new_guard(Timeout(2.0, sync="cooperative"), chaos)
        with pytest.raises(TimedOut):
            guard.call(lambda: None)
        assert clock.now() == 2.0
        assert guard.snapshot()["timed_out"] == 1
        guard = new_guard(chaos)
        with pytest.raises(RuntimeError, match="give it a deadline"):
            guard.call(lambda: None)


def test_no_latency_goes_beyond_the_deadline() -> None:
    """A client that obeys the deadline gives up then, and does not call."""
    with virtual_time() as clock:
        service = ScriptedService(answer())
        guard = new_guard(Chaos(1.0, latency=5.0, enabled=True))
        with deadline(2.0), pytest.raises(TimedOut):
            guard.call(service.call)
        assert (clock.now(), service.calls) == (2.0, 0)
        with deadline(0.0), pytest.raises(DeadlineExceeded):
            guard.call(service.call)


# What sees it


def test_all_policies_around_it_see_what_it_does() -> None:
    """Retry repeats it, the breaker opens by it, a timeout stops it, a bulkhead is full of it."""

    async def main() -> None:
        chaos = Chaos(1.0, error=ConnectionError, enabled=True)
        retry = Retry(on=ConnectionError, attempts=3, backoff=0.1)
        breaker = Breaker(consecutive=3, counts="attempts")
        guard = new_guard(retry, breaker, Bulkhead(2), Timeout(2.0), chaos)
        result = await guard.aattempt(let_pass, 0.0)
        assert (result.attempts, breaker.state) == (3, "open")
        assert guard.snapshot()["failed"] == 3

        chaos = Chaos(1.0, hang=True, enabled=True)
        slots = Bulkhead(2)
        guard = new_guard(slots, Timeout(2.0), chaos)
        tasks = [asyncio.create_task(guard.aattempt(let_pass, 0.0)) for _ in range(3)]
        await let_pass(1.0)
        assert slots.in_flight == 2
        reasons = [result.reason for result in await asyncio.gather(*tasks)]
        assert reasons == ["timed_out", "timed_out", "bulkhead_full"]

    run_virtual(main())


def test_a_timeout_that_adapts_follows_injected_latency() -> None:
    """What is measured is the call with its disturbance."""

    async def main() -> None:
        guard = new_guard(
            Timeout(adaptive_timeout(floor=0.01, cap=10.0)), Chaos(1.0, latency=1.0, enabled=True)
        )
        for _ in range(40):
            await guard.acall(let_pass, 0.0)
        assert guard.snapshot()["policies"][0]["seconds"] == pytest.approx(2.5, rel=0.1)

    run_virtual(main())


def test_it_may_stand_around_other_policies() -> None:
    """Then these are not asked for what comes instead, and a latency is before them."""

    async def main() -> None:
        slots = Bulkhead(1)
        guard = new_guard(Chaos(1.0, latency=1.0, enabled=True), slots)
        task = asyncio.create_task(guard.acall(let_pass, 1.0))
        await let_pass(0.5)
        assert slots.in_flight == 0
        await let_pass(1.0)
        assert slots.in_flight == 1
        await task
        assert guard.snapshot()["succeeded"] == 1
        guard = new_guard(Chaos(1.0, result="wrong", enabled=True), slots)
        async with new_guard(slots).hold():
            assert await guard.acall(let_pass, 1.0) == "wrong"
        assert guard.snapshot()["succeeded"] == 1

    run_virtual(main())


def test_several_of_them_have_shares_of_their_own() -> None:
    """One Chaos for each kind of trouble."""
    slow_ones = Chaos(0.2, latency=1.0, seed=1, enabled=True)
    failing = Chaos(0.1, error=ConnectionError, seed=2, enabled=True)
    with virtual_time():
        guard = new_guard(slow_ones, failing)
        for _ in range(500):
            guard.attempt(lambda: None)
        counts = [policy["injected"] for policy in guard.snapshot()["policies"]]
        assert counts[0]["latency"] == pytest.approx(100, abs=25)
        assert counts[1]["error"] == pytest.approx(50, abs=20)
        assert guard.snapshot()["failed"] == counts[1]["error"]
        assert guard.snapshot()["succeeded"] == 500 - counts[1]["error"]


def test_several_of_them_are_counted_as_one() -> None:
    """The first of a row at the very inside is measured with all that follow, once."""

    async def main() -> None:
        for first in (Chaos(1.0, latency=1.0, enabled=True), Chaos(0.0, result=1, enabled=True)):
            failing = Chaos(1.0, error=ConnectionError)
            guard = new_guard(first, Chaos(1.0, latency=2.0, enabled=True), failing)
            result = await guard.aattempt(let_pass, 0.5)
            assert (result.ok, result.attempts) == (True, 1)
            took = 3.5 if first.share else 2.5
            assert guard.snapshot()["p50"] == pytest.approx(took, rel=0.05)
            assert guard.snapshot()["succeeded"] == 1
            with failing.on():
                result = await guard.aattempt(let_pass, 0.5)
            assert (type(result.error), result.attempts) == (ConnectionError, 1)
            assert guard.snapshot()["failed"] == 1
            injected = [policy["injected"] for policy in guard.snapshot()["policies"]]
            assert injected == [{"latency": 2} if first.share else {}, {"latency": 2}, {"error": 1}]
        slow_one = Chaos(1.0, latency=5.0, enabled=True)
        guard = new_guard(Timeout(2.0), slow_one, Chaos(0.01, error=ConnectionError))
        assert not (await guard.aattempt(let_pass, 0.0)).ok
        assert (guard.snapshot()["failed"], guard.snapshot()["timed_out"]) == (1, 1)

    run_virtual(main())


def test_threads_are_disturbed_too() -> None:
    """Inside a thread bulkhead the thread is what waits."""

    async def main() -> None:
        guard = new_guard(ThreadBulkhead(1), Chaos(1.0, result="wrong", enabled=True))
        with asyncio.get_running_loop().hold_time():
            assert await guard.acall(lambda: "real") == "wrong"

    run_virtual(main())


def test_a_policy_alone_can_be_a_decorator() -> None:
    """As with any policy."""
    chaos = Chaos(1.0, result="wrong")

    @chaos
    def function() -> str:
        return "real"

    assert function() == "real"
    with chaos.on():
        assert function() == "wrong"


@pytest.mark.parametrize("act", [call, attempt, bounded, enforced])
def test_a_disturbed_call_stopped_anywhere_leaves_nothing_behind(act: Any) -> None:
    """While it is made to wait, as at any other point."""

    def build() -> list[Any]:
        return [Bulkhead(1), Breaker(consecutive=5), Chaos(1.0, latency=0.5, enabled=True)]

    assert cancel_everywhere(build, act=act, hows=HOWS_OF.get(act, HOWS)) >= 3


def test_without_a_sequence_of_its_own_it_could_not_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ablation: with a chance that others draw from too, the same seed chooses other calls."""
    shared = Random(1)
    monkeypatch.setattr(chaos_module, "Random", lambda _seed: shared)

    def replayed(seed: int) -> None:
        first, second = (
            outcomes(Chaos(0.5, result="wrong", seed=seed, enabled=True), 30) for _ in range(2)
        )
        assert first == second

    assert falsified(replayed, SEEDS)


# Settings


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"error": ConnectionError, "result": 1},
        {"error": ConnectionError, "hang": True},
        {"latency": 1.0, "hang": True},
        {"latency": 0.0},
        {"latency": -1.0},
        {"latency": (2.0, 1.0)},
        {"latency": (1.0, 2.0, 3.0)},
        {"latency": "slow"},
        {"error": "refused"},
        {"error": int},
        {"error": KeyboardInterrupt},
        {"error": let_pass},
        {"result": 1, "when": let_pass},
        {"hang": 1},
        {"result": 1, "when": 3},
        {"result": 1, "seed": -1},
        {"result": 1, "enabled": "yes"},
    ],
    ids=without_addresses,
)
def test_bad_settings_are_refused(options: Any) -> None:
    """At once, with what to write instead."""
    with pytest.raises((TypeError, ValueError), match=r"write|pass|put"):
        Chaos(0.5, **options)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", None, True])
def test_a_share_is_between_none_and_all(share: Any) -> None:
    """And is a number."""
    with pytest.raises((TypeError, ValueError), match="share"):
        Chaos(share, result=1)


def test_it_shows_what_it_does_and_whether_it_is_on() -> None:
    """In explain(), an active one stands out."""
    chaos = Chaos(0.05, latency=0.2, error=ConnectionError)
    assert repr(chaos) == "<Chaos(0.05, latency=0.2, error=ConnectionError), off>"
    chaos.on()
    assert repr(chaos) == "<Chaos(0.05, latency=0.2, error=ConnectionError), on>"
    assert repr(Chaos(1.0, latency=(0.1, 0.2))) == "<Chaos(1, latency=(0.1, 0.2)), off>"
    assert repr(Chaos(1.0, result=None)) == "<Chaos(1, result=None), off>"
    assert repr(Chaos(1.0, hang=True)) == "<Chaos(1, hang=True), off>"
