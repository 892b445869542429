"""`python -m seawall.demo`."""

from __future__ import annotations

import sys

from seawall.demo import main

if __name__ == "__main__":
    sys.exit(main())
