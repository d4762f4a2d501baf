"""Makes `reference`, the independent NumPy implementations, importable by the tests beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
