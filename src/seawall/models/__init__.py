"""Pure models: state machines without clock, lock, randomness or I/O.

Each module implements the rules of one mechanism. The driver (an in-memory gate, a script in a
store, the simulator) passes in the time and random numbers, and holds the lock.
"""
