"""The service in Starlette."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from seawall.web.fastapi import protect
from tests.web.frameworks import service


async def hello(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def errors(request: Request) -> PlainTextResponse:
    raise service.error_of(request.path_params["kind"])


async def slow(_request: Request) -> PlainTextResponse:
    return PlainTextResponse(await service.slow())


async def pause(_request: Request) -> PlainTextResponse:
    return PlainTextResponse(await service.pause())


async def running(_request: Request) -> JSONResponse:
    return JSONResponse(service.running())


app = Starlette(
    routes=[
        Route("/hello", hello),
        Route("/errors/{kind}", errors),
        Route("/slow", slow),
        Route("/pause", pause),
        Route("/running", running),
    ]
)
protect(app, **service.parts())
