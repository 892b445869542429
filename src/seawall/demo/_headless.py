"""The demo without a page: phase after phase, a table and a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable

from seawall.clock import SYSTEM
from seawall.demo._settings import SIDES, pause
from seawall.demo._supervisor import Demo
from seawall.demo._table import PHASES, Phase, duration, groups, table, verdict


async def run(demo: Demo, seconds: float, say: Callable[[str], None]) -> int:
    """Run all phases in that time, print what came of them, and return the exit status."""
    live = sys.stderr.isatty()
    for phase in PHASES:
        demo.phase(phase.name)
        if phase.broken is not None:
            await demo.switch(phase.broken, on=True)
        if not live:
            say(f"{phase.name}, for {phase.share * seconds:.1f} s")
        until = SYSTEM.now() + phase.share * seconds
        while (left := until - SYSTEM.now()) > 0:
            if live:
                _show(demo, phase, left)
            await pause(min(left, 1.0))
        await demo.all_well()
    if live:
        sys.stderr.write("\r\x1b[K")
    told = await demo.finish(groups())
    contained, words = verdict(told)
    sys.stdout.write(f"{table(told)}\n\n{words}\n")
    return 0 if contained else 1


def _show(demo: Demo, phase: Phase, left: float) -> None:
    """Write how it goes into the last line of the terminal."""
    sides = []
    for side in SIDES:
        now = demo.recent.get(side)
        if now is not None:
            sides.append(f"{side} {now['error']:.0%} errors, p99 {duration(now['p99'])}")
    sys.stderr.write(f"\r\x1b[K{phase.name}, {left:.0f} s left: {'; '.join(sides)}")
    sys.stderr.flush()
