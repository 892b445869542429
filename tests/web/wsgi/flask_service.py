"""A small Flask service for gunicorn; its settings come from the environment, as JSON."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, request

from seawall import CircuitOpen, Guard, Timeout
from seawall.clock import SYSTEM
from seawall.context import check_deadline, seconds_left
from seawall.web import Lifecycle, RequestLimit, Trust
from seawall.web.flask import limited, protect
from seawall.web.wsgi import QueueAdmission

settings: dict[str, Any] = json.loads(os.environ.get("SEAWALL_TEST_SETTINGS", "{}"))
app = Flask(__name__)
admission = settings.get("queue_admission")
edge = protect(
    app,
    timeout=settings.get("timeout", 10.0),
    trust=Trust(callers=["127.0.0.1"]),
    lifecycle=Lifecycle(**settings.get("lifecycle", {})),
    queue_admission=None if admission is None else QueueAdmission(**admission),
)
slow = Guard("slow", Timeout(60, sync="cooperative"))


@app.get("/")
def hello() -> dict[str, Any]:
    """Say hello, from which process and thread, and with how much time."""
    return {"pid": os.getpid(), "thread": threading.get_ident(), "left": seconds_left()}


@app.get("/open")
def circuit() -> str:
    """Fail as a guard inside would."""
    raise CircuitOpen("guard 'vendor': secret", retry_after=7.0)


@app.get("/limited")
@limited(RequestLimit("2/h", by="address"))
def few() -> str:
    """Answer two requests of an hour."""
    return "few"


@app.get("/sleep/<float:seconds>")
def sleep(seconds: float) -> str:
    """Answer after some seconds."""
    SYSTEM.sleep(seconds)
    return "slept"


@app.get("/steps/<float:seconds>")
@slow
def steps(seconds: float) -> str:
    """Work for some seconds, in steps that look at the deadline."""
    for _ in range(int(seconds * 100)):
        SYSTEM.sleep(0.01)
        check_deadline()
    return "worked"


@app.get("/stream/<float:seconds>")
def stream(seconds: float) -> Response:
    """Send a part, and another one after some seconds."""

    def parts() -> Iterator[str]:
        yield "begin "
        SYSTEM.sleep(seconds)
        yield "end"

    return Response(parts())


@app.post("/body")
def body() -> str:
    """Read the body."""
    return str(len(request.get_data()))


@app.get("/state")
def state() -> dict[str, Any]:
    """Show the edge."""
    shown = edge.snapshot()
    return {name: shown[name] for name in ("lifecycle", "succeeded", "rejected", "policies")}
