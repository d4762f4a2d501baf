"""Files of kvp whose functions run, per job: how far a reader has to follow it.

    python -m benchmarks.files_that_run [--list]

Each job runs twice on nano, and the second run counts: what is imported or built once stays out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isgenerator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import kvp
from eval.run import WorkPieces
from kvp import evicting, load_model, load_policy, make_allocator
from train.ranker_training import RankerTraining

ROOT = Path(kvp.__file__).parents[1]
PRODUCT = tuple(f"{ROOT}/{name}/" for name in ("kvp", "trace_collect", "train", "policies", "eval"))


@contextmanager
def _files(files: set[str]) -> Iterator[None]:
    """Add the product's files whose functions run inside the block, in any thread."""

    def note(frame: FrameType, event: str, argument: Any) -> None:  # noqa: ANN401
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PRODUCT):
            files.add(name[len(f"{ROOT}/") :])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _inside(owner: type, name: str, files: set[str]) -> Callable[[], None]:
    """Count what runs inside a method of `owner` from now on; returns what ends it."""
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        files.clear()
        with _files(files):
            done = method(*args, **kwargs)
            return iter(list(done)) if isgenerator(done) else done

    setattr(owner, name, counted)
    return lambda: setattr(owner, name, method)


def _generate() -> tuple[set[str], set[str]]:
    """`evicting` with a policy and budgets per head, and `generate` alone inside it."""
    model, tokenizer = load_model("nano")
    policy, ids = load_policy("nano"), tokenizer("The grass is green. " * 40, return_tensors="pt")
    block: set[str] = set()
    inside: set[str] = set()
    for _ in range(2):
        block.clear()
        inside.clear()
        with _files(block), evicting(model, policy, "25%", allocator=make_allocator("global")):
            model.generate(**ids, max_new_tokens=4)
        with evicting(model, policy, "25%", allocator=make_allocator("global")), _files(inside):
            model.generate(**ids, max_new_tokens=4)
    return block, inside


def _evaluate() -> tuple[set[str], set[str]]:
    """`kvp.evaluate` of a policy, and one of its prompts until the rows are written."""
    whole: set[str] = set()
    prompt: set[str] = set()
    settings: dict[str, Any] = {"tasks": ["niah_single_2"], "prompts": 1, "length": 256}
    settings |= {"policies": ["nano"], "methods": ["full", "kvp+global"]}
    kvp.evaluate(**settings, budgets=["25%"])
    with _files(whole):
        kvp.evaluate(**settings, budgets=["25%"])
    end = _inside(WorkPieces, "do", prompt)
    kvp.evaluate(**settings, budgets=["25%"])
    end()
    return whole, prompt


def _training_step() -> set[str]:
    """The second step of a training by RLOO, with its update of the weights."""
    files: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        kvp.collect(out=f"{folder}/traces", length=256, train=4, validation=1, seed=0)
        end = _inside(RankerTraining, "optimizer_step", files)  # calls training_step and backward
        kvp.train(traces=f"{folder}/traces", out=f"{folder}/policy", steps=2, objective="rloo")
        end()
    return files


def main() -> None:
    """Print the number of files of each job, and with --list their names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="name the files")
    given = parser.parse_args()
    torch.manual_seed(0)
    whole, prompt = _evaluate()
    block, inside = _generate()
    jobs = {
        "evicting with generate inside": block,
        "generate alone": inside,
        "an evaluated prompt": prompt,
        "a training step": _training_step(),
        "kvp.evaluate whole": whole,
    }
    for job, files in jobs.items():
        lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
        print(f"{job}: {len(files)} files of {lines:,} lines")
        if given.list:
            print("".join(f"  {name}\n" for name in sorted(files)), end="")


if __name__ == "__main__":
    main()
