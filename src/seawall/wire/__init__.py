"""Text formats that cross process borders: deadlines, criticality, attempts, keys, limits.

Promises:

- Every parser is pure and accepts untrusted input: it returns None for input that it does not
  understand, and never raises.
- Input longer than 8 KiB is ignored, and parsing takes time linear in the length.
"""
