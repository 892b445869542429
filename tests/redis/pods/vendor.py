"""A vendor, as a process of its own: answers lines, fails when told to, and logs what reached it.

    ask <account> <pod> <asked>    "yes" or "no"; `asked` is when the pod asked its guard
    fail <account>, heal <account> what it answers from now on; "done"
    log <account>                  JSON: for each request [arrived, answered, asked, pod, ok]

All times are those of the machine's monotonic clock, which is one clock for all processes. It
prints its port, takes `argv[1]` seconds for an answer, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict

from seawall.clock import SYSTEM


class Vendor:
    """What it answers, and what it has seen."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._failing: set[str] = set()
        self._logs: defaultdict[str, list[list[float | str | bool]]] = defaultdict(list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the lines of one connection, in order."""
        try:
            while line := await reader.readline():
                arrived = SYSTEM.now()
                word, account, *rest = line.decode().split()
                if word == "ask":
                    answer = await self._ask(account, arrived, *rest)
                elif word == "log":
                    answer = json.dumps(self._logs[account])
                else:
                    {"fail": self._failing.add, "heal": self._failing.discard}[word](account)
                    answer = "done"
                writer.write(f"{answer}\n".encode())
                await writer.drain()
        except ConnectionError:
            pass  # a pod was killed
        finally:
            writer.close()

    async def _ask(self, account: str, arrived: float, pod: str, asked: str) -> str:
        if self._latency:
            await asyncio.sleep(self._latency)  # noqa: TID251 - a process in real time
        ok = account not in self._failing
        self._logs[account].append([arrived, SYSTEM.now(), float(asked), pod, ok])
        return "yes" if ok else "no"


async def main() -> None:
    """Serve until standard input ends."""
    vendor = Vendor(float(sys.argv[1]))
    server = await asyncio.start_server(vendor.serve, "127.0.0.1", 0, limit=2**20)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
