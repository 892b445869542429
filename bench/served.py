"""A request for "hello", served: what the cost of a refusal is measured by.

The server's protocol is handed the bytes of a request and writes those of the answer, as it does
with a socket; there is no socket and no kernel in between, whose time would count for us.
"""

from __future__ import annotations

import asyncio

from bench.cases import BARE

REQUEST = b"GET /hello HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n\r\n"


class _Wire(asyncio.Transport):
    """Where the server writes; `answered` is done when a whole answer is there."""

    def __init__(self):
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 80)})
        self.answered = None

    def write(self, data):
        if data.endswith(b"hello"):
            self.answered.set_result(data)

    def is_closing(self):
        return False

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def hello_world(_function):
    """Serve it with uvicorn and starlette, on a connection that is kept."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

    async def hello(_request):
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/hello", hello)])
    # Kept also while other cases have their turns.
    kept = {"timeout_keep_alive": 86400}
    config = Config(app, log_config=None, access_log=False, lifespan="off", **kept)
    config.load()
    wire = _Wire()
    protocol = None

    async def serve(argument):
        nonlocal protocol
        loop = asyncio.get_running_loop()
        if protocol is None:
            protocol = H11Protocol(config, ServerState(), {})
            protocol.connection_made(wire)
        wire.answered = loop.create_future()
        protocol.data_received(REQUEST)
        await wire.answered
        await asyncio.sleep(0)  # the server's task ends
        return argument

    return serve


BASELINES = {"refusal, async": {BARE: hello_world}}
"""What stands for the bare call where that is not the guarded function itself."""
