"""Three services in a chain, each with three attempts, and the last one fails.

A user's client calls A, A calls B, B calls C. Naive retries multiply: 27 requests reach C for each
of the user's. With the attempt header and budgets it is hardly more than one; and what each service
is told of the time that is left never grows on the way.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from bench.amplification import Chain, Settings, in_process, table
from seawall.clock import SYSTEM
from tests.clients.support import in_thread


def check_time(chain: Chain) -> None:
    """Demand that no service received more time than its caller had."""
    for told in chain.reached:
        if told.parent:
            most = chain.reached[int(told.parent)].seconds
            assert told.seconds is not None
            assert most is not None
            assert told.seconds <= most


def test_amplification_is_what_the_page_says() -> None:
    """The table of the page on retries, from the same run."""
    found = {what: (round(mean, 3), most) for what, (mean, most) in table().items()}
    budgets = "a `RetryBudget` in each"
    assert found == {
        ("guards", "no rule"): (27.0, 27),
        ("guards", "defaults"): (7.0, 7),
        ("guards", budgets): (1.035, 7),
        ("services", "no attempt header"): (27.0, 27),
        ("services", "defaults"): (7.0, 7),
        ("services", "`trust=`"): (7.0, 7),
        ("services", '`retry_at="edge"`'): (3.0, 3),
        ("services", budgets): (1.035, 7),
        ("services", f"`trust=` and {budgets}"): (1.035, 7),
    }


NAIVE = Settings(header=False, budgets=False)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (NAIVE, 27.0, 27.0),
        (Settings(budgets=False), 7.0, 7.0),
        (Settings(budgets=False, retry_at="edge"), 3.0, 3.0),
        (Settings(), 1.0, 1.1),
    ],
    ids=["naive", "the attempt header", "retrying at the edge only", "header and budgets"],
)
def test_how_many_requests_reach_the_last_service(settings: Settings, least: float, most: float):
    """Naive retries make 27 of one request; the header, the edge and budgets make it bearable."""
    users = 200 if settings.budgets else 20
    chain = in_process(settings, users)
    assert least <= chain.requests_of_c / users <= most <= (3.3 if settings.budgets else 27)


@pytest.mark.parametrize(
    ("settings", "worst"),
    [(Settings(), 7), (Settings(retry_at="edge"), 3)],
    ids=["everywhere", "at the edge only"],
)
def test_what_the_worst_request_costs(settings: Settings, worst: int):
    """Budgets are full at first: then a single request costs what the header alone allows."""
    chain = in_process(settings, 200)
    reached = [told.user for told in chain.reached if told.service == "c"]
    assert max(reached.count(str(user)) for user in range(200)) == worst
    assert len(reached) <= 3.3 * 200


@pytest.mark.parametrize("settings", [NAIVE, Settings()], ids=["naive", "header and budgets"])
def test_remaining_time_never_grows(settings: Settings):
    """Each service receives at most as much time as its caller."""
    chain = in_process(settings, 10)
    check_time(chain)


@pytest.mark.alone
def test_over_real_sockets():
    """The same chain of three real servers."""
    chain = Chain(Settings(), SYSTEM, 0.001)
    users = 15

    async def main() -> None:
        running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

        def serve(app: Any) -> str:
            listening = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(app, ws="none", lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            running.append((server, asyncio.create_task(server.serve([listening]))))
            return f"http://127.0.0.1:{listening.getsockname()[1]}/"

        try:
            c = serve(chain.service("c", None))
            b = serve(chain.service("b", chain.asking(await chain.client(None), c)))
            a = serve(chain.service("a", chain.asking(await chain.client(None), b)))
            user = await chain.client(None)
            for number in range(users):
                assert await chain.ask_user(user, a, number) == 503
        finally:
            await chain.close()
            for server, _ in running:
                server.should_exit = True
            await asyncio.gather(*(task for _, task in running))

    in_thread(main)
    assert users <= chain.requests_of_c <= 3.3 * users
    check_time(chain)
