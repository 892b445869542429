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


def test_what_asks_nobody_does_not_block():
    """To set up or close a client asks no server."""
    assert_findings(
        """
        import pymongo, redis, requests
        async def handler():
            session = requests.Session()
            session.headers.update(headers)
            session.mount("https://", adapter)
            session.close()
            session.get(url)  #! SW401
            store = redis.Redis()
            pipeline = store.pipeline()
            pipeline.get("a")
            pipeline.execute()  #! SW401
            store.pubsub()
            store.close()
            documents = pymongo.MongoClient()
            orders = documents.get_database("shop").get_collection("orders")
            orders.find({})
            orders.find_one({})  #! SW401
            documents.close()
        """,
        "SW401",
    )
