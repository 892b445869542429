"""What a stack does to a failing dependency: the load it makes, and the share of served calls.

The stack's own Retry and Breaker, as new ones with the same settings, run calls that arrive evenly
and whose attempts fail at random. Time is virtual and the randomness is seeded: the same stack
always gets the same numbers. Policies whose effect depends on how long calls take (timeouts, slots,
hedges), and rate limits, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.clock import VirtualClock
from seawall.events.bus import muted
from seawall.policies.breaker import Breaker
from seawall.policies.retry import Retry, RetryBudget
from seawall.runtime.call import Call
from seawall.runtime.interpreter import Request, RunFunction, interpret
from seawall.runtime.layers import Layer

if TYPE_CHECKING:
    from collections.abc import Generator

    from seawall.clock import Clock
    from seawall.runtime.layers import Host
    from seawall.runtime.policy import Policy

FAILING: Final = (0.1, 0.3, 0.6, 1.0)
RATE: Final = 20  # calls per second
SECONDS: Final = 40
SEED: Final = 7


class Forecast(NamedTuple):
    """What happens to the calls if a share `failing` of the attempts fails."""

    failing: float
    load: float  # attempts that reach the dependency, per call
    served: float  # the share of calls that the dependency answers

    def __str__(self) -> str:
        return f"{self.failing:4.0%} fail: load {self.load:.2f} x, {self.served:.0%} served"


class _Failure(Exception):
    """The failure of an attempt."""


MakeHost = Callable[[tuple["Policy", ...], "Clock", Random], tuple["Host", list[Layer]]]
"""Makes the host and layers of such a stack, from the policies, a clock and a generator."""


def forecasts(policies: Sequence[Policy], make_host: MakeHost) -> list[Forecast]:
    """Return the forecast for each share of failures; nothing without Retry and Breaker."""
    if not any(isinstance(policy, (Retry, Breaker)) for policy in policies):
        return []
    return [_run(tuple(_copies(policies)), make_host, failing) for failing in FAILING]


def _copies(policies: Sequence[Policy]) -> list[Policy]:
    copies: list[Policy] = []
    for policy in policies:
        if isinstance(policy, Retry):
            budget = None if policy.budget is None else RetryBudget(policy.budget.rule.fresh())
            copies.append(
                Retry(on=_Failure, attempts=policy.attempts, backoff=policy.backoff, budget=budget)
            )
        elif isinstance(policy, Breaker):
            copies.append(Breaker(**vars(policy.settings), counts=policy.counts))
    return copies


def _run(policies: tuple[Policy, ...], make_host: MakeHost, failing: float) -> Forecast:
    clock = VirtualClock()
    rng = Random(SEED)  # noqa: S311 - a forecast is no secret
    host, layers = make_host(policies, clock, rng)
    calls = RATE * SECONDS
    attempts = served = 0
    order = count()
    due: list[tuple[float, int, Call, Generator[Request, Any, None], Context]] = []
    for number in range(calls):
        call = Call(host, layers, lambda: None, (), {}, number / RATE)
        heappush(due, (number / RATE, next(order), call, interpret(call), Context()))
    while due:
        now, _, call, steps, context = heappop(due)
        clock.advance_to(now)
        try:
            request = context.run(_step, steps, None)
            while isinstance(request, RunFunction):
                attempts += 1
                failure = _Failure() if rng.random() < failing else None
                request = context.run(_step, steps, failure)
        except StopIteration:
            served += call.error is None
        else:
            assert isinstance(request, float)  # noqa: S101 - no gate here ever waits
            heappush(due, (now + request, next(order), call, steps, context))
    return Forecast(failing, attempts / calls, served / calls)


def _step(steps: Generator[Request, Any, None], failure: _Failure | None) -> Request:
    with muted():
        return steps.send(None) if failure is None else steps.throw(failure)
