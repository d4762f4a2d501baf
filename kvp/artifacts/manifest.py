"""JSON files that cannot be half-written or silently altered, and the facts that a run records.

Every artefact of kvp (trace store, policy directory, results folder) is described by such files. A
*sealed* file carries the SHA-256 of its own content, so a damaged one is an error that names it.
What they record never tells where on a machine a file lay. Imports no torch.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvp.artifacts import files
from kvp.artifacts.addresses import Place, is_address
from kvp.errors import KvpError, StoreError
from kvp.own_packages import NAMES
from kvp.version import __version__

GGUF = ".gguf"
"""How names of GGUF files end."""
_PATHS = re.compile(r"(?<![^,=:])[^,=:/]*/[^,=:]*")
"""Parts of a setting that may be a path: `ruler:0.5,notes/chats.jsonl:0.5` has one."""

_NOT_SHOWN = re.compile(
    r" --(?:rank|world[_-]size)[ =]\d+"
    r"|(?<![^\s,:='\"(])(?:~|\.\.)?/(?!/)(?:[^\s,:=]*/)?(?=[^\s/])"
)
"""Removed from recorded commands and notes: rank flags, and folders outside the working folder."""
_PACKAGES = ("torch", "transformers", "numpy", "zarr", "numcodecs", "safetensors", "lightning")


def read_json(path: Place, error: type[KvpError] = StoreError) -> dict[str, Any]:
    """Read a JSON object; raises `error` with one line that names the file if that fails."""
    with files.raising_as(path, error, "is damaged: not valid JSON"):
        content = files.parse_json(files.read_checked(path, error))
    if not isinstance(content, dict):
        raise error(f"{path} is damaged: not a JSON object")
    return content


def write_sealed_json(path: Place, content: Mapping[str, Any], *, new: bool = False) -> bool:
    """`atomic_write_bytes` of a sealed JSON object."""
    text = json.dumps(files.seal_json(content), indent=1, allow_nan=False) + "\n"
    # Innermost lists and objects, such as the numbers of a head, have one line each.
    text = re.sub(r"[\[{][^][{}]*[]}]", lambda part: re.sub(r"\n *", " ", part[0]), text)
    return files.atomic_write_bytes(path, text.encode(), new=new)


def read_sealed_json(path: Place, error: type[KvpError] = StoreError) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote, without the digest; raises `error` if it was altered."""
    content = read_json(path, error)
    with files.raising_as(path, error):
        return files.unseal(content)


@dataclass(frozen=True)
class Format:
    """What tells a kind of sealed file from others: its name and version, which every file has."""

    name: str
    version: int
    older: int | None = None
    """Another version that is read, too."""

    @property
    def head(self) -> dict[str, Any]:
        """The entries that a file of this format begins with."""
        return {"format": self.name, "format_version": self.version}

    def read(self, path: Place, error: type[KvpError]) -> dict[str, Any]:
        """A file of this format, as `read_sealed_json`; raises `error` where it is of another."""
        return self.check(read_sealed_json(path, error), path, error)

    def check(self, content: dict[str, Any], path: Place, error: type[KvpError]) -> dict[str, Any]:
        """The content of a file of this format; raises `error` where it is of another."""
        if (name := content.get("format")) != self.name:
            raise error(f"{path} is of format {name!r:.80}, not {self.name!r}; name another")
        versions = {repr(self.version), repr(self.older)} - {"None"}
        if (version := repr(content.get("format_version"))) not in versions:
            raise error(
                f"{path} has format version {version:.9}, this kvp reads {self.version}: "
                "make it anew"
            )
        return content


def differences(theirs: object, ours: object, name: str = "") -> list[str]:
    """Name every entry in which two JSON values differ: ["data.length: 512 there, 1024 here"].

    An entry that one side lacks is `the default` there: settings are left out where they are.
    """
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        entries = []
        for key in sorted({*theirs, *ours}):
            inner = f"{name}.{key}" if name else str(key)
            there, here = (side.get(key, "the default") for side in (theirs, ours))
            entries += differences(there, here, inner)
        return entries
    return [] if theirs == ours else [f"{name}: {theirs} there, {ours} here"]


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with files.naming(path), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_input(path: Path) -> str:
    """SHA-256 (hex) of a file, or of the names and contents of all files in a folder."""
    if not path.is_dir():
        return sha256_file(path)
    inside = (file for file in sorted(path.rglob("*")) if file.is_file())
    return files.digest_json(
        [[file.relative_to(path).as_posix(), sha256_file(file)] for file in inside]
    )


def own_code(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 (hex) of the files of a user's own modules, by name: `my_task.py`.

    `names` are of modules, or of objects in them: `my_task:Mine`. Modules that are kvp's, were not
    imported, or have no file (a script, a notebook) are left out.
    """
    modules = {name.split(":")[0] for name in names} - {"__main__"}
    users = [module for module in sorted(modules) if module.split(".")[0] not in ("kvp", *NAMES)]
    found = {module: getattr(sys.modules.get(module), "__file__", None) for module in users}
    return {f"{module}.py": sha256_file(Path(file)) for module, file in found.items() if file}


def run_manifest(config: Mapping[str, Any], *, seed: int, **facts: object) -> dict[str, Any]:
    """What produced an artefact: resolved configuration, seed, versions, command, time.

    `config` and `facts` (model, data, ...) hold JSON values; of local paths the last part is kept
    in `config`, and in `command` where they lead out of the working folder. `created` and `command`
    differ between identical runs; compare the rest instead.
    """
    from importlib.metadata import PackageNotFoundError, version  # too slow for --help

    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "config": portable(config),
        "seed": seed,
        **facts,
        "kvp": __version__,
        "python": sys.version.partition(" ")[0],
        "packages": packages,
        "command": [Path(sys.argv[0]).name, *map(_shorten_argument, sys.argv[1:])],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def recorded_name(model: str) -> str:
    """What artefacts call a model; digests tell models of one name apart.

    `nano` and hub ids as they are, a folder's own name, a GGUF file's without its ending.
    """
    path = Path(model)
    return path.stem if model.endswith(GGUF) and path.is_file() else _last_part(model)


def portable(value: Any) -> Any:  # noqa: ANN401 - anything JSON can hold
    """A JSON value in which local paths are their last parts; addresses and hub ids stay."""
    if isinstance(value, Mapping):
        return {portable(key): portable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry) for entry in value]
    if not isinstance(value, str) or is_address(value) or "://" in value:
        return value
    return _PATHS.sub(lambda match: _last_part(match[0]), value)


def shown_text(recorded: str | Sequence[str]) -> str:
    """A recorded note or command for readers, without rank flags and without folders elsewhere."""
    text = recorded if isinstance(recorded, str) else shlex.join(recorded)
    return _NOT_SHOWN.sub("", text)


def _shorten_argument(argument: str) -> str:
    """An argument as it was typed; of paths out of the working folder the last part."""
    outside = any(part.startswith(("/", "~", "..")) for part in _PATHS.findall(argument))
    return str(portable(argument)) if outside else argument


def _last_part(name: str) -> str:
    """The last part of a path on this machine; anything else as it is."""
    path = Path(name)
    local = name.startswith(("/", "~", ".")) or ("/" in name and path.exists())
    return (path.resolve().name or name) if local else name
