"""Every program in one table."""

from dataclasses import dataclass
from typing import Any

from kvp.own_packages import import_own


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
        "train.merge:run",
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


def load(name: str) -> Any:  # noqa: ANN401
    """The object `module:name` of kvp or a sister package."""
    module, _, attribute = name.partition(":")
    return getattr(import_own(module), attribute)
