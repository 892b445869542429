from __future__ import annotations

import gc

import pytest

from seawall.runtime import events


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of another test, dead but not collected, be listed here, and nobody listen."""
    gc.collect()
    monkeypatch.setattr(events, "_listeners", ())
