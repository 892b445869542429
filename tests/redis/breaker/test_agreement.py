"""One random history for the pure model, the gate in memory and the one in the store.

All three must say the same to every call, and have counted the same. What the shared one counts is
told to the store at every step; the server's clock stands where the others' does.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seawall import Breaker, CircuitOpen
from seawall.models.breaker.probes import CallVerdict
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerSettings, BreakerState
from seawall.models.windows import CallCount, Tracked
from seawall.policies.breaker import growing, n_of_m, ramp, single_probe, slow_start
from seawall.runtime.policy import bindings_of
from tests.redis.breaker.breakers import OUTCOMES, World, entered, quiet_world
from tests.redis.support import mutate
from tests.support import new_guard


def some_rules():
    """Return rules to trip by: each alone, and together; times are exact in both units."""
    window = st.sampled_from(
        [{"window": 10.0}, {"window": 5.0}, {"window_calls": 4}, {"window_calls": 7}]
    )
    ratio = st.fixed_dictionaries(
        {"failure_ratio": st.sampled_from([0.3, 0.5, 1.0]), "min_calls": st.integers(1, 4)}
    )
    slow = st.fixed_dictionaries(
        {
            "slow_after": st.sampled_from([0.5, 1.0, 2.0]),
            "slow_ratio": st.sampled_from([0.5, 0.75]),
            "min_calls": st.integers(1, 4),
        }
    )
    streak = st.fixed_dictionaries({"consecutive": st.integers(1, 3)})

    def merged(*parts):
        return st.tuples(*parts).map(lambda made: {k: v for part in made for k, v in part.items()})

    return st.one_of(
        streak,
        merged(ratio, window),
        merged(slow, window),
        merged(ratio, slow, window),
        merged(ratio, slow, streak, window),
    )


REST = st.fixed_dictionaries(
    {
        "break_for": st.sampled_from([1.0, 2.5, growing(0.5, cap=4.0)]),
        "probes": st.sampled_from(
            [
                single_probe(),
                n_of_m(1, 2),
                n_of_m(2, 3),
                ramp((0.25, 0.5), step=1.5),
                ramp((0.5,), step=0.5),
                slow_start(),
                slow_start(step=1.5),
            ]
        ),
        "probe_timeout": st.sampled_from([1.5, 6.0]),
    }
)


VERDICTS = st.sampled_from(
    [CallVerdict.FAILURE, CallVerdict.FAILURE, CallVerdict.SUCCESS, CallVerdict.NONE]
)


class Agreement(RuleBasedStateMachine):
    """Three breakers and one history."""

    world: World

    @initialize(rules=some_rules(), rest=REST)
    def begin(self, rules: dict[str, Any], rest: dict[str, Any]) -> None:
        """Make the three, under the same settings, at the same instant."""
        self.world.begin()
        self.clock = self.world.clock
        self.flying: list[tuple[Any, Any, Any]] = []
        self.retried: list[tuple[CallCount, CallCount, CallCount]] = []
        options = {**rules, **rest}
        self.model = BreakerModel(BreakerSettings(**options))
        self.local = Breaker(**options)
        self.guard = new_guard(self.local, clock=self.clock)
        self.gate = bindings_of(self.local)[0].layer("sync")
        (self.pod,) = self.world.add(**options)

    def teardown(self) -> None:
        """Free the names."""
        self.world.end()
        if hasattr(self, "guard"):
            self.guard.close()

    @rule(quarters=st.integers(1, 16))
    def wait(self, quarters: int) -> None:
        """Let time pass, everywhere."""
        self.world.pass_time(quarters / 4)

    @precondition(lambda self: self.model.state is BreakerState.OPEN)
    @rule()
    def wait_out_the_break(self) -> None:
        """Let the break pass, to the very instant."""
        self.world.pass_time(self.model.retry_after(self.clock.now()))

    @rule(verdicts=st.lists(VERDICTS, min_size=1, max_size=4))
    def call(self, verdicts: list[CallVerdict]) -> None:
        """Make calls, one after the other."""
        for verdict in verdicts:
            if self.offer():
                self.end(self.flying.pop(), verdict)

    @rule(calls=st.integers(1, 4))
    def admit(self, calls: int) -> None:
        """Offer calls, and leave them running."""
        for _ in range(calls):
            self.offer()

    def offer(self) -> bool:
        """Offer a call; tell whether it was admitted."""
        now = self.clock.now()
        self.pod.flush(notice=True)
        answer = self.model.admit(now)
        local, shared = entered(self.gate, now), self.pod.enter()
        self.pod.flush()
        if isinstance(answer, BreakerRefusal):
            assert isinstance(local, CircuitOpen)
            assert isinstance(shared, CircuitOpen)
            assert local.retry_after == shared.retry_after == answer.retry_after
            assert str(local).replace(self.guard.name, self.pod.guard.name) == str(shared)
            return False
        assert not isinstance(local, CircuitOpen)
        assert not isinstance(shared, CircuitOpen)
        self.flying.append((answer, local, shared))
        return True

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 20), verdict=VERDICTS)
    def settle(self, which: int, verdict: CallVerdict) -> None:
        """End a call that was left running."""
        self.end(self.flying.pop(which % len(self.flying)), verdict)

    def end(self, tickets: tuple[Any, Any, Any], verdict: CallVerdict) -> None:
        """End a call."""
        now = self.clock.now()
        ticket, local, shared = tickets
        if isinstance(ticket, Tracked) and ticket.generation == self.model.generation:
            self.pod.flush(notice=True)
        self.model.settle(ticket, verdict, now)
        self.gate.leave(local, OUTCOMES[verdict], None, now)
        self.pod.leave(shared, verdict)
        self.pod.flush()

    @rule(which=st.integers(0, 4), verdict=VERDICTS)
    def attempt(self, which: int, verdict: CallVerdict) -> None:
        """Make an attempt of a call: of a new one, or of one of those that have made some."""
        if not self.offer():
            return
        if which >= len(self.retried):
            self.retried.append((CallCount(), CallCount(), CallCount()))
            which = -1
        now = self.clock.now()
        for owner, ticket, count in zip(
            (self.model, self.gate, self.pod.gate),
            self.flying.pop(),
            self.retried[which],
            strict=True,
        ):
            if owner is self.model:
                owner.settle(ticket, verdict, now, count)
            else:
                owner.attempted(ticket, OUTCOMES[verdict], None, now, count, defer=False)
        self.pod.flush()

    @precondition(lambda self: self.retried)
    @rule(which=st.integers(0, 4))
    def begin_to_answer(self, which: int) -> None:
        """Let a call that has made attempts begin to answer: it has not failed, so far."""
        now = self.clock.now()
        model, local, shared = self.retried[which % len(self.retried)]
        self.model.retract_failure(model, now)
        self.gate.begun(None, now, local)
        self.pod.gate.begun(None, now, shared)
        self.pod.flush()

    @rule(command=st.sampled_from(["isolate", "close", "trip", *[""] * 24]))
    def order(self, command: str) -> None:
        """Do something by hand, now and then."""
        if not command:
            return
        getattr(self.model, command)(self.clock.now())
        getattr(self.local, command)()
        getattr(self.pod.breaker, command)()
        self.pod.flush()

    @invariant()
    def same_state(self) -> None:
        """See that all three are in one state, and have counted the same."""
        if not hasattr(self, "model"):
            return
        now = self.clock.now()
        assert self.pod.mirror.away is None, "alone it would agree with itself"
        assert self.local.state == self.pod.state == self.model.state.value
        own, theirs = self.model.snapshot(now), self.pod.mirror.snapshot(now)
        assert theirs["consecutive_opens"] == own["consecutive_opens"]
        assert theirs["retry_after"] == own["retry_after"]

    @precondition(lambda self: self.pod.state == "closed")
    @rule()
    def same_counts(self) -> None:
        """See that the store has counted what the model has."""
        self.pod.flush(poll=True)
        own = self.model.snapshot(self.clock.now())
        theirs = self.pod.mirror.snapshot(self.clock.now())
        for name in ("calls", "failures", "slow"):
            assert theirs[f"shared_{name}"] == own[name], name


def run(redis_url: str, client: redis.Redis, histories: int = 500, **how: Any) -> None:
    """Run the machine on many histories; raises where the three disagree."""
    with quiet_world(redis_url, client) as world:
        machine: Any = type("Agreement", (Agreement,), {"world": world})
        options = settings(max_examples=histories, stateful_step_count=20, deadline=None, **how)
        run_state_machine_as_test(machine, settings=options)


@pytest.mark.timeout(180)
def test_model_memory_and_store_agree(redis_url, client):
    """The pure model, the gate in memory and the shared one say the same to every call."""
    run(redis_url, client)


MUTANTS = {
    "one probe too many": ("+ at.failed < plan[2]", "+ at.failed <= plan[2]"),
    "calls are forgotten too early": ("bucket[1] > newest - 10", "bucket[1] > newest - 6"),
    "a failure is not withdrawn": (
        "bucket[3] + has_failed(after) - has_failed(before)",
        "bucket[3] + has_failed(after) * (1 - has_failed(before))",
    ),
    "a cancelled probe of a ramp keeps its permit": (
        "at.admitted = at.admitted - (stage == at.stage and 1 or 0)",
        "at.admitted = at.admitted",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_script_is_noticed(mutant, redis_url, client, monkeypatch):
    """A mistake in the Lua makes the three disagree."""
    mutate(monkeypatch, "breaker", *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        # It ends with the first history that shows the mistake: some are rare.
        run(redis_url, client, 5000, phases=[Phase.generate], report_multiple_bugs=False)
