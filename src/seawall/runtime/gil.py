"""Whether plain counters are safe without a lock.

With a global interpreter lock, a read, a change and a write of one attribute with no call and no
loop in between are not interrupted (CPython 3.11 to 3.15). A free-threaded build gives no such
guarantee: there the same work is done under the lock.
"""

from __future__ import annotations

import sys
from typing import Final

LOCK_FREE: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()
