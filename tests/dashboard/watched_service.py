"""Services with a dashboard, for servers to run and tests to stop: `app` is protected."""

from __future__ import annotations

from fastapi import FastAPI

from seawall.dashboard import Dashboard
from seawall.web.fastapi import protect

# Samples are far apart: streams must end by the signal, not by the next sample.
app = FastAPI()
app.mount("/seawall", Dashboard(local=True, every=60.0))
protect(app)

bare = FastAPI()
bare.mount("/seawall", Dashboard(local=True, every=60.0))
