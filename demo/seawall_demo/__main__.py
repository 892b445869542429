"""`python -m seawall_demo`."""

from __future__ import annotations

import sys

from seawall_demo import main

if __name__ == "__main__":
    sys.exit(main())
