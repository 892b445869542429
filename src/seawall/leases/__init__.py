"""Leases: one holder over all pods, kept in Redis, PostgreSQL or SQLite."""
