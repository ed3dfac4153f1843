"""``python -m kbt_edge`` is ``kbt-edge``."""

from __future__ import annotations

import sys

from kbt_edge.cli import main

if __name__ == "__main__":
    sys.exit(main())
