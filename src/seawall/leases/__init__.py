"""Leases: one holder over all pods, kept in Redis, PostgreSQL or SQLite."""

from seawall.leases.lease import Lease

__all__ = ["Lease"]
