"""What crosses process borders, as text: deadlines, criticality, attempts, keys, limits.

Every parser here is pure and takes what strangers send: it returns None for whatever it does not
understand, never raises, ignores what is longer than 8 KiB, and takes time linear in the length.
"""
