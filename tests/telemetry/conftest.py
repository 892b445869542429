from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from seawall.runtime import events
from tests.telemetry.world import World, lived


@pytest.fixture(autouse=True)
def _nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of another test, dead but not collected, be listed here, and nobody listen."""
    gc.collect()
    monkeypatch.setattr(events, "_listeners", ())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return one of everything."""
    made = lived(tmp_path)
    yield made
    made.close()
