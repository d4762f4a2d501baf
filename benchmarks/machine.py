"""The machine that a benchmark ran on, recorded with every result."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Hardware, versions and commit of a measurement, and the load of the last minute.

    `changed` tells whether files of Python differ from the commit.
    """
    code = "import torch; c = torch.cuda; print(torch.__version__, "
    code += "c.get_device_name() if c.is_available() else '', sep='|')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch_version, gpu = made.stdout.strip().split("|")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": gpu or None,
        "torch": torch_version,
        "commit": _git("rev-parse", "HEAD") or None,
        "changed": bool(_git("status", "--porcelain", "--", "*.py")),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _git(*words: str) -> str:
    """What git says of the repository; nothing where there is none."""
    call = ["git", "-C", str(Path(__file__).parents[1]), *words]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()
