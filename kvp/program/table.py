"""Every program in one table, and how the command `kvp` and the console scripts start one.

Whatever a program needs is imported when it is started, so that `--help` imports no torch.
Importing this module makes the process find kvp's own packages before a user's of the same names,
also in the processes that it starts.
"""

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvp.errors import UsageError, did_you_mean
from kvp.own_packages import import_own, prefer_own_packages
from kvp.program.command_line import parse_arguments
from kvp.program.exit_codes import call_program
from kvp.version import __version__

prefer_own_packages()
# Threads that wait in a loop take the cores of others: on a busy machine kvp eval took four times
# the processor time. It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass(frozen=True)
class Program:
    """A program: what it reads, what it runs, and what --help says of it."""

    config: str | None
    """Class of its settings, `module:name`; None where `run` reads the arguments itself."""
    run: str
    """What is called with the config, `module:name`."""
    description: str
    """The first sentence is its line in `kvp --help`."""
    examples: tuple[str, ...] = ()


SCRIPTS = ("collect", "train", "eval", "report")
"""Programs that are console scripts, too: `kvp-train` and `kvp train` are the same."""

PROGRAMS = {
    "collect": Program(
        "trace_collect.config:CollectConfig",
        "trace_collect.run:run",
        "Store the queries, keys and values of a model's attention over prompts. The result is a "
        "trace store, the input of kvp train. Says how many bytes it will write before it does; "
        "repeating an interrupted command continues it.",
        (
            "kvp collect --out runs/traces",
            "kvp collect --model Qwen/Qwen2.5-7B-Instruct --length 4096 --out traces/qwen "
            "--dry_run",
        ),
    ),
    "train": Program(
        "train.config:TrainConfig",
        "train.run:run",
        "Train one eviction ranker per KV head. It learns from a trace store and becomes a policy "
        "directory. An interrupted command continues where it was. Settings of ranker, objective, "
        "optimizer and contexts come from --preset, whose values --help shows.",
        (
            "kvp train --traces runs/traces --out runs/policies",
            "kvp train --traces traces/qwen --device cuda --out policies/qwen",
        ),
    ),
    "eval": Program(
        "eval.config:EvalConfig",
        "eval.run:run",
        "Measure KV-cache eviction. Model, policies, methods, tasks and budgets become a results "
        "folder. One prefill of a prompt serves every method and budget. Interrupted runs resume, "
        "finished ones can be extended. `kvp list` prints methods and allocators.",
        (
            "kvp eval --policies runs/policies --prompts 10 --out runs/results",
            "kvp eval --methods full,snapkv --tasks data --data my.jsonl --metric f1 "
            "--out runs/mine",
        ),
    ),
    "report": Program(
        "eval.report.config:ReportConfig",
        "eval.report.page:run",
        "Turn a results folder of kvp eval into one HTML page. It opens without a network.",
        ("kvp report runs/results",),
    ),
    "list": Program(
        "kvp.program.settings:Group",
        "eval.method_listing:run",
        "Print methods and allocators, with presets and options.",
        ("kvp list",),
    ),
    "tune": Program(
        "eval.tune.config:TuneConfig",
        "eval.tune.run:run",
        "Choose options, allocator and protection of every method on validation prompts. Each "
        "method has the same number of settings, in every protocol, and up to as many again while "
        "its best number is at an end of what was tried. Writes settings.json, which kvp eval runs "
        "as `--methods tuned:FOLDER`. Interrupted runs resume, finished ones "
        "can be extended by methods, settings or prompts.",
        (
            "kvp tune --methods snapkv,tova,h2o --tasks niah_single_1,niah_multikey_1 "
            "--out runs/tuned",
            "kvp eval --methods full,nulls,tuned:runs/tuned --out runs/test",
        ),
    ),
    "evolve": Program(
        "eval.evolve.config:EvolveConfig",
        "eval.evolve.run:run",
        "Choose budgets per layer by evolution (EvolKV). Writes budgets.json, which any method "
        "uses as allocator `evolved:FILE`. Interrupted searches resume.",
        (
            "kvp evolve --scorer snapkv --tasks niah_multikey_1 --budget 12.5% --out runs/budgets",
            "kvp eval --methods snapkv,snapkv+evolved:runs/budgets --out runs/results",
        ),
    ),
    "merge": Program(
        "train.config:MergeConfig",
        "train.head_shards:run",
        "Join policies of some KV heads each, written by kvp train --heads. The result is the "
        "policy that one run of all heads would have written.",
        (
            "kvp train --traces runs/traces --heads 0:8 --out runs/first",
            "kvp merge --shards runs/first,runs/second --out runs/policies",
        ),
    ),
    "compress": Program(
        "eval.compress_config:CompressConfig",
        "eval.compress:run",
        "Compress contexts for vLLM, llama-server and transformers. Each text is read once, a "
        "policy or a method chooses the tokens of every KV head, and a context file is written "
        "that these engines go on from (docs/engines.md). Prints a line of JSON for each, with "
        "the token ids that stand for it in a prompt.",
        (
            "kvp compress manual.txt --model Qwen/Qwen2.5-7B-Instruct --dtype bfloat16 --device "
            "cuda --method keydiff --out contexts",
            "kvp compress manual.txt --gguf models/smollm2.gguf --policy smollm2-135m-instruct "
            "--out contexts",
        ),
    ),
    "lm-eval": Program(
        None, "eval.lm_harness.cli:main", "Run lm-evaluation-harness with evicted caches."
    ),
}


def run_program(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one program with its arguments, by default the process's, and return the exit code.

    It is that of `call_program`, whose signals and errors hold from the first import on.
    """
    program, prog = PROGRAMS[name], f"kvp {name}"
    words = sys.argv[1:] if argv is None else argv
    if program.config is None:
        code: int = load(program.run)(words)
        return code

    def run() -> None:
        settings = load(str(program.config))
        config = parse_arguments(
            settings, words, prog=prog, description=program.description, examples=program.examples
        )
        config.check_names()
        load(program.run)(config)

    return call_program(run, prog)


collect, train, evaluate, report = (partial(run_program, name) for name in SCRIPTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvp PROGRAM ...`; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""
    if name in PROGRAMS:
        return run_program(name, words[1:])

    def run() -> None:
        if name in ("--help", "-h", "--version"):
            print(f"kvp {__version__}" if name == "--version" else _overview(), flush=True)
            return
        unknown = f"unknown program {name!r}{did_you_mean(name, PROGRAMS)}"
        raise UsageError(f"{unknown if words else 'name a program'}: {', '.join(PROGRAMS)}")

    return call_program(run, "kvp")


def load(name: str) -> Any:  # noqa: ANN401
    """The object `module:name` of kvp or a sister package."""
    module, _, attribute = name.partition(":")
    return getattr(import_own(module), attribute)


def _overview() -> str:
    width = max(map(len, PROGRAMS))
    rows, wrapper = [], textwrap.TextWrapper(100, "  ", " " * (width + 8))
    for name, program in PROGRAMS.items():
        line = program.description.partition(". ")[0].rstrip(".")
        rows += wrapper.wrap(f"kvp {name:<{width}}  {line}")
    return "\n".join(["usage: kvp PROGRAM ... (each has --help)", "", *rows])
