"""Guards from TOML, and back: tables make guards, live guards give tables, and tables update them.

    [guards.vendor]
    idempotent = true

    [[guards.vendor.policies]]
    policy = "retry"
    on = ["ConnectionError", "TimeoutError"]
    attempts = 3
    backoff = 0.1
    budget = true

    [[guards.vendor.policies]]
    policy = "timeout"
    seconds = 2.0

or the recommended stack: `[guards.vendor.standard]` with the arguments of `Guard.standard`. Names
of exceptions are those of Python, of Seawall, and those passed in `names`: a configuration file
never makes the service import or run code.
"""

from seawall.config.reading import guard_from_table, guards_from_toml
from seawall.config.updating import update_from_toml
from seawall.config.writing import guards_to_toml

__all__ = ["guard_from_table", "guards_from_toml", "guards_to_toml", "update_from_toml"]
