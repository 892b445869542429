from __future__ import annotations

import pytest

from tests import support


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of another test be listed here, and nobody listen."""
    support.nobody_else(monkeypatch)
