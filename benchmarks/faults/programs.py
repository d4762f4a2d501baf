"""The programs that are disturbed, with small work for each, and what reads what they write."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.faults.harness import Child
from kvp.artifacts.addresses import Place, place
from kvp.errors import KvpError
from kvp.program import table as programs

Reader = Callable[[Place], object]
_PROMPTS = "--tasks niah_single_1 --length 160 --max_new_tokens 4"
_COLLECT = "--train 1 --validation 1 --labels kvzip"
_TRAIN = (
    "--traces {made}/traces --hidden 4 --steps 4 --contexts 1 --min_prefix 32 --validate_every 2 "
    "--checkpoint_every 1 --validation_contexts 1"
)
_EVAL = f"{_PROMPTS} --methods full,knorm,snapkv --prompts 2 --budgets 25%,50% --timing_prompts 1"
_TUNE = (
    f"{_PROMPTS} --methods knorm,snapkv --settings_per_method 3 --allocators uniform --prompts 1 "
    "--budgets 25% --protocols query_aware"
)
_EVOLVE = (
    f"{_PROMPTS} --scorer knorm --search_prompts 1 --holdout 0 --budget 25% --generations 1 "
    "--group 5"
)


@dataclass(frozen=True)
class Command:
    """A program, its flags, and what reads its output; `{made}` are artefacts (`make`)."""

    program: str
    flags: str
    read: Reader
    folder: bool = True
    """Whether `--out` is a folder that it claims."""

    def work(self, made: Path, out: str) -> Callable[[], object]:
        """A call of the program."""
        words = [word.format(made=made, out=out) for word in self.flags.split()]
        return partial(programs.run_program, self.program, words)

    def content(self, out: str) -> Callable[[], dict[str, object]]:
        """A call of the reader."""
        return partial(read_or_refuse, self.read, place(out))


def read_or_refuse(read: Reader, folder: Place) -> dict[str, object]:
    """What a reader finds, or the line that refuses it."""
    try:
        return {"value": read(folder)}
    except KvpError as error:
        return {"refused": str(error)}


def digest(content: object) -> str:
    """SHA-256 of anything JSON can hold; tensors by their bytes."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    return str(value)


def read_traces(folder: Place) -> str:
    """Digest of everything a trace store gives its readers."""
    from kvp.store import TraceReader

    reader = TraceReader(folder)
    traces = [vars(reader.trace(record.index)) for record in reader.records()]
    return digest([str(reader.plan), reader.complete, reader.output_gram(), traces])


def read_policy(folder: Place) -> str:
    """Digest of a policy's weights, calibration and what it says of itself."""
    from policies.policy_files import load_policy

    policy = load_policy(str(folder))
    calibration = policy.calibration and policy.calibration.to_dict()
    return digest([policy.rankers.state_dict(), calibration, str(policy.geometry)])


def read_results(folder: Place) -> str:
    """Digest of what a results folder holds, in any order; times are left out."""
    from eval.results.folder import load_results

    results = load_results(str(folder))
    records = [
        digest({name: value for name, value in record.items() if "seconds" not in name})
        for record in results.records
    ]
    torn = [note for note in results.notes if "torn" in note]
    return digest([sorted(records), len(results.timing), torn])


def read_settings(folder: Place) -> str:
    """Digest of what kvp tune chose."""
    from eval.results.tuned_settings import load_settings

    return digest(load_settings(Path(str(folder))).to_json())


def read_budgets(folder: Place) -> str:
    """Digest of what a budget file decides (a resumed search took other seconds)."""
    from policies.budget_files import load_budgets

    budgets = load_budgets(str(folder))
    return digest([str(budgets.counts), budgets.scorer, str(budgets.protection)])


def read_page(folder: Place) -> str:
    """Digest of a report."""
    return hashlib.sha256((folder / "page.html").read_bytes()).hexdigest()


def read_contexts(folder: Place) -> str:
    """Digest of the tensors of contexts."""
    from kvp.contexts import read_context

    return digest([read_context(path).tensors for path in sorted(Path(str(folder)).iterdir())])


COMMANDS = {
    command.program: command
    for command in (
        Command("collect", f"{_PROMPTS} {_COLLECT} --out {{out}}", read_traces),
        Command("train", f"{_TRAIN} --out {{out}}", read_policy),
        Command("merge", "--shards {made}/first,{made}/second --out {out}", read_policy),
        Command("eval", f"{_EVAL} --out {{out}}", read_results),
        Command("tune", f"{_TUNE} --out {{out}}", read_settings),
        Command("evolve", f"{_EVOLVE} --out {{out}}", read_budgets),
        Command("report", "{made}/results --out {out}/page.html", read_page, folder=False),
    )
}


_MADE = {
    "traces": ("collect", ""),
    "policy": ("train", ""),
    "first": ("train", "--heads 0:10"),
    "second": ("train", "--heads 10:20"),
    "results": ("eval", "--policies {made}/policy --methods full,kvp"),
    "tuned": ("tune", ""),
    "budgets": ("evolve", ""),
    "unfinished train": ("train", "train.run._export"),
    "unfinished evolve": ("evolve", "eval.evolve.run.save_budgets"),
    "unfinished eval": ("eval", "eval.run.measure_times"),
}
"""The program of each artefact, and more flags; of unfinished ones, the function it ends at."""


def make(made: Path, names: Iterable[str] = (*_MADE, "contexts")) -> None:
    """Make artefacts, each in a child; RuntimeError, with the program's words, where one fails."""
    torch.set_num_threads(1)  # before any fork: a child has none of its parent's threads
    for name in COMMANDS:
        programs.load(programs.PROGRAMS[name].run)
    for name, (program, more) in _MADE.items():
        if name not in names:
            continue
        command, stop = COMMANDS[program], name.startswith("unfinished")
        flags = command.flags if stop else f"{command.flags} {more}"
        work = Command(program, flags, command.read).work(made, f"{made}/{name}")
        _done(name, partial(_interrupted, work, more) if stop else work)
    if "contexts" in names:
        _done("contexts", partial(_write_context, made / "contexts"))


def _done(name: str, work: Callable[[], object]) -> None:
    """Do work in a child, and import its modules here, so that later children need not."""
    ended = Child(lambda: work() or {"modules": sorted(sys.modules)}).wait(300)
    if ended.code != 0:
        raise RuntimeError(f"{name} ended with {ended.code}: {ended.error[-2000:]}")
    for module in (ended.value or {}).get("modules", ()):
        with suppress(Exception):
            import_module(module)


def _interrupted(work: Callable[[], object], function: str) -> object:
    """Run a program up to the call of a function."""
    module, _, name = function.rpartition(".")

    def stop(*_: object, **__: object) -> None:
        raise SystemExit(0)

    setattr(import_module(module), name, stop)
    return work()


def _write_context(folder: Path) -> None:
    from kvp import compress, load_model

    model, tokenizer = load_model("nano")
    text = "The grass is green. " * 40
    compress(model, tokenizer, text, "nano", budget="25%", allocator="global").write(folder)
