"""How long an import takes, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import seawall
from bench.cases import OURS

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURE = "asyncio"
"""What the others are measured by."""

IN_USE = f"{OURS}, with its policies"
"""`import seawall` alone loads no policy: each name is loaded when it is first used. So what a
service really loads is measured too, here and of the others: the names that the cases use."""

STATEMENTS: dict[str, str] = {
    MEASURE: "import asyncio",
    OURS: "import seawall",
    IN_USE: "from seawall import Breaker, Bulkhead, Guard, Retry, Timeout",
    "tenacity": "from tenacity import retry, retry_if_exception_type, stop_after_attempt",
    "stamina": "from stamina import retry",
    "backoff": "from backoff import expo, on_exception",
    "circuitbreaker": "from circuitbreaker import circuit",
    "pybreaker": "from pybreaker import CircuitBreaker",
    "purgatory": "from purgatory import AsyncCircuitBreakerFactory, SyncCircuitBreakerFactory",
    "hyx": "import hyx.bulkhead, hyx.circuitbreaker, hyx.retry, hyx.timeout",
    "pyresilience": "from pyresilience import RetryConfig, resilient",
    "anyio": "from anyio import fail_after",
}

_SCRIPT = """\
import sys, time
sys.path.append(sys.argv[1])
begin = time.{clock}()
{statement}
print(time.{clock}() - begin)
"""

_CLOCKS = {"cpu": "process_time", "wall": "perf_counter"}


class Plan(NamedTuple):
    """How thoroughly to measure."""

    rounds: int = 21
    seed: int = 1
    clock: str = "cpu"


def import_time(statement: str, clock: str) -> float:
    """Return the seconds that `statement` takes in a fresh interpreter."""
    # Isolated: neither the environment's variables nor the current folder lead anywhere.
    script = _SCRIPT.format(clock=_CLOCKS[clock], statement=statement)
    source = Path(seawall.__file__).parent.parent
    command = [sys.executable, "-I", "-c", script, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed
    return float(done.stdout)


def measure(
    plan: Plan, progress: Callable[[str], None], statements: dict[str, str] = STATEMENTS
) -> dict[str, list[float]]:
    """Return the seconds of each import, by round; interleaved in an order drawn from a seed."""
    for statement in statements.values():
        import_time(statement, plan.clock)  # the first compiles, and fills the disk's cache
    times: dict[str, list[float]] = {name: [] for name in statements}
    chance = Random(plan.seed)
    for number in range(1, plan.rounds + 1):
        progress(f"imports, round {number} of {plan.rounds}")
        for name in chance.sample(list(statements), len(statements)):
            times[name].append(import_time(statements[name], plan.clock))
    return times
