"""Warm-up steps that a service runs before it is ready."""

from __future__ import annotations

from asyncio import timeout as time_limit
from collections.abc import Callable
from random import SystemRandom
from typing import Any, Final, Literal, TypeAlias

from seawall import _checks as check
from seawall._failures import described
from seawall.models.backoff import exponential
from seawall.runtime.driver import sleep_async
from seawall.web.registered_calls import RegisteredCall, legible

StepFunction: TypeAlias = Callable[[], Any]
OnFailure: TypeAlias = Literal["retry", "ignore", "fail"]

PAUSES: Final = exponential(0.5, cap=30.0, jitter="equal")
"""Pauses between attempts, with jitter: pods that start together must not retry together."""


class WarmUpStep:
    """One warm-up step, and whether it is done."""

    __slots__ = ("_call", "done", "name", "on_failure", "timeout", "tries")

    def __init__(self, function: StepFunction, timeout: float, on_failure: OnFailure) -> None:
        """Validate the arguments."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = legible(str(name)).rpartition("<locals>.")[2]
        self._call = RegisteredCall(
            self.name, function, "a function without arguments, def or async def"
        )
        self.timeout = check.seconds("timeout", timeout)
        self.on_failure = check.choice("on_failure", on_failure, ("retry", "ignore", "fail"))
        self.done = False
        self.tries = 0

    async def take(self) -> None:
        """Run the step, within its timeout."""
        self.tries += 1
        async with time_limit(self.timeout):
            await self._call()


async def warm(step: WarmUpStep, service: str) -> None:
    """Run `step` as often as its `on_failure` says; raise only if it must fail the start."""
    for pause in PAUSES.delays(SystemRandom().random):
        try:
            await step.take()
        except Exception as error:
            _tell(step, service, error)
            if step.on_failure == "fail":
                raise RuntimeError(f"warm-up step {step.name!r} failed") from error
            if step.on_failure == "ignore":
                break
            await sleep_async(pause)
        else:
            break
    step.done = True


def _tell(step: WarmUpStep, service: str, error: Exception) -> None:
    import logging

    logging.getLogger("seawall").warning(
        "service %r: warm-up step %r failed (try %d): %s",
        service, step.name, step.tries, described(error),
    )  # fmt: skip
