"""The dashboard at 200 guards and 20 pods: what one update costs the pod that shows the page.

    .venv/bin/python -m bench.dashboard

The guards of this process are real and called between updates; the views of the other pods are
synthetic, packed as the store would hand them over, and each of their numbers is another one at
each update.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from statistics import median
from typing import Any

from seawall import Guard
from seawall.dashboard import Dashboard
from seawall.dashboard._pods_wire import Reply, Told, arranged, pack
from seawall.dashboard._watcher import Watcher
from seawall.dashboard.pods import StorePods

GUARDS, PODS, UPDATES = 200, 20, 30
MOST_MS = 20.0
RNG = Random(1)


class Others(StorePods):
    """The other pods, as a store tells them: without the store."""

    def __init__(self, view: Any, pods: int) -> None:
        """Have so many pods like `view`."""
        self._view, self._pods, self._turn = view, pods, 0
        self._known = {}
        self._reply = Reply(0, 0, [])
        self.cost = 0.0
        self.reading: list[float] = []

    def __repr__(self) -> str:
        return f"<Others: {self._pods}>"

    def turn(self) -> None:
        """Let each pod tell its next view, with other numbers."""
        self._turn += 1
        told = []
        for place in range(1, self._pods + 1):
            guards = [
                {**guard, "rates": {name: RNG.random() * 9 for name in guard["rates"]}}
                for guard in self._view["guards"]
            ]
            pod = {**self._view["pod"], "name": f"pod-{place:02}"}
            at = self._view["at"] + self._turn
            view = {**self._view, "pod": pod, "guards": guards, "at": at}
            told.append(Told(f"id-{place}", self._turn * 1_000_000, pack(view, 1.0)))
        self._reply = Reply(self._turn * 1_000_000, self._pods, told)

    async def views(self) -> list[Any]:
        """Return what they told, as it is read from a store."""
        began = time.thread_time()
        seen, _unread = await self._read(self._reply)
        views = arranged(seen, self._reply.now, None)
        self.reading.append(time.thread_time() - began)
        return views


async def main() -> None:
    """Measure, and print."""
    guards = [
        Guard.standard(f"guard-{place:03}", on=OSError, timeout=2.0, sync="cooperative")
        for place in range(GUARDS)
    ]
    watcher = Watcher(pod="pod-00")

    def call_all() -> None:
        for guard in guards:
            for _ in range(3):
                guard.call(int)

    call_all()
    watcher.sample()
    call_all()
    others = Others(watcher.sample(), PODS - 1)
    others.turn()
    dashboard = Dashboard(local=True, pods=others, every=3600.0)
    live = dashboard._live()  # noqa: SLF001 - one update is measured, not a whole second
    live._checked = True  # noqa: SLF001 - as those from a store are
    live.look()
    await live.first()
    sizes, costs, samples = [], [], []
    for _ in range(UPDATES):
        call_all()
        others.turn()
        began = time.process_time()
        live.watcher.sample()
        samples.append(time.process_time() - began)
        live.look()
        began = time.process_time()
        await live._sample()  # noqa: SLF001 - see above
        frame = live.broadcast.frame
        assert frame is not None
        message = await frame.message(None)
        costs.append(time.process_time() - began)
        sizes.append(len(message))
    spent = median(costs) * 1e3
    print(
        f"{GUARDS} guards, {PODS} pods: one update {spent:.1f} ms of CPU (at most {MOST_MS:.0f}),"
    )
    print(f"  of which the sample of this pod {median(samples) * 1e3:.1f} ms,")
    print(f"  reading the other pods {median(others.reading) * 1e3:.1f} ms,")
    print(f"  a message of {median(sizes) // 1000:.0f} kB")
    await dashboard.aclose()


if __name__ == "__main__":
    asyncio.run(main())
