"""Blocking calls inside `async def` are found."""

from __future__ import annotations

from tests.audit.support import assert_findings


def test_blocking_calls_stop_the_loop():
    """Calls that wait without awaiting are found in `async def`, and only there."""
    assert_findings(
        """
        import asyncio, redis, requests, subprocess, threading, time
        store = redis.Redis(socket_timeout=1)
        async def handler():
            time.sleep(1)  #! SW401
            requests.get(url, timeout=3)  #! SW401
            store.get("a")  #! SW401
            subprocess.run(command, timeout=3)  #! SW401
            await asyncio.sleep(1)
            lock = threading.Lock()
            lock.acquire()
            await asyncio.to_thread(time.sleep, 1)
            def work():
                time.sleep(1)
            await asyncio.to_thread(lambda: time.sleep(1))
        def plain():
            time.sleep(1)
        """,
        "SW401",
    )
