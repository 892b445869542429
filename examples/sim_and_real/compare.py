"""A service simulated, and the same service run for real: goodput and p99 of both.

    python examples/sim_and_real/compare.py

For real means: the service and its vendor under uvicorn and the clients, each in a process of its
own, for 60 s each of calm, an outage of the vendor, and a surge. What one request costs in HTTP and
Python is measured by requests that the vendor answers at once, just before each run, and is the
delay of the simulated networks. Nothing else is fitted.
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from service import make_app
from vendor import WORKERS, Script

from seawall.clock import SYSTEM
from seawall.sim import Latency, SimulationResult, World, asgi
from seawall.sim.services import pause

HERE = Path(__file__).resolve().parent
SECONDS = 60.0
CALIBRATION = 10.0
RATE = 6.0
NEVER = (inf, inf)


class Scenario(NamedTuple):
    """What happens in the 60 seconds."""

    down: tuple[float, float] = NEVER
    """From when to when the vendor refuses all calls."""
    surge: tuple[float, float] = NEVER
    """From when to when clients come `factor` times as often."""
    factor: float = 4.0


SCENARIOS = {
    "calm": Scenario(),
    "outage": Scenario(down=(20.0, 35.0)),
    "surge": Scenario(surge=(20.0, 40.0)),
}


class Seen(NamedTuple):
    """What clients saw."""

    goodput: float
    """Real answers a second."""
    p99: float
    """Seconds, of the real answers."""


def simulate(scenario: Scenario, overhead: Sequence[float], seconds: float = SECONDS) -> Seen:
    """Run the service on virtual time; `overhead` are seconds of requests that do nothing."""
    with World(seed=1) as world:
        # A request crosses two networks, there and back.
        network = world.network(delay=Latency.measured([each / 4 for each in overhead]))
        script = Script()

        async def work(key: int) -> None:
            await pause(script.seconds(key))

        vendor = world.service("vendor", workers=WORKERS, handler=work, network=network)
        api = world.service("api", handler=asgi(make_app(vendor.acall)), network=network)
        numbers = count()
        clients = world.clients(
            "clients", api.acall, rate=RATE, even=True, keys=lambda _rng: next(numbers)
        )
        for (since, until), change in (
            (scenario.down, vendor.down()),
            (scenario.surge, clients.surge(scenario.factor)),
        ):
            if since < inf:
                world.at(since, change, lasts=until - since)
        result: SimulationResult = world.run(seconds=seconds)
    return Seen(result.goodput(), result.quantile(0.99))


def run_for_real(scenario: Scenario, seconds: float = SECONDS) -> tuple[Seen, list[float]]:
    """Run the service on loopback; return what clients saw, and the overhead of a request."""
    with _served("vendor") as vendor, _served("service", VENDOR_URL=vendor) as service:
        httpx.get(service, headers={"key": "-1"}, timeout=60.0)
        plan = {"url": service, "rate": RATE, "surge": (*NEVER, 1.0), "began": _soon()}
        idle = _load({**plan, "seconds": CALIBRATION, "numbered": False})
        plan |= {"surge": (*scenario.surge, scenario.factor), "began": _soon()}
        down = [plan["began"] + at for at in scenario.down]
        httpx.get(vendor, headers={"down": json.dumps(down)})
        ended = _load({**plan, "seconds": seconds, "numbered": True})
    took = sorted(each["seconds"] for each in ended if each["outcome"] == "ok")
    seen = Seen(len(took) / seconds, took[int(0.99 * len(took))])
    return seen, [each["seconds"] for each in idle]


def _soon() -> float:
    """Return when clients begin to come: by then their process has started."""
    return SYSTEM.now() + 10.0


@contextmanager
def _served(module: str, **environment: str) -> Iterator[str]:
    """Serve one of the apps in a process of its own; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        command = [sys.executable, "-m", "uvicorn", f"{module}:make_real", "--factory"]
        command += ["--fd", str(number), "--app-dir", str(HERE), "--log-level", "warning"]
        server = subprocess.Popen(  # noqa: S603 - our own command
            command, env=os.environ | environment, pass_fds=[number]
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.terminate()
            try:
                server.wait(10)
            finally:
                server.kill()
                server.wait()


def _load(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Let clients come, from a process of their own."""
    command = [sys.executable, str(HERE / "load.py"), json.dumps(plan)]
    lines = subprocess.check_output(command, text=True).splitlines()  # noqa: S603 - our own
    return [json.loads(line) for line in lines]


def difference(simulated: float, real: float) -> float:
    """Return how far the simulation is off, as a share of what is real."""
    return simulated / real - 1


def main() -> None:
    """Print the table."""
    print(f"{'':8}{'':10}{'simulated':>12}{'real':>12}{'difference':>12}")
    for name, scenario in SCENARIOS.items():
        real, overhead = run_for_real(scenario)
        simulated = simulate(scenario, overhead)
        for word, unit, a, b in (
            ("goodput", "/s", simulated.goodput, real.goodput),
            ("p99", " s", simulated.p99, real.p99),
        ):
            off = f"{100 * difference(a, b):+.1f} %"
            print(f"{name:8}{word:10}{a:10.3f}{unit}{b:10.3f}{unit}{off:>12}", flush=True)
        print(f"{'':8}a request that does nothing took {1000 * median(overhead):.0f} ms")


if __name__ == "__main__":
    main()
