"""Makes `reference`, the independent NumPy implementations, importable by the tests here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
