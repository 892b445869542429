"""Limits on calls at once that are learnt from latencies, and their division among classes."""
