"""A pytest plugin: `pytest -p seawall.pytest_plugin`, or the fixtures in a conftest.py.

from seawall.pytest_plugin import empty_registry, no_leaked_permits
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seawall import testing


@pytest.fixture
def empty_registry() -> Iterator[None]:
    """Give a test a registry without guards, and close those that it makes."""
    with testing.empty_registry():
        yield


@pytest.fixture
def no_leaked_permits() -> Iterator[None]:
    """Fail a test that leaves a slot of a bulkhead taken."""
    with testing.no_leaked_permits():
        yield
