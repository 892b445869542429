"""The plant: five sensors and the directory that knows where they are. Each of them can be broken.

    GET /sensors/{name}        200 with the vibration that it measures now
    GET /places/{name}         200 with where the sensor is
    PUT /broken/{what}?on=...  breaks or mends one thing, see `BROKEN`

    uvicorn plant:app --port 8100

This stands for the world outside; nothing in it is about pipelines.
"""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any, Final

from fastapi import FastAPI, HTTPException

SENSORS: Final = ("S1", "S2", "S3", "S4", "S5")
FLAKY: Final = {"S2": 0.3, "S4": 0.3}
"""Which sensors fail now and then, and how often."""
SAMPLES: Final = 64
OPEN_WIRE: Final = -999.0
"""What a sensor measures whose wire is loose."""
LONG: Final = 30.0
"""Seconds: longer than anybody waits."""

BROKEN: Final = dict.fromkeys((*SENSORS, "places", "wire"), False)
"""A sensor does not answer; nor does the directory; the wire of S5 is loose, for one record."""

app = FastAPI()
chance = Random(7)  # noqa: S311 - the weather, not a secret


@app.get("/sensors/{name}")
async def measure(name: str) -> dict[str, Any]:
    """Measure for a moment."""
    if BROKEN[name]:
        await asyncio.sleep(LONG)  # noqa: TID251 - a dead sensor does not answer in real time
    if chance.random() < FLAKY.get(name, 0.0):
        raise HTTPException(503, "no signal")
    if name == "S5" and BROKEN["wire"]:
        BROKEN["wire"] = False
        return {"vibration": [OPEN_WIRE] * SAMPLES}
    phase = chance.random()
    return {"vibration": [math.sin(phase + step / 5) for step in range(SAMPLES)]}


@app.get("/places/{name}")
async def place(name: str) -> dict[str, str]:
    """Say where a sensor is."""
    if BROKEN["places"]:
        await asyncio.sleep(LONG)  # noqa: TID251 - nor does the directory, when it is broken
    return {"place": f"hall {SENSORS.index(name) + 1}"}


@app.put("/broken/{what}")
async def switch(what: str, on: bool) -> dict[str, bool]:  # noqa: FBT001 - a query parameter
    """Break or mend one thing."""
    BROKEN[what] = on
    return BROKEN
