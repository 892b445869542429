"""A process that has imported everything and forks others, which a test then kills.

It is told on its standard input, a line of JSON for each child, and says the child's process id on
its standard output. Children tell a pipe each of their steps, and where that is: so a test can kill
one after any number of steps, without waiting for time to pass; and a child can be told to die by
SIGKILL at a step of its own, such as between a commit and the answer, which nobody else could hit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

from seawall.durable.database.connections import Connection
from seawall.durable.database.database import Database
from tests.durable.crash import ledger, shop

PLACES = ("asking", "inside", "committing", "committed", "handled", "known", "failed")
"""Before a statement of ours; before one of the user's; before the commit; after it, while nobody
has been told (of an event: while it is not known to be delivered); after that; and after an error,
before it is tried again."""
RECORD = struct.Struct("=IBB")
"""A step: whose it is, at which place, and whether it is the last one."""

ROLES = {**vars(shop), **vars(ledger)}
_text, _arun = Connection._text, Database.arun


def main() -> None:
    """Fork a child for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if not pid:
            live(told)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def live(told: dict[str, Any]) -> None:
    """Be one of the children, until killed or done."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        step = steps(told.pop("steps"), *told.pop("dies", (None, 0)))

        def noted(self: Connection, asked: Any) -> Any:
            step("asking")
            return _text(self, asked)

        async def noted_run(self: Database, operation: Any) -> Any:
            value = await _arun(self, operation)
            step("committed")
            return value

        Connection._text = noted  # type: ignore[method-assign]
        Database.arun = noted_run  # type: ignore[method-assign]
        asyncio.run(ROLES[told.pop("role")](step=step, **told))
        code = 0
    finally:
        os._exit(code)


def steps(pipe: int, place: str | None, number: int) -> Callable[[str], None]:
    """Return what tells of a step, and dies at that one of that place."""
    own, left = os.getpid(), number

    def step(here: str) -> None:
        nonlocal left
        left -= here == place
        dies = here == place and not left
        os.write(pipe, RECORD.pack(own, PLACES.index(here), dies))
        if dies:
            os.kill(own, signal.SIGKILL)

    return step


if __name__ == "__main__":
    main()
