"""firmware_demo/run.py as a module, for the tests that build, run and measure what it does."""

from __future__ import annotations

import importlib.util
from typing import Any

from cabi import ROOT

_spec = importlib.util.spec_from_file_location("firmware_demo_run", ROOT / "firmware_demo/run.py")
assert _spec is not None
assert _spec.loader is not None
demo: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo)
