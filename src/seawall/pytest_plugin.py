"""A pytest plugin: `pytest -p seawall.pytest_plugin`, or the fixtures in a conftest.py.

from seawall.pytest_plugin import empty_registry, instant_retries, virtual_time
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seawall import testing
from seawall.clock import VirtualClock


@pytest.fixture
def empty_registry() -> Iterator[None]:
    """Give a test a registry without guards, and close those that it makes."""
    with testing.empty_registry():
        yield


@pytest.fixture
def policies_off() -> Iterator[None]:
    """Let all guards call their functions directly during a test."""
    with testing.policies_off():
        yield


@pytest.fixture
def instant_retries() -> Iterator[None]:
    """Leave out the pauses between attempts during a test."""
    with testing.retries("instant"):
        yield


@pytest.fixture
def virtual_time() -> Iterator[VirtualClock]:
    """Return the virtual clock of all guards that the test makes.

    An async test runs in `run_virtual(main(), clock=virtual_time)`: the loop has the same time.
    """
    with testing.virtual_time() as clock:
        yield clock


@pytest.fixture
def no_leaked_permits() -> Iterator[None]:
    """Fail a test that leaves a slot of a bulkhead taken."""
    with testing.no_leaked_permits():
        yield
