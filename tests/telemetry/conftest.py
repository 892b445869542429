from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import nobody_else
from tests.telemetry.world import World, lived


@pytest.fixture(autouse=True)
def _nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of another test, dead but not collected, be listed here, and nobody listen."""
    nobody_else(monkeypatch)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return one of everything."""
    made = lived(tmp_path)
    yield made
    made.close()
