"""Executors: CPU-bound work in processes or threads, blocking I/O in threads."""

from seawall.resources.executors.executors import CpuPool, IoPool

__all__ = ["CpuPool", "IoPool"]
