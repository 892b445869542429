"""Priority queue of jobs: its state, its jobs, and the index that finds the next one."""
