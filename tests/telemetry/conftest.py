from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.telemetry.world import World, lived


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """Let nothing of another test, dead but not collected, be listed here."""
    gc.collect()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return one of everything."""
    made = lived(tmp_path)
    yield made
    made.close()
