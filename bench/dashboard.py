"""The dashboard at 200 guards and 20 pods: what one update costs the pod that shows the page.

    .venv/bin/python -m bench.dashboard              # the pod
    .venv/bin/python -m bench.dashboard --browser    # and the page, scrolled in a real browser

The guards of this process are real and called between updates; the views of the other pods are
synthetic, packed as the store would hand them over, and each of their numbers is another one at
each update.
"""

from __future__ import annotations

import asyncio
import sys
import time
from bisect import bisect
from random import Random
from statistics import median
from typing import Any

from seawall import Guard
from seawall.dashboard import Dashboard
from seawall.dashboard.pods.store_pods import StorePods
from seawall.dashboard.pods.wire import PodData, PodsReply, arrange_views, pack
from seawall.dashboard.watcher import Watcher

GUARDS, PODS, UPDATES = 200, 20, 30
MOST_MS = 20.0
RNG = Random(1)


class Others(StorePods):
    """The other pods, as a store tells them: without the store."""

    def __init__(self, view: Any, pods: int) -> None:
        """Have so many pods like `view`."""
        self._view, self._pods, self._turn = view, pods, 0
        self._known = {}
        self._reply = PodsReply(0, 0, [])
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
            told.append(PodData(f"id-{place}", self._turn * 1_000_000, pack(view, 1.0)))
        self._reply = PodsReply(self._turn * 1_000_000, self._pods, told)

    async def views(self) -> list[Any]:
        """Return what they told, as it is read from a store."""
        began = time.thread_time()
        seen, _unread = await self._read(self._reply)
        views = arrange_views(seen, self._reply.now, None)
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
    sampler = dashboard._sampler()  # noqa: SLF001 - one update is measured, not a whole second
    sampler._shared = True  # noqa: SLF001 - as those from a store are
    sampler.record_viewer()
    await sampler.first()
    sizes, costs, samples = [], [], []
    for _ in range(UPDATES):
        call_all()
        others.turn()
        began = time.process_time()
        sampler.watcher.sample()
        samples.append(time.process_time() - began)
        sampler.record_viewer()
        began = time.process_time()
        await sampler._sample()  # noqa: SLF001 - see above
        frame = sampler.broadcast.frame
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


SCROLLED = """async () => {
    const frames = [];
    let last = performance.now(), down = true;
    const until = last + 10000;
    await new Promise((done) => {
        const frame = (now) => {
            frames.push(now - last);
            last = now;
            const end = document.documentElement.scrollHeight - innerHeight;
            if (scrollY >= end - 1) down = false;
            if (scrollY <= 0) down = true;
            scrollBy(0, down ? 40 : -40);
            if (now < until) requestAnimationFrame(frame); else done();
        };
        requestAnimationFrame(frame);
    });
    frames.sort((a, b) => a - b);
    const at = (share) => frames[Math.floor(share * (frames.length - 1))];
    const late = frames.filter((one) => one > 25).length;
    return {frames: frames.length, p50: at(.5), p95: at(.95), p99: at(.99), late};
}"""
"""Scroll up and down for ten seconds; return how long frames took, in milliseconds."""


def cpu_of_frames(traced: list[dict[str, Any]]) -> str:
    """Return how many milliseconds the page's main thread works in a frame, from a trace.

    Unlike the time from frame to frame, it does not depend on what else the machine does.
    """
    main = {
        (one["pid"], one["tid"])
        for one in traced
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    ours = [one for one in traced if (one.get("pid"), one.get("tid")) in main]
    begun = sorted(one["ts"] for one in ours if one["name"] == "FireAnimationFrame")
    starts = [at for place, at in enumerate(begun) if not place or at - begun[place - 1] > 3000]
    spent = [0.0] * (len(starts) + 1)
    for one in ours:
        if one["name"] == "ThreadControllerImpl::RunTask":
            spent[bisect(starts, one["ts"])] += one.get("tdur", 0) / 1000
    frames = sorted(spent[1:-1])
    at = {share: frames[int(share / 100 * (len(frames) - 1))] for share in (50, 95, 99)}
    return ", ".join(f"p{share} {value:.1f} ms" for share, value in at.items())


def scroll() -> None:
    """Serve the same, scroll its page in a browser, and print how long frames take."""
    import shutil
    import threading

    import uvicorn
    from playwright.sync_api import sync_playwright

    guards = [
        Guard.standard(f"page-{place:03}", on=OSError, timeout=2.0, sync="cooperative")
        for place in range(GUARDS)
    ]
    others = Others(Watcher(pod="pod-00").sample(), PODS - 1)
    others.turn()
    over = threading.Event()

    def turn() -> None:
        while not over.wait(1.0):
            for guard in guards:
                guard.call(int)
            others.turn()

    config = uvicorn.Config(Dashboard(local=True, pods=others), port=8991, log_level="error")
    server = uvicorn.Server(config)
    threads = [threading.Thread(target=run, daemon=True) for run in (server.run, turn)]
    for thread in threads:
        thread.start()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=False)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto("http://127.0.0.1:8991/", wait_until="domcontentloaded")
        page.locator(".band").nth(GUARDS - 1).wait_for(state="attached", timeout=60_000)
        page.wait_for_timeout(5000)
        traced: list[dict[str, Any]] = []
        ended: list[Any] = []
        tracing = page.context.new_cdp_session(page)
        tracing.on("Tracing.dataCollected", lambda part: traced.extend(part["value"]))
        tracing.on("Tracing.tracingComplete", lambda _: ended.append(True))
        tracing.send("Tracing.start", {"categories": "toplevel,devtools.timeline"})
        print(f"scrolled for 10 s: {page.evaluate(SCROLLED)}")
        tracing.send("Tracing.end")
        while not ended:
            page.wait_for_timeout(100)
        print(f"  CPU of the main thread in a frame: {cpu_of_frames(traced)}")
        browser.close()
    over.set()
    server.should_exit = True
    for thread in threads:
        thread.join(10)


if __name__ == "__main__":
    asyncio.run(main())
    if "--browser" in sys.argv:
        scroll()
