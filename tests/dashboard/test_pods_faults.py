"""Pods, and a store that fails, or holds what none of them wrote: the rest is shown."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import zlib
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
import redis

from seawall import RedisStore
from seawall.clock import SYSTEM
from seawall.dashboard.pods import store_pods as module
from seawall.dashboard.pods.store_pods import StorePods
from seawall.dashboard.pods.wire import LARGEST, OTHERS, pack
from seawall.dashboard.views import View
from seawall.errors import StoreUnavailable
from seawall.runtime.background import run_in
from tests.dashboard.pods_support import NewPod, Shows, names, new_pod, put, read, tell, view
from tests.redis.conftest import client, new_store, redis_url, site
from tests.redis.faults import Site, black_hole, cut, killed
from tests.redis.support import Server, eventually, free_port, mutate

__all__ = ["client", "new_pod", "new_store", "redis_url", "site"]

pytestmark = pytest.mark.alone


# Bounds


def test_a_hundred_pods_are_too_many_and_that_is_told(
    new_pod: NewPod, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 are shown, the same ones each time; without the bound it would be all."""
    one = new_pod("one")
    for number in range(100):
        put(client, one, f"{number:016x}", pack(view(f"pod-{number:03}"), 1.0))
    shown = names(one)
    assert len(shown) == 65
    assert names(one) == shown
    told = read(one)[0]
    assert told["pod"]["name"] == OTHERS
    assert told["troubles"][0]["what"].startswith("36 more pods")
    monkeypatch.setattr(module, "MOST", 1000)
    assert len(names(one)) == 100


def test_a_thousand_pods_are_remembered(
    new_pod: NewPod, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more those go that were silent for longest; without the bound none would."""
    one = new_pod("one")
    for number in range(30):
        put(client, one, f"{number:016x}", b"x", ago=60 - number)
    monkeypatch.setattr(module, "KNOWN", 10)
    tell(one)
    index, told, _mark = one._keys
    assert (client.zcard(index), client.hlen(told)) == (10, 10)
    assert client.zscore(index, one._store.pod) is not None
    assert client.zscore(index, f"{29:016x}") is not None


def test_all_views_together_are_bounded(
    new_pod: NewPod, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no place is counted, not sent; without the bound all would be."""
    one = new_pod("one")
    for number in range(20):
        put(client, one, f"{number:016x}", os.urandom(200 * 1024))
    asked: list[int] = []
    acall = one._store.acall

    async def weighed(*args: Any) -> Any:
        reply = await acall(*args)
        asked.append(sum(len(part) for part in reply))
        return reply

    monkeypatch.setattr(one._store, "acall", weighed)
    troubles = read(one)[0]["troubles"]
    assert troubles[0]["what"].startswith("10 pods tell what cannot be read")
    assert troubles[1]["what"].startswith("10 more pods")
    monkeypatch.setattr(module, "ALTOGETHER", 10**9)
    read(one)
    assert asked[0] < 2.1 * 1024 * 1024 < asked[1]


HOSTILE = {
    "huge": b"j" * (LARGEST + 1),
    "bomb": b"z" + zlib.compress(b" " * 50_000_000, 9),
    "deep": b"j" + b"[" * 100_000,
    "noise": bytes(range(256)),
    "format": b"j" + json.dumps({**view(), "format": 99}).encode(),
    "types": b"j" + json.dumps({**view(), "guards": "all"}).encode(),
    "\x1b[2J\xff": b"j{}",
}


def test_what_others_wrote_is_left_out_counted_and_told(
    new_pod: NewPod, client: redis.Redis
) -> None:
    """Whatever it is, the good pod is shown, and the reader goes on."""
    one, _good = new_pod("one"), new_pod("good")
    for name, data in HOSTILE.items():
        put(client, one, name, data)
    put(client, one, "x" * 100_000, b"j{}")  # not even sent
    others, good = read(one)
    assert good["pod"]["name"] == "good"
    (trouble,) = others["troubles"]
    assert trouble["what"].startswith(f"{len(HOSTILE)} pods tell what cannot be read")
    since = trouble["since"]
    assert read(one)[0]["troubles"][0]["since"] == since
    for name in HOSTILE:
        client.zrem(one._keys[0], name)
    assert names(one) == ["good"]


def test_keys_of_another_kind_are_not_in_the_way(new_pod: NewPod, client: redis.Redis) -> None:
    """Keys of another type under these names are replaced."""
    one, two = new_pod("one"), new_pod("two")
    for key in one._keys:
        client.delete(key)
        client.rpush(key, "mine")
    assert names(one) == []
    tell(two)
    assert names(one) == ["two"]
    client.hset(one._keys[1], "orphan", "x" * 1000)  # as if the server had dropped the other key
    tell(two)
    assert client.hkeys(one._keys[1]) == [two._store.pod.encode()]


def put_something_wrong(client: redis.Redis, pod: StorePods, wrong: str) -> None:
    if wrong == "huge view":
        put(client, pod, "huge", b"j" * (LARGEST + 1))
    elif wrong == "huge name":
        put(client, pod, "x" * 100_000, b"j{}")
    else:
        client.delete(*pod._keys)
        client.rpush(pod._keys[1], "mine")


@pytest.mark.parametrize(
    ("wrong", "before", "after"),
    [
        ("huge view", "size <= largest and size or 0", "size"),
        ("huge name", "#other <= 64", "true"),
        ("another kind", "found ~= kind", "false"),
    ],
)
def test_without_its_bound_the_script_sends_or_fails(
    new_pod: NewPod,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    before: str,
    after: str,
) -> None:
    """Ablation: what is large would be sent, and what is of another kind be in the way."""
    one, two = new_pod("one"), new_pod("two")
    args = ["read", one._store.pod, module.REMEMBERED, 64, LARGEST, module.ALTOGETHER, 1000]

    def weight() -> float:
        put_something_wrong(client, one, wrong)
        try:
            tell(two)
            return float(len(b"".join(one._store.call("views", one._keys, args))))
        except StoreUnavailable:
            return float("inf")

    assert weight() < 10_000
    mutate(monkeypatch, "views", before, after)
    assert weight() > 90_000


# A store that fails


@pytest.fixture
def pair(site: Site) -> Iterator[tuple[StorePods, StorePods]]:
    """Return two pods, each with a store of its own behind the proxy."""
    prefix = f"test-{token_hex(4)}"
    stores = [RedisStore(site.url, prefix=prefix, timeout=0.3) for _ in range(2)]
    made = [StorePods(store, Shows(f"pod-{place}")) for place, store in enumerate(stores)]
    eventually(lambda: all(read(pod) for pod in made))
    yield made[0], made[1]
    site.proxy.heal()
    for store in stores:
        store.close()


async def until_down(pod: StorePods) -> None:
    """Ask until the store is known to be down."""
    while pod._store.up:
        try:
            await pod.views()
        except StoreUnavailable:
            pass


@pytest.mark.parametrize("fault", [cut, black_hole, killed], ids=lambda fault: fault.__name__)
def test_while_the_store_is_away_that_is_said_and_when_it_is_back_all_are_there(
    pair: tuple[StorePods, StorePods], site: Site, fault: Any
) -> None:
    """During a store outage reading raises in time, and no pod counts as gone."""
    one, two = pair
    watcher: Any = two._watcher
    with fault(site):
        began = SYSTEM.now()
        with pytest.raises(StoreUnavailable):
            read(one)
        assert SYSTEM.now() - began < 1.0
        asyncio.run(until_down(two))
        before = watcher.samples
        two._due = 0.0
        run_in(two._store._background, two._tick, 1.0)
        assert watcher.samples == before

    def back() -> bool:
        try:
            return names(one) == ["pod-1"]
        except StoreUnavailable:
            return False

    eventually(back)
    eventually(lambda: watcher.samples > before, 2.0)  # it tells at once, not when it is time


def test_a_reader_that_is_cancelled_disturbs_nobody(
    pair: tuple[StorePods, StorePods], site: Site
) -> None:
    """The next one gets its own answer."""
    one, _two = pair

    async def scenario() -> list[View]:
        await one.views()
        site.proxy.delay = 0.05
        for _ in range(5):
            task = asyncio.create_task(one.views())
            await asyncio.wait({task}, timeout=0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        site.proxy.delay = 0.0
        return await one.views()

    assert [view["pod"]["name"] for view in asyncio.run(scenario())] == ["pod-1"]


def test_loops_of_several_threads_read_at_once(new_pod: NewPod) -> None:
    """Each has the views, and connections of its own."""
    one = new_pod("one")
    new_pod("two")
    seen: list[list[str]] = []

    async def look() -> None:
        for _ in range(20):
            views = await one.views()
            seen.append([view["pod"]["name"] for view in views])

    threads = [threading.Thread(target=lambda: asyncio.run(look())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [["two"]] * 60


def test_a_cluster() -> None:
    """All keys are in one slot."""
    server = Server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    try:
        with server.client() as admin:
            admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: admin.cluster("INFO")["cluster_state"] == "ok")
        stores = [RedisStore(f"redis+cluster://127.0.0.1:{server.port}", timeout=2.0) for _ in "ab"]
        one, _two = (StorePods(store, Shows(f"pod-{id(store)}")) for store in stores)
        eventually(lambda: len(read(one)) == 1)
        for store in stores:
            store.close()
    finally:
        server.close()
