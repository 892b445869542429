"""A pod for tests: a member of a group in a shared store, until its standard input ends.

It prints what it notices of others, and its own pauses, as lines of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from seawall import RedisStore, subscribe
from seawall.events import OwnPause
from seawall.members import Heartbeats, fixed_timeout


def report(**facts: Any) -> None:
    """Print a line, at once."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(url: str, prefix: str, own: str) -> None:
    """Be a member called `own`."""
    subscribe(lambda event: report(paused=event.seconds), OwnPause)
    with RedisStore(url, prefix=prefix, timeout=2.0) as store:
        beats = Heartbeats(
            "pods",
            shared=store,
            own=own,
            every=0.25,
            timeout=2.0,
            detector=fixed_timeout(4.0),
            confirm_after=3.0,
            pause_after=3.0,
        )
        beats.subscribe(lambda change: report(change=f"{change.member} {change.after}"))
        with beats:
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
