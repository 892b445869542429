"""Pools of connections are tested with a real PostgreSQL."""

from __future__ import annotations

from tests.durable.conftest import postgres

__all__ = ["postgres"]
