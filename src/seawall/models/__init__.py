"""The rules, pure: no clock, lock, randomness or I/O; time and chance are passed in.

Each module holds one mechanism's mathematics as a small state machine. Whoever drives it (a gate
in memory, a script in a store, the simulator) brings the clock and the lock.
"""
