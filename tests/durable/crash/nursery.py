"""A process that has imported everything and forks others, which a test then kills.

It is told on its standard input, a line of JSON for each child, and says the child's process id on
its standard output. Children write a byte to a pipe at each of their steps: so a test can kill one
after any number of steps, without waiting for time to pass.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from seawall.durable._connections import Connection
from tests.durable.crash import shop

_text = Connection._text


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
        steps = told.pop("steps")

        def step() -> None:
            os.write(steps, b".")

        def noted(self: Connection, asked: Any) -> Any:
            step()
            return _text(self, asked)

        Connection._text = noted  # type: ignore[method-assign]
        asyncio.run(getattr(shop, told.pop("role"))(step=step, **told))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
