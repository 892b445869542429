"""The service in Quart."""

from __future__ import annotations

from quart import Quart

from seawall.web.quart import protect
from tests.web.frameworks import service

app = Quart(__name__)
protect(app, **service.parts())


@app.get("/hello")
async def hello() -> str:
    return "hello"


@app.get("/errors/<kind>")
async def errors(kind: str) -> str:
    raise service.error_of(kind)


@app.get("/slow")
async def slow() -> str:
    return await service.slow()


@app.get("/pause")
async def pause() -> str:
    return await service.pause()


@app.get("/running")
async def running() -> dict[str, int]:
    return service.running()
