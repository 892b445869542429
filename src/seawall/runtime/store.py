"""The protocol between policies and a store; `seawall.redis` implements it."""

from __future__ import annotations

from typing import Protocol

from seawall.runtime.breaker_share import BreakerStore
from seawall.runtime.limit_share import LimitStore


class Store(BreakerStore, LimitStore, Protocol):
    """A store that keeps everything that policies share."""
