"""Dashboards that share a store see each other as soon as they are made."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from seawall import RedisStore
from seawall.dashboard import Dashboard
from seawall.events import bus
from tests.dashboard.app_support import Browser, get
from tests.dashboard.pods_support import Process
from tests.redis.conftest import client, new_store, redis_url
from tests.redis.support import eventually
from tests.support import let_pass

__all__ = ["client", "new_store", "redis_url"]

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("nobody_else")]

NewStore = Callable[..., RedisStore]


def dashboard(store: RedisStore, pod: str, **more: Any) -> Dashboard:
    return Dashboard(local=True, shared=store, pod=pod, every=0.05, **more)


async def views(app: Dashboard) -> list[Any]:
    told: list[Any] = (await get(app, "/state")).json()["views"]
    return told


def names(app: Dashboard) -> list[str]:
    """Return the names of the pods on the page of `app`; of one that is gone in brackets."""

    async def main() -> list[str]:
        shown = await views(app)
        await app._samplers[asyncio.get_running_loop()].stop()
        return [f"({one['pod']['name']})" if "gone" in one else one["pod"]["name"] for one in shown]

    return asyncio.run(main())


def test_a_process_that_nobody_looks_at_is_on_the_screen_of_another(
    new_store: NewStore, redis_url: str
) -> None:
    """Two processes, and only one page is ever opened: both are on it."""
    store = new_store()
    one = dashboard(store, "one")
    other = Process("b", redis_url, store._core.prefix)
    try:
        eventually(lambda: names(one) == ["one", "b"], 20.0)
        assert other.end() == 0
        eventually(lambda: names(one) == ["one"])
    finally:
        other.kill()
        one.close()


def test_pods_that_share_a_store_are_shown_by_each(new_store: NewStore) -> None:
    """A pod shows the others, live, and says that it cannot act on them."""

    async def main() -> None:
        one, two = (
            dashboard(new_store(), name, operate=lambda _: "ann") for name in ("one", "two")
        )
        async with one, two:
            for _ in range(200):
                shown = await views(one)
                if len(shown) == 2:
                    break
                await let_pass(0.05)
            assert [(view["pod"]["name"], view["operable"]) for view in shown] == [
                ("one", True),
                ("two", False),
            ]
            browser = Browser(one)
            await browser.open()
            body = {"pod": "two", "guard": "vendor", "layer": 0, "act": "isolate"}
            refused = await browser.act(body)
            assert refused.status == 409
            assert "that pod's own dashboard" in refused.json()["detail"]

    asyncio.run(main())


def test_one_watcher_serves_all_loops_until_the_last_ends(new_store: NewStore) -> None:
    """All loops share one watcher; once the dashboard is closed, the pod is gone."""
    one, two = dashboard(new_store(), "one"), dashboard(new_store(), "two")
    first = two._publishing
    assert first is not None

    async def look_and_close() -> None:
        await views(two)
        await two.aclose()

    async def look() -> None:
        await views(two)

    asyncio.run(look())
    assert two._publishing is first
    eventually(lambda: names(one) == ["one", "two"])
    asyncio.run(look_and_close())
    assert two._publishing is None
    eventually(lambda: names(one) == ["one"])
    assert first[0]._events._end.alive is False
    asyncio.run(look())
    assert two._publishing is not first
    eventually(lambda: names(one) == ["one", "two"])
    two.close()
    two.close()
    eventually(lambda: names(one) == ["one"])
    one.close()
    assert bus._listeners == ()


def test_one_that_is_forgotten_leaves_nothing_behind(new_store: NewStore) -> None:
    """No publisher and no listener stays; the other pods see it as gone."""
    store = new_store()
    own = list(store._core._background._handles)
    one, two = dashboard(new_store(), "one"), dashboard(store, "two")
    eventually(lambda: names(one) == ["one", "two"])
    assert store._core._background._handles != own
    before = len(bus._listeners)
    del two
    gc.collect()
    eventually(lambda: names(one) == ["one"])
    eventually(lambda: store._core._background._handles == own)
    assert len(bus._listeners) < before
    one.close()
    assert bus._listeners == ()


def test_one_that_is_forgotten_while_its_loop_runs_ends_too() -> None:
    """Its sampling does not keep it alive, and ends with it."""

    async def main() -> None:
        one = Dashboard(local=True, every=0.02)
        assert len(await views(one)) == 1
        assert len(asyncio.all_tasks()) == 2
        del one
        gc.collect()
        await let_pass(0.2)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_without_its_store_the_others_are_shown_as_they_were(new_store: NewStore) -> None:
    """What was known of them is still on the screen, as old as it is."""
    store = new_store()
    one, two = dashboard(store, "one"), dashboard(new_store(), "two")

    async def main() -> None:
        async with one:
            while len(await views(one)) < 2:
                await let_pass(0.05)
            store.close()
            await let_pass(0.5)
            own, other = await views(one)
            assert other["age"] >= 0.3
            (trouble,) = (told for told in own["troubles"] if told["id"] == "dashboard/pods")
            assert trouble["what"] == "The other pods cannot be asked for (StoreUnavailable)."

    asyncio.run(main())
    two.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_is_a_pod_of_its_own(new_store: NewStore) -> None:
    """After a fork the child publishes under its own name, once it starts or has a viewer."""
    store = new_store(timeout=5.0)
    one = Dashboard(local=True, shared=store, every=0.05)
    outlet, inlet = os.pipe()
    child = os.fork()
    if not child:
        try:

            async def main() -> None:
                async with one:
                    for _ in range(400):
                        shown = await views(one)
                        if len(shown) == 2:
                            os.write(inlet, json.dumps([v["pod"]["pid"] for v in shown]).encode())
                            return
                        await let_pass(0.02)

            asyncio.run(main())
        finally:
            os._exit(0)
    os.close(inlet)
    with open(outlet, "rb") as told:  # noqa: PTH123 - a descriptor
        pids = json.loads(told.read() or b"[]")
    os.waitpid(child, 0)
    assert pids == [child, os.getpid()]
    one.close()
