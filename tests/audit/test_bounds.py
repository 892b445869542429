"""What can grow without a bound is found."""

from __future__ import annotations

from tests.audit.support import assert_findings


def test_queues_need_a_size():
    """A queue without a size, or with the size 0, grows until memory ends."""
    assert_findings("""
        import asyncio, queue, threading
        from multiprocessing import Queue
        queue.Queue()  #! SW301
        queue.Queue(0)  #! SW301
        queue.Queue(maxsize=100)
        queue.Queue(size)
        queue.Queue(*given)
        queue.SimpleQueue()  #! SW301
        asyncio.Queue()  #! SW301
        Queue(10)
        Queue()  #! SW301
        def answer(child):
            result = Queue()
            child(result)
            return result.get(timeout=3)
        class Buffer:
            def __init__(self):
                self.items = queue.Queue()
            def add(self, one):
                if self.items.qsize() < 100:
                    self.items.put(one)
        class Connections:
            def __init__(self, connections):
                self.idle = queue.Queue()
                for one in connections:
                    self.idle.put(one)
        def fill():
            items = queue.Queue()
            for one in range(10):
                items.put(one)
        def ask_all(vendors):
            def ask(vendor):
                answers.put(vendor.ask())
            answers = queue.Queue()
            threads = [threading.Thread(target=ask, args=(one,)) for one in vendors]
            found = []
            for thread in threads:
                thread.start()
            while len(found) < len(threads):
                found.append(answers.get(timeout=3))
        def read_all(files):
            def read(file):
                for line in file:
                    lines.put(line)
            lines = queue.Queue()  #! SW301
            threads = [threading.Thread(target=read, args=(one,)) for one in files]
        def record(device):
            def callback(samples):
                chunks.put(samples)
            chunks = queue.Queue()  #! SW301
            device.open(callback)
    """)


def test_fan_outs_need_a_bound():
    """One task for each of unknown items is found; for a few written ones it is not."""
    assert_findings(
        """
        import asyncio
        async def all_of(items):
            await asyncio.gather(*[fetch(one) for one in items])  #! SW302
            await asyncio.gather(*(fetch(one) for one in items))  #! SW302
            tasks = [fetch(one) for one in items]
            await asyncio.gather(*tasks)  #! SW302
            await asyncio.gather(*[fetch(one) for one in ("a", "b")])
            await asyncio.gather(*[fetch(one) for one in items[:5]])
            await asyncio.gather(*[fetch(one) for one in range(3)])
            await asyncio.gather(one(), two())
            await asyncio.gather(*[handler(event) for handler in handlers])
            await asyncio.gather(*[stop(one) for one in items])
            await asyncio.gather(*[tell(one) for one in listeners])
            await asyncio.gather(*[asyncio.ensure_future(one) for one in items])
            await asyncio.gather(*[Member(one) for one in items])
        async def limited(items):
            semaphore = asyncio.Semaphore(10)
            await asyncio.gather(*[fetch(one, semaphore) for one in items])
        async def inner(items):
            await asyncio.gather(*[bounded(one) for one in items])
        async def bounded(one):
            async with semaphore:
                await fetch(one)
        """,
        "SW302",
    )


def test_a_fan_out_that_is_no_surge_is_clean():
    """Workers that go on for ever, futures of a batch, and what is registered."""
    assert_findings(
        """
        import asyncio
        async def poll(address):
            while True:
                await fetch(address)
                await asyncio.sleep(1)
        async def once(address):
            while True:
                if await fetch(address):
                    return
        async def work(addresses):
            await asyncio.gather(*[poll(one) for one in addresses])
            await asyncio.gather(*[once(one) for one in addresses])  #! SW302
        class Loader:
            def load(self, key):
                future = asyncio.get_running_loop().create_future()
                self.queue.append((key, future))
                return future
            def fetch(self, key):
                return fetch(key)
            async def load_all(self, keys):
                await asyncio.gather(*[self.load(key) for key in keys])
                await asyncio.gather(*[self.fetch(key) for key in keys])  #! SW302
        async def start(app):
            await asyncio.gather(*[open_one(one) for one in app.users])  #! SW302
            await asyncio.gather(*[receive(one) for one in app.subscriptions])
        """,
        "SW302",
    )


def test_tasks_in_a_loop_need_a_bound():
    """A task for each turn is found, unless the turn waits or a semaphore bounds them."""
    assert_findings("""
        import asyncio
        async def serve(messages):
            async for message in messages:
                asyncio.create_task(handle(message))  #! SW303
            for message in list(messages):
                asyncio.create_task(handle(message))  #! SW303
            for service in services:
                asyncio.create_task(service.start())
            for handler in handlers:
                asyncio.create_task(told(handler))
            for name in ("a", "b"):
                asyncio.create_task(handle(name))
            while True:
                task = asyncio.create_task(handle(message))
                await asyncio.wait([task])
            while True:
                task = asyncio.create_task(handle(message))
                await task
        async def limited(messages):
            async for message in messages:
                await semaphore.acquire()
                asyncio.create_task(handle(message))
        async def once():
            asyncio.create_task(handle(1))
    """)


def test_a_loop_that_starts_one_task_is_clean():
    """The loop ends with the task, one item alone has a task, or each turn waits for its group."""
    assert_findings("""
        import asyncio
        async def first(messages):
            async for message in messages:
                if message.ready:
                    task = asyncio.create_task(handle(message))
                    log(task)
                    break
            for message in list(messages):
                if message == URGENT:
                    asyncio.create_task(handle(message))
                if message != URGENT:
                    asyncio.create_task(handle(message))  #! SW303
            async for message in messages:
                asyncio.create_task(handle(message))  #! SW303
                for part in message:
                    break
        async def found(messages):
            for message in list(messages):
                if message.ready:
                    return asyncio.create_task(handle(message))
        async def grouped(messages):
            for message in list(messages):
                async with asyncio.TaskGroup() as group:
                    group.create_task(handle(message))
            async with asyncio.TaskGroup() as group:
                for message in list(messages):
                    group.create_task(handle(message))  #! SW303
    """)


def test_threads_need_a_bound():
    """The default executor is shared by everything; a thread for each connection has no limit."""
    assert_findings(
        """
        import asyncio, requests, threading
        async def ask(loop):
            await asyncio.to_thread(requests.get, url)  #! SW304
            await asyncio.to_thread(len, url)
        async def limited():
            async with semaphore:
                await asyncio.to_thread(requests.get, url)
        def serve(listener):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,)).start()  #! SW304
        """,
        "SW304",
    )
