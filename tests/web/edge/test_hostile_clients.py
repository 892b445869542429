"""Real clients that send or read slowly, 500 from one address, at a real server: others are served.

What they cost others in time is measured by `python -m bench.slow_clients`; see docs/web/edge.md.
"""

from __future__ import annotations

import asyncio

import pytest

from bench.slow_clients import ATTACKERS, ATTACKS, ask, attacked, begun, need_descriptors, served
from bench.web import SEAWALL
from tests.redis.support import eventually

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("kind", ATTACKS)
def test_slow_clients_take_nothing_from_others(kind: str, http: str) -> None:
    """With what `protect(app)` has by default, all requests of another address are answered.

    On a machine that is busy with something else a few may be refused as overload, in one round:
    if the slow clients held places, it would be in every round.
    """
    if not need_descriptors(3 * ATTACKERS):
        pytest.skip("the system allows too few open files (ulimit -n)")
    requests = ATTACKERS * (2 if kind == "pipelined" else 1)
    with served(SEAWALL, http) as port, attacked(kind, port):
        eventually(lambda: asyncio.run(begun(port)) >= requests, seconds=60.0)
        eventually(lambda: asyncio.run(ask(port, 200)).statuses == {200: 200}, seconds=60.0)
