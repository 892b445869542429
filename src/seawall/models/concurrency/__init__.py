"""Concurrency limits learned from latencies, and their division among classes of calls."""
