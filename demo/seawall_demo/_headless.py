"""The demo without a page: one phase after another, then a table and a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from seawall.clock import SYSTEM
from seawall_demo._settings import SIDES, pause
from seawall_demo._supervisor import Demo, PipelineDemo
from seawall_demo._table import PHASES, Phase, duration, groups, table, verdict


async def run(demo: Demo, seconds: float, say: Callable[[str], None]) -> int:
    """Run all phases in that time, print the results, and return the exit status."""
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
    results = await demo.finish(groups())
    contained, words = verdict(results)
    sys.stdout.write(f"{table(results)}\n\n{words}\n")
    return 0 if contained else 1


def _show(demo: Demo, phase: Phase, left: float) -> None:
    """Show the progress in the last line of the terminal."""
    sides = []
    for side in SIDES:
        now = demo.recent.get(side)
        if now is not None:
            sides.append(f"{side} {now['error']:.0%} errors, p99 {duration(now['p99'])}")
    sys.stderr.write(f"\r\x1b[K{phase.name}, {left:.0f} s left: {'; '.join(sides)}")
    sys.stderr.flush()


async def run_pipeline(demo: PipelineDemo, seconds: float, say: Callable[[str], None]) -> int:
    """Break one thing after the other, print the outcomes of items, and return the exit status.

    It is 0 if each item that was read has ended, and some of them in the database.
    """
    each = seconds / (2 * len(demo.switches))
    lines = [_COLUMNS.format("while", "read", "stored", "degraded", "dead letters")]
    for switch in demo.switches:
        say(f"{switch.title}, for {each:.1f} s")
        before = demo.account
        await demo.switch(switch.name, on=True)
        await pause(each)
        await demo.switch(switch.name, on=False)
        await pause(each)
        grown = {name: count - before.get(name, 0) for name, count in demo.account.items()}
        lines.append(_row(switch.title, grown))
    account = await demo.finish()
    lines.append(_row("in all", account))
    ended = sum(account[name] for name in ("sink", "dead_letter", "dropped", "returned"))
    lost = account["read"] - ended
    words = (
        f"{account['read']} samples were read: {account['sink']} are stored,"
        f" {account['degraded']} of them degraded, {account['dead_letter']} are dead letters,"
        f" {account['returned']} were returned at the end, {lost} are lost."
    )
    sys.stdout.write("\n".join(lines) + f"\n\n{words}\n")
    return 0 if lost == 0 and account["sink"] else 1


_COLUMNS: Final = "{:>20} {:>6} {:>7} {:>9} {:>13}"


def _row(title: str, account: dict[str, int]) -> str:
    names = ("read", "sink", "degraded", "dead_letter")
    return _COLUMNS.format(title, *(account.get(name, 0) for name in names))
