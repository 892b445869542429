"""The service in FastAPI."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from seawall.web.fastapi import protect
from tests.web.frameworks import service

app = FastAPI(default_response_class=PlainTextResponse)
protect(app, **service.parts())


@app.get("/hello")
async def hello() -> str:
    return "hello"


@app.get("/errors/{kind}")
async def errors(kind: str) -> str:
    raise service.error_of(kind)


@app.get("/slow")
async def slow() -> str:
    return await service.slow()


@app.get("/pause")
async def pause() -> str:
    return await service.pause()


@app.get("/running", response_model=None)
async def running() -> PlainTextResponse:
    from json import dumps

    return PlainTextResponse(dumps(service.running()))
