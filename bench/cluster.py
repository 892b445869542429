"""Real processes in one cluster on the loopback: what each costs, and how soon a crash is known.

    python -m bench.cluster                                   # 50 processes, ten minutes
    python -m bench.cluster --processes 50 --minutes 1

starts the processes, lets them find each other, measures the processor time and the memory of each
for a while, kills five of them with SIGKILL, and asks the others when they suspected and confirmed
these. It fails if a limit is missed: five crashes known to all within 6 s, 2 % of a core and 40 MiB
for each process, and no growth.

A crash is known when the member is suspected or confirmed. With the `lan()` preset a group of 50
confirms after 4 * log10(50) = 6.8 s at the earliest, so that is printed beside it; the preset
`quick` has half the interval, and confirms within the limit too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

VICTIMS = 5
KNOWN_WITHIN = 6.0
MOST_CPU = 0.02
MOST_MEMORY = 40 * 2**20
MOST_GROWTH = 2 * 2**20
"""Bytes by which a process may differ between the first quarter and the end: noise."""

MOST_FILES = 16
"""Files by which a process may differ: connections for exchanges come and go."""

SETTLING = 10.0
"""Seconds before anything is measured: the group forms, and everybody has heard of everybody."""

ROOT = Path(__file__).resolve().parents[1]


# In each process


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _member(config: dict[str, Any]) -> None:
    """Be a member; answer each line of the input with a line about what is known."""
    before = _memory()  # with asyncio, and without Seawall
    from seawall.members import Cluster, SwimSettings, lan, local

    presets = {"lan": lan, "local": local, "quick": _quick}
    chosen = config.get("settings", "lan")
    preset = SwimSettings(**chosen) if isinstance(chosen, dict) else presets[chosen]()
    changes: list[list[Any]] = []
    cluster = Cluster(
        config["group"],
        member=config["member"],
        bind="127.0.0.1:0",
        seeds=config.get("seeds", []),
        preset=preset,
        tcp_only=config.get("tcp_only", False),
    )
    cluster.subscribe(
        # The clock is that of the machine, so instants of processes can be compared.
        lambda one: changes.append([one.member, one.after, one.by, time.monotonic()])
    )
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(os.read(0, 4096)))
    async with cluster:
        print(json.dumps({"address": cluster.address}), flush=True)
        while await lines.get():  # until the input ends
            shown = cluster.snapshot()
            answer = {
                "alive": cluster.alive,
                "changes": changes,
                "cpu": time.process_time(),
                "at": time.monotonic(),
                "memory": _memory() - before,
                "files": _files(),
                **{key: shown[key] for key in ("counts", "messages", "bytes", "health_score")},
            }
            print(json.dumps(answer), flush=True)


def _quick() -> Any:
    from seawall.members import SwimSettings

    return SwimSettings(
        interval=0.5, timeout=0.2, suspicion_multiplier=3, gossip_interval=0.1, pause=5.0
    )


# In the process that measures


class Process:
    """One member in a process of its own."""

    def __init__(self, member: str, **config: Any) -> None:
        """Start it and wait until it listens."""
        self.name = member
        # Other processes that run this may get ports that were used here: they are strangers.
        described = {"group": f"bench {os.getpid()}", "member": member, **config}
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [
                sys.executable,
                "-m",
                "bench.cluster",
                "--member",
                json.dumps(described),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        self.address: str = self._read()["address"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """End it, whatever state it is in."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def look(self) -> dict[str, Any]:
        """Return what it knows."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"look\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended: {self._process.wait()}")
        return dict(json.loads(line))


def started(stack: ExitStack, size: int, **config: Any) -> list[Process]:
    """Start `size` members, whose seeds are the first three."""
    members: list[Process] = []
    for number in range(size):
        seeds = [one.address for one in members[:3]]
        members.append(stack.enter_context(Process(f"m{number}", seeds=seeds, **config)))
    return members


def _looks(members: list[Process]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(Process.look, members))


def _until_complete(members: list[Process], limit: float) -> float:
    """Wait until everybody knows everybody; return the seconds that took."""
    began = time.monotonic()
    while any(len(look["alive"]) != len(members) for look in _looks(members)):
        if time.monotonic() - began > limit:
            raise TimeoutError("the members do not find each other")
        time.sleep(0.5)
    return time.monotonic() - began


def _costs(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[float]:
    for one, other in zip(before, after, strict=True):
        yield (other["cpu"] - one["cpu"]) / (other["at"] - one["at"])


def _reached(looks: list[dict[str, Any]], victims: set[str], states: set[str], t0: float) -> float:
    """Return the seconds after which the last member had seen each victim in one of `states`."""
    worst = 0.0
    for look in looks:
        for victim in victims:
            seen = [
                at
                for member, after, _by, at in look["changes"]
                if member == victim and after in states and at >= t0
            ]
            worst = max(worst, min(seen, default=float("inf")) - t0)
    return worst


def campaign(size: int, minutes: float, preset: str, *, tcp_only: bool = False) -> bool:
    """Run it and print what was measured; tell whether all limits were kept."""
    with ExitStack() as stack:
        members = started(stack, size, settings=preset, tcp_only=tcp_only)
        formed = _until_complete(members, 60.0)
        print(
            f"{size} processes, preset {preset}: all know all {formed:.1f} s after the last start"
        )
        time.sleep(SETTLING)
        first = _looks(members)
        time.sleep(minutes * 60 / 4)
        quarter = _looks(members)
        time.sleep(minutes * 60 * 3 / 4)
        last = _looks(members)
        costs = sorted(_costs(first, last))
        memory = max(look["memory"] for look in last)
        growth = max(b["memory"] - a["memory"] for a, b in zip(quarter, last, strict=True))
        files = max(b["files"] - a["files"] for a, b in zip(quarter, last, strict=True))
        messages = sum(
            b["messages"]["sent"] - a["messages"]["sent"] for a, b in zip(first, last, strict=True)
        )
        wrong = sum(look["counts"]["suspicions"] for look in last)
        confirmed = sum(look["counts"]["confirmed"] for look in last)
        rate = messages / size / (last[0]["at"] - first[0]["at"])
        print(f"processor: median {costs[size // 2]:.2%}, worst {costs[-1]:.2%} of a core")
        print(f"memory: worst {memory / 2**20:.1f} MiB more, growth {growth / 2**20:+.2f} MiB")
        print(f"open files: {files:+d}; messages: {rate:.1f} a second for each process")
        print(f"suspicions without a crash: {wrong}, confirmed: {confirmed}")
        victims, others = members[-VICTIMS:], members[:-VICTIMS]
        names = {one.name for one in victims}
        t0 = time.monotonic()
        for victim in victims:
            victim.signal(9)
        time.sleep(KNOWN_WITHIN)
        known = _reached(_looks(others), names, {"suspected", "confirmed"}, t0)
        limit = time.monotonic() + 60.0
        sure = float("inf")
        while sure == float("inf") and time.monotonic() < limit:
            sure = _reached(_looks(others), names, {"confirmed"}, t0)
            time.sleep(0.5)
        print(
            f"kill -9 of {VICTIMS}: known to all after {known:.2f} s, confirmed after {sure:.2f} s"
        )
    kept = {
        "processor": costs[-1] <= MOST_CPU,
        "memory": memory <= MOST_MEMORY,
        # Without datagrams a connection to each other member may be open, each way.
        "growth": growth <= MOST_GROWTH and files <= MOST_FILES + 2 * size * tcp_only,
        "crashes": known <= KNOWN_WITHIN,
        "confirmed": sure < float("inf"),
    }
    missed = [name for name, is_kept in kept.items() if not is_kept]
    print(f"missed: {', '.join(missed)}" if missed else "all limits kept")
    return not missed


def main() -> None:
    """Run the campaign, or one process of it."""
    parser = argparse.ArgumentParser(prog="bench.cluster", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--preset", choices=["lan", "local", "quick"], default="lan")
    parser.add_argument("--tcp-only", action="store_true", help="without datagrams")
    arguments = parser.parse_args()
    if arguments.member:
        asyncio.run(_member(json.loads(arguments.member)))
        return
    size, minutes, preset = arguments.processes, arguments.minutes, arguments.preset
    if not campaign(size, minutes, preset, tcp_only=arguments.tcp_only):
        sys.exit(1)


if __name__ == "__main__":
    main()
