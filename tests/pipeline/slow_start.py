"""A module that takes its time in a worker process before its function can be called."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

TAKES = 1.5
"""Seconds until a worker process has imported this."""

if multiprocessing.parent_process() is not None:
    time.sleep(TAKES)  # noqa: TID251 - the time of another process


def dies_once(path: str) -> str:
    """End the process the first time it is called with a path."""
    if path and not Path(path).exists():
        Path(path).touch()
        os._exit(1)
    return path
