"""The priority queue: its state, its jobs, and the index by which it finds the next one."""
