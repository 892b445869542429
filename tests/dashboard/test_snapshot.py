"""What `seawall tune` reads of a process is served by its dashboard."""

from __future__ import annotations

import json
from math import inf

import pytest

from seawall import Bulkhead, Guard, Timeout, registry
from seawall.config import guards_from_toml
from seawall.dashboard import Dashboard
from seawall.resources import Pool
from seawall.sim.services import pause
from seawall.testing import run_virtual
from seawall.tune import measurements_of, tuning_snapshot
from tests.dashboard.app_support import get


def test_guards_are_served_with_their_settings():
    """The settings are TOML that makes the same guards; the counts say how long they cover."""

    async def main() -> None:
        with registry.emptied():
            guard = Guard("vendor", Bulkhead(7, max_wait=inf), Timeout(3.0, sync="cooperative"))
            pool = Pool(object, name="orders database", max_size=9)
            for _ in range(4):
                guard.call(int)
            answer = (await get(Dashboard(local=True), "/snapshot")).json()
            measured = {one.name: one for one in measurements_of(answer)}
            vendor = measured["vendor"]
            assert (vendor.calls, vendor.samples, vendor.kind) == (4, 4, "guard")
            assert vendor.table is not None
            assert [one["policy"] for one in vendor.table["policies"]] == ["bulkhead", "timeout"]
            (again,) = guards_from_toml(answer["settings"], replace=True).values()
            assert repr(again.policies) == repr(guard.policies)
            assert measured[pool.name].table == {"max_size": 9, "checkout_timeout": 1.0}

    run_virtual(main())


def test_guards_that_are_part_of_something_else_are_left_out():
    """Policies inside an edge or a database cannot be set one by one."""
    with registry.emptied():
        part = registry.release(Guard("edge", Timeout(3.0)))
        own = Guard("vendor", Timeout(3.0))
        names = [guard["name"] for guard in tuning_snapshot()["guards"]]
        assert names == [own.name]
        assert part.name not in json.dumps(tuning_snapshot())


def test_a_guard_that_cannot_be_read_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch):
    """A policy of the user's own may raise."""
    with registry.emptied():
        own, other = Guard("own", Timeout(3.0)), Guard("other", Timeout(3.0))
        monkeypatch.setattr(own, "snapshot", lambda: 1 / 0)
        assert [one["name"] for one in tuning_snapshot()["guards"]] == [other.name]


def test_rate_is_that_of_the_last_seconds_if_it_has_grown():
    """A service that was idle for an hour is tuned for the calls that come now."""

    async def main() -> None:
        with registry.emptied():
            guard = Guard("vendor", Timeout(3.0))
            await pause(3600.0)

            async def call() -> None:
                await pause(0.1)

            for _ in range(300):
                await guard.acall(call)
            (vendor,) = measurements_of(tuning_snapshot())
            assert vendor.seconds == pytest.approx(3630)
            assert vendor.rate == pytest.approx(10, rel=0.05)

    run_virtual(main())


def test_only_who_may_look_is_told_the_settings():
    """The route stands behind the same door as the page."""

    async def main() -> None:
        answer = await get(Dashboard(allow=lambda _: False), "/snapshot")
        assert answer.status == 403

    run_virtual(main())


def test_proposals_for_one_guard_are_served():
    """They come from this process's own numbers, at their place in the stack."""

    async def main() -> None:
        with registry.emptied():
            guard = Guard("vendor", Bulkhead(4000), Timeout(30.0))
            Guard("other", Timeout(30.0))
            for _ in range(1500):
                await guard.acall(pause, 0.01)
            app = Dashboard(local=True, pod="here")
            answer = await get(app, "/tune", query_string=b"guard=vendor&pod=here")
            found = {one["policy"]: one for one in answer.json()["proposals"]}
            assert found["timeout"]["place"] == 1
            assert found["timeout"]["words"].startswith("seconds 30 -> 0.0")
            assert "of 1 500 calls" in found["timeout"]["reason"]
            assert found["breaker"]["words"].startswith("add it")
            for query in (b"guard=other", b"guard=nobody", b"guard=vendor&pod=elsewhere"):
                answer = await get(app, "/tune", query_string=query)
                assert answer.json() == {"proposals": []}
            assert (await get(app, "/tune")).status == 400

    run_virtual(main())
