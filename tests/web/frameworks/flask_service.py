"""The service in Flask."""

from __future__ import annotations

from flask import Flask

from seawall.web.flask import protect
from tests.web.frameworks import service

app = Flask(__name__)
protect(app, **service.parts())


@app.get("/hello")
def hello() -> str:
    return "hello"


@app.get("/errors/<kind>")
def errors(kind: str) -> str:
    raise service.error_of(kind)


@app.get("/slow")
def slow() -> str:
    return service.checked_slow()


@app.get("/pause")
def pause() -> str:
    return service.blocking_pause()


@app.get("/running")
def running() -> dict[str, int]:
    return service.running()
