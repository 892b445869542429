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
    """Hide the guards and listeners of other tests."""
    support.nobody_else(monkeypatch)
