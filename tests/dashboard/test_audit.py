"""The audit of a process is read at its dashboard."""

from __future__ import annotations

import pytest

from seawall import Breaker, Guard, registry
from seawall.dashboard import Dashboard
from seawall.resources import Pool
from seawall.testing import run_virtual
from tests.dashboard.app_support import get


def test_findings_are_served():
    """Each finding about a stack has its guard, its rule and the remedy."""

    async def main() -> None:
        with registry.emptied():
            Guard("vendor", Breaker())
            answer = await get(Dashboard(local=True), "/audit")
            (finding,) = [one for one in answer.json()["findings"] if "vendor" in one["path"]]
            assert (finding["path"], finding["rule"]) == ("guard 'vendor'", "SW702")
            assert "Breaker without Timeout" in finding["message"]

    run_virtual(main())


def test_connections_of_the_server_can_be_named():
    """Pools are added up if it is known what their server accepts."""

    async def main() -> None:
        pool = Pool(object, name="orders database", max_size=3000)
        app = Dashboard(local=True)
        query = b"connections=5000&pods=2"
        answer = await get(app, "/audit", query_string=query)
        (finding,) = [one for one in answer.json()["findings"] if one["rule"] == "SW707"]
        assert "orders database 3000" in finding["message"]
        assert pool.name == "orders database"

    run_virtual(main())


@pytest.mark.parametrize("query", [b"connections=many", b"connections=0", b"connections=9&pods=-1"])
def test_other_numbers_are_refused(query: bytes):
    """What is no number of connections or pods is a bad request."""

    async def main() -> None:
        answer = await get(Dashboard(local=True), "/audit", query_string=query)
        assert answer.status == 400

    run_virtual(main())


def test_only_who_may_look_is_told():
    """The route stands behind the same door as the page."""

    async def main() -> None:
        answer = await get(Dashboard(allow=lambda _: False), "/audit")
        assert answer.status == 403

    run_virtual(main())
