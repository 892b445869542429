"""The rules for source code, one module for each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from seawall.audit.checks import blocking, bounds, lifetimes, retries, timeouts
from seawall.audit.findings import Finding
from seawall.audit.source import SourceFile

__all__ = ["CHECKS"]

CHECKS: Final[tuple[Callable[[SourceFile], Iterator[Finding]], ...]] = (
    timeouts.check,
    retries.check,
    bounds.check,
    blocking.check,
    lifetimes.check,
)
"""Each takes a file and yields what it finds in it."""
