"""Names of models and files as artefacts record them: none tells where a file lay. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvp.artifacts.addresses import is_address
from kvp.errors import ModelError

GGUF = ".gguf"
"""How names of GGUF files end."""
_PATHS = re.compile(r"[^,=:]*/[^,=:]*")
"""Parts of a setting that may be a path: `ruler:0.5,notes/chats.jsonl:0.5` has one."""


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name means: itself, or the only one of a folder without config.

    Raises ModelError where a folder holds several.
    """
    path = Path(name)
    if name.endswith(GGUF):
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise ModelError(f"--model {name}: this folder holds {len(files)} GGUF files, name one")
    return files[0] if files else None


def recorded_name(model: str) -> str:
    """What artefacts call a model; digests tell models of one name apart.

    `nano` and hub ids as they are, a folder's own name, a GGUF file's without its ending.
    """
    file = gguf_file(model)
    return _last_part(model) if file is None else file.stem


def portable(value: Any) -> Any:  # noqa: ANN401 - anything JSON can hold
    """A JSON value in which local paths are their last parts; addresses and hub ids stay."""
    if isinstance(value, Mapping):
        return {portable(key): portable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry) for entry in value]
    if not isinstance(value, str) or is_address(value) or "://" in value:
        return value
    return _PATHS.sub(lambda match: _last_part(match[0]), value)


def _last_part(name: str) -> str:
    """The last part of a path on this machine; anything else as it is."""
    path = Path(name)
    local = name.startswith(("/", "~", ".")) or ("/" in name and path.exists())
    return (path.resolve().name or name) if local else name
