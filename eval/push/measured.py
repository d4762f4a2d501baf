"""Results of one policy, next to those of the methods it was run with, for its card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from eval.results.load import load_results
from eval.results.records import UNIFORM
from eval.summary import Line, budget_order, headlines
from kvp.errors import UsageError
from kvp.manifest import sha256_file
from policies.policy_files import Shard
from policies.sources import INDEX


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """Means of every method and budget under one protocol."""

    title: str
    budgets: tuple[str, ...]
    """Column titles, shares of the cache first."""
    rows: tuple[tuple[str, ...], ...]
    """Method, then a mean and its interval for every budget; empty where it was not run."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a results folder says of a policy."""

    tables: tuple[ResultTable, ...]
    allocator: str
    """Rule that split the budget between the heads in the policy's records; of several, the
    first in the alphabet that is not `uniform`."""
    setup: str
    """Model, lengths and prompts in one sentence."""
    commands: tuple[str, ...]
    """Command lines that measured it, as they were given."""


def measured(folder: Path, policy: Shard, resamples: int) -> Measured:
    """Read `folder` and estimate what it says of `policy` and of methods without a policy.

    Raises ResultsError where the folder is damaged, UsageError where it holds no results of this
    policy, which is recognised by the digest of its index.
    """
    results = load_results(folder)
    digest = sha256_file(policy.source.folder / INDEX)
    labels = {name for name, other in results.manifest["policies"].items() if other == digest}
    records = [record for record in results.records if record["policy"] in {None, *labels}]
    if not any(record["policy"] in labels for record in records):
        raise UsageError(
            f"--results {folder} holds no results of {policy.source.name} as it is: evaluate this "
            "policy with kvp-eval, or name another folder"
        )
    shown = headlines(records, resamples=resamples, seed=int(results.manifest.get("seed") or 0))
    tables = [
        *_tables(shown.scores, "mean score, %", 100, 1),
        *_tables(shown.losses, "perplexity of given replies", 1, 2),
    ]
    rules = {record["allocator"] for record in records if record["policy"] in labels}
    return Measured(
        allocator=next(iter(sorted(rules - {UNIFORM})), UNIFORM),
        tables=tuple(tables),
        setup=_setup(records, results.manifest),
        commands=_commands(results.manifest),
    )


def _tables(lines: Sequence[Line], what: str, scale: int, digits: int) -> Iterable[ResultTable]:
    for protocol in dict.fromkeys(line.protocol for line in lines):
        of_protocol = [line for line in lines if line.protocol == protocol]
        budgets = sorted({key for line in of_protocol for key in line.cells}, key=budget_order)
        yield ResultTable(
            title=f"{protocol}: {what}",
            budgets=tuple(budgets),
            rows=tuple(
                (line.label, *(_cell(line, budget, scale, digits) for budget in budgets))
                for line in of_protocol
            ),
        )


def _cell(line: Line, budget: str, scale: int, digits: int) -> str:
    value = line.cells.get(budget)
    if value is None:
        return ""
    mean, low, high = (f"{x * scale:.{digits}f}" for x in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"


def _setup(records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> str:
    identity = manifest["identity"]
    prompts = {(record["task"], record["example"]) for record in records}
    tasks = sorted({task for task, _ in prompts})
    weights = identity.get("model_digest", {}).get("weights", "")[:12]
    return (
        f"{len(prompts)} {identity['split']} prompts of {', '.join(tasks)}, at most "
        f"{identity['length']} tokens, on `{identity['model']}`"
        f"{f' (weights {weights})' if weights else ''} in {identity['dtype']}"
    )


def _commands(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    runs = [*manifest.get("earlier_runs", []), manifest]
    return tuple(dict.fromkeys(join(run["command"]) for run in runs if run.get("command")))
