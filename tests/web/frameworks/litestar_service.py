"""The service in Litestar."""

from __future__ import annotations

from litestar import Litestar, get

from seawall.web.litestar import protect
from tests.web.frameworks import service


@get("/hello", media_type="text/plain")
async def hello() -> str:
    return "hello"


@get("/errors/{kind:str}")
async def errors(kind: str) -> str:
    raise service.error_of(kind)


@get("/slow", media_type="text/plain")
async def slow() -> str:
    return await service.slow()


@get("/pause", media_type="text/plain")
async def pause() -> str:
    return await service.pause()


@get("/running")
async def running() -> dict[str, int]:
    return service.running()


app = protect(Litestar([hello, errors, slow, pause, running]), **service.parts())
