"""Compute drawn cells of a results folder again; exit code 1 where one differs.

python -m benchmarks.recompute RESULTS --cells 20 --seed 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.recompute.cells import Bench, Row, differences, draw, setting_of
from benchmarks.recompute.forward import MaskedModel
from benchmarks.recompute.keep import ALLOCATORS
from benchmarks.recompute.scorers import SCORERS
from eval.methods import policy_sources
from eval.results.folder import MANIFEST, ROWS, read_manifest
from eval.results.records import method_label
from eval.tasks import Prompt, load_prompts
from kvp.artifacts.jsonl import JsonLines
from kvp.config_groups import split_list
from kvp.data.task import TaskSettings
from kvp.errors import ResultsError
from kvp.exit_codes import guarded
from kvp.hf.identity import model_identity
from kvp.hf.loading import load_tokenizer, local_folder
from kvp.manifest import sha256_file

PROMPT_SETTINGS = (
    "split", "seed", "length", "essays", "chat", "text", "data", "continuation_tokens", "squad",
    "hotpotqa", "where", "tree_paths",
)  # fmt: skip
"""Settings of prompts in the identity of a results folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, compute again, print a line per cell; 0 where all agree, 1 where not, 2 on an error."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path, help="folder that kvp-eval wrote")
    parser.add_argument("--cells", type=int, default=20, help="how many to draw (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--model", help="as of kvp-eval; default: the name that its run recorded")
    parser.add_argument("--policies", help="as of kvp-eval; default: the names that it recorded")
    given = parser.parse_args(arguments)
    wrong: list[str] = []
    code = guarded(lambda: wrong.extend(_run(given)), "recompute")
    return code or int(bool(wrong))


def _run(given: argparse.Namespace) -> list[str]:
    """Names of the cells that differ."""
    if not (given.results / MANIFEST).is_file():
        raise ResultsError(f"{given.results} has no {MANIFEST}: name a folder that kvp-eval wrote")
    manifest = read_manifest(given.results / MANIFEST)
    identity = manifest["identity"]
    if identity["dtype"] != "float32":
        raise ResultsError(
            f"{given.results} was computed in {identity['dtype']}: rounding changes its answers; "
            "use a folder of --dtype float32"
        )
    rows = list(JsonLines(given.results / ROWS))
    possible = [row for row in rows if setting_of(row) is not None]
    if not possible:
        raise ResultsError(f"{given.results / ROWS} has no row that can be computed again")
    print(_coverage(rows, possible))
    disable_progress_bar()  # type: ignore[no-untyped-call]
    drawn = draw(possible, given.cells, given.seed)
    name = given.model or identity["model"]
    tokenizer = load_tokenizer(name, revision=identity["revision"])
    model = MaskedModel(str(local_folder(name) or name), identity["revision"])
    _check_model(name, manifest, model, tokenizer)
    policies = _policies(manifest, drawn, given.policies)
    bench = Bench(model, tokenizer, policies, identity)
    prompts = _prompts(drawn, rows, identity, tokenizer)
    print(HEADER)
    wrong = []
    for row in drawn:
        found = bench.recompute(row, prompts[row["task"], row["example"]])
        differing = differences(row, found)
        print(_line(row, found, differing), flush=True)
        if differing:
            wrong.append(_name(row))
    print(f"{len(drawn) - len(wrong)} of {len(drawn)} cells are the same")
    return wrong


def _coverage(rows: Sequence[Row], possible: Sequence[Row]) -> str:
    """What is drawn from, and what is not."""
    left_out = {_label(row) for row in rows} - {_label(row) for row in possible}
    sentence = f"computed again: full, kvp, {', '.join(SCORERS)}, with {', '.join(ALLOCATORS)}"
    return f"{sentence}\nnot drawn: {', '.join(sorted(left_out)) or 'nothing'}"


def _check_model(
    name: str, manifest: Mapping[str, Any], model: MaskedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    identity = manifest["identity"]
    there = model_identity(name, identity["revision"], model.model, tokenizer)
    if identity.get("model_digest", there) != there:
        raise ResultsError(
            f"{name} is not the model of this folder any more: its weights or its "
            "tokenizer differ; evaluate again"
        )


def _policies(
    manifest: Mapping[str, Any], drawn: Sequence[Row], given: str | None
) -> Mapping[str, Path]:
    """Folder of every policy that is drawn, checked by its digest."""
    labels = {row["policy"] for row in drawn if row["policy"] is not None}
    runs = [manifest, *manifest.get("earlier_runs", [])]
    arguments = given or ",".join(run["config"]["policies"] for run in runs)
    sources = policy_sources(split_list(arguments)) if labels else {}
    folders = {label: source.folder for label, source in sources.items()}
    for label in sorted(labels):
        if label not in folders:
            raise ResultsError(
                f"no policy {label!r} there; name its folder: --policies {label}=DIR"
            )
        if sha256_file(folders[label] / "policy.json") != manifest["policies"][label]:
            raise ResultsError(f"{folders[label]} is not the policy {label!r} of this folder")
    return folders


def _prompts(
    drawn: Sequence[Row],
    rows: Sequence[Row],
    identity: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[tuple[str, str], Prompt]:
    """Prompts of the drawn rows by task and example."""
    settings = {name: identity[name] for name in PROMPT_SETTINGS}
    measure = identity["measure"]
    prompts = {}
    for task in dict.fromkeys(row["task"] for row in drawn):
        count = len({row["example"] for row in rows if row["task"] == task})
        made, _ = load_prompts(
            task, TaskSettings(count=count, **settings), tokenizer, measure=measure
        )
        prompts.update({(task, prompt.sample.id): prompt for prompt in made})
    for row in drawn:
        if (row["task"], row["example"]) not in prompts:
            raise ResultsError(f"prompt {row['example']} of {row['task']} is not made any more")
    return prompts


HEADER = (
    f"{'method':32} {'budget':>6}  {'protection':10} {'question':8}  {'task':16} {'prompt':>6}  "
    "tokens kept, answer in the folder / computed again"
)


def _line(row: Row, found: Mapping[str, Any], differing: Sequence[str]) -> str:
    same = f"DIFFERS in {', '.join(differing)}" if differing else "same"
    if "nll" in found:
        values = f"{row['nll']:.4f} / {found['nll']:.4f} nats"
    else:
        values = f"{row['score']:.2f} / {found['score']:.2f}"
        values += f"  {row['prediction']!r:.32} / {found['prediction']!r:.32}"
    kept = f"{found['kept_tokens']:g} of {row['cached_tokens']}"
    return f"{_name(row)}  {kept:12} {same}: {values}"


def _name(row: Row) -> str:
    protection = "on" if row["protected"] else "off"
    question = "seen" if row["protocol"] == "query_aware" else "not seen"
    return (
        f"{_label(row):32} {row['budget_spec'] or 'all':>6}  {protection:10} {question:8}  "
        f"{row['task']:16} {row['example'].rpartition('/')[2]:>6}"
    )


def _label(row: Row) -> str:
    policy = "" if row["policy"] is None else f"/{row['policy']}"
    return method_label(row["method"] + policy, row["variant"], row["allocator"])


if __name__ == "__main__":
    sys.exit(main())
