"""The service in aiohttp."""

from __future__ import annotations

import socket
import sys

from aiohttp import web

from seawall.web.aiohttp import protect
from tests.web.frameworks import service

app = web.Application()
protect(app, **service.parts())
routes = web.RouteTableDef()


@routes.get("/hello")
async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


@routes.get("/errors/{kind}")
async def errors(request: web.Request) -> web.Response:
    raise service.error_of(request.match_info["kind"])


@routes.get("/slow")
async def slow(_request: web.Request) -> web.Response:
    return web.Response(text=await service.slow())


@routes.get("/pause")
async def pause(_request: web.Request) -> web.Response:
    return web.Response(text=await service.pause())


@routes.get("/running")
async def running(_request: web.Request) -> web.Response:
    return web.json_response(service.running())


if __name__ == "__main__":
    app.add_routes(routes)
    web.run_app(app, sock=socket.socket(fileno=int(sys.argv[1])), print=None)
