from __future__ import annotations

from weakref import WeakKeyDictionary

import pytest

from seawall import registry
from tests import support


@pytest.fixture(autouse=True)
def _asks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no dashboard ask the databases of another test, which may be gone."""
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of another test be listed here, and nobody listen."""
    support.nobody_else(monkeypatch)
