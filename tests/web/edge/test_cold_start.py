"""The first requests of a pod that has just started: none of them is refused.

A real uvicorn in a process of its own. The connections wait in the listening socket before the
process starts, and a probe behind them: when it is answered, the pod has accepted them all.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.alone

BURST = 64
REQUEST = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
POD = """
import socket, sys
import uvicorn
from fastapi import FastAPI
from seawall.web.fastapi import protect

app = FastAPI()

@app.get("/hello")
async def hello():
    return {"hello": "world"}

protect(app)
listener = socket.socket(fileno=int(sys.argv[1]))
config = uvicorn.Config(app, http=sys.argv[2], access_log=False, log_level="warning")
uvicorn.Server(config).run(sockets=[listener])
"""


def status_of(client: socket.socket) -> int:
    """Read an answer to its end."""
    answer = b""
    while part := client.recv(65536):
        answer += part
    return int(answer.split(b" ", 2)[1])


def first_answers(http: str) -> Counter[int]:
    """Start a pod and send it a burst of requests at once; count the answers by status."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2 * BURST))
        *clients, probe = (
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))
            for _ in range(BURST + 1)
        )
        probe.sendall(REQUEST % b"/health/live")
        command = [sys.executable, "-c", POD, str(listener.fileno()), http]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])  # noqa: S603 - our own
        stack.callback(process.wait)
        stack.callback(process.terminate)
        assert status_of(probe) == 200
        for client in clients:
            client.sendall(REQUEST % b"/hello")
        return Counter(status_of(client) for client in clients)


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_the_first_burst_of_a_pod_is_served_whole(http: str) -> None:
    """Sixty-four requests at once are the first that the app sees."""
    assert first_answers(http) == {200: BURST}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(50))
def test_the_first_burst_is_served_whole_in_fifty_cold_starts(start: int) -> None:
    """However the first requests fall into turns of the loop."""
    assert first_answers(("h11", "httptools")[start % 2]) == {200: BURST}
