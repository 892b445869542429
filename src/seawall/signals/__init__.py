"""Load signals: how near something is to its limit, as one number that is cheap to read.

A signal is any function without arguments that returns a number: 1.0 at the limit, more beyond it.
So `lambda: 0.5` is one. The signals of this package cache their value briefly, keep it when it
cannot be read, and have a `snapshot()`.
"""

from seawall.signals._policies import in_flight, occupancy, queue_time, thread_queue
from seawall.signals._process import gc_pauses, loop_lag, process_cpu, process_memory
from seawall.signals._signal import Signal, highest, latched, smoothed

__all__ = [
    "Signal",
    "gc_pauses",
    "highest",
    "in_flight",
    "latched",
    "loop_lag",
    "occupancy",
    "process_cpu",
    "process_memory",
    "queue_time",
    "smoothed",
    "thread_queue",
]
