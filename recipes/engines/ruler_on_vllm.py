"""RULER's questions about compressed and whole contexts, answered by vLLM and by transformers.

    python recipes/engines/ruler_on_vllm.py --model MODEL --methods POLICY,POLICY+uniform,keydiff
        --budgets 25%,12.5% --tasks vt,fwe --prompts 3 --length 2048 --essays DIR --out FILE.jsonl

vLLM compresses by the first method itself, unless its cache is quantised, and loads the files of
all others, which transformers writes. A row has both answers and their scores; a stopped run goes
on. At the end FILE.csv has the means in %, with 95 % intervals, and vLLM's paired differences from
transformers and from the full cache. In an environment with vLLM (docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from kvp.specification import split_list

try:
    import vllm
    from vllm.config import KVTransferConfig
except ImportError:
    sys.exit("ruler_on_vllm.py needs vllm: README, Serve it, has the commands")

from eval.results.stats import Interval, Scores, bootstrap_mean, paired_difference
from kvp import load_model
from kvp.budgets import parse_budget
from kvp.contexts import Context, plan_context
from kvp.data.encode import Encoded, encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples, find_task
from kvp.hf.attention import use_kvp_attention
from kvp.hf.contexts import context_of, load_context
from kvp.hf.prefill import prefill
from kvp.hf.shrink import gather
from kvp.names import FULL
from kvp.protection import Protection
from kvp.ranking import score_and_select
from kvp.vllm.settings import configured_method

NEW_TOKENS, SEED = 64, 6201


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--methods", required=True, help="METHOD[+ALLOCATOR] or POLICY[+ALLOCATOR]")
    parser.add_argument("--budgets", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--prompts", type=int, required=True, help="of each task")
    parser.add_argument("--length", type=int, required=True, help="tokens at most")
    parser.add_argument("--essays", required=True, help="folder of texts around the needles")
    parser.add_argument("--kv_cache_dtype", default="auto", help="vLLM's, such as fp8")
    parser.add_argument("--out", type=Path, required=True, help="rows, JSONL")
    return parser


class Both:
    """A model in transformers and in vLLM with kvp's connector."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        self.folder, self.methods = folder, split_list(given.methods)
        self.compresses = self.methods[0] if given.kv_cache_dtype == "auto" else None
        self.model, self.tokenizer = load_model(given.model, dtype="bfloat16")
        policy = {} if self.compresses is None else {"policy": self.compresses}
        self.engine = vllm.LLM(
            given.model, dtype="bfloat16", enforce_eager=True, block_size=32,
            max_model_len=given.length + 1024, kv_cache_dtype=given.kv_cache_dtype,
            enable_prefix_caching=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvpConnector", kv_connector_module_path="kvp.vllm.connector",
                kv_role="kv_both", kv_connector_extra_config={
                    "contexts": folder, "uneven": True, "memory_gb": 0.5, **policy,
                },
            ),
        )  # fmt: skip

    def ask_vllm(self, ids: Sequence[int], tokens: int, **options: object) -> vllm.RequestOutput:
        """The greedy answer of vLLM."""
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, **options)
        return self.engine.generate({"prompt_token_ids": list(ids)}, sampling, use_tqdm=False)[0]

    def ask_transformers(self, ids: Sequence[int], **options: object) -> str:
        """The greedy answer of transformers."""
        out = self.model.generate(  # type: ignore[operator]
            torch.tensor([list(ids)]), max_new_tokens=NEW_TOKENS, do_sample=False,
            repetition_penalty=1.0, **options,
        )  # fmt: skip
        return str(self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    def contexts(self, ids: Sequence[int], method: str, budgets: Sequence[str]) -> list[Context]:
        """The contexts of all budgets, from one prefill in transformers."""
        scorer, allocator = configured_method(method)
        plans = [
            plan_context(scorer, parse_budget(budget), len(ids), Protection(), allocator)
            for budget in budgets
        ]
        choices, feed = [choice for choice, _ in plans], torch.tensor([list(ids)])
        with use_kvp_attention(self.model):
            seen = prefill(self.model, feed, scorer.needs, tokenizer=self.tokenizer)
        made = {}
        for number, kept in score_and_select(partial(seen.views, scorer.needs), scorer, choices):
            made[number] = context_of(
                gather(seen, kept), self.model, self.tokenizer, ids, **plans[number][1]
            )
            made[number].write(self.folder)
        return [made[number] for number in range(len(budgets))]

    def answers(
        self, prompt: Encoded, method: str, budgets: Sequence[str]
    ) -> Iterator[list[tuple[str, str]]]:
        """Answers at each budget, as (engine, answer): from transformers and from vLLM."""
        ids = list(prompt.ids[: prompt.prompt_length])
        context, question = ids[: prompt.context_length], ids[prompt.context_length :]
        if method == FULL:
            yield self._texts(self.ask_transformers(ids), self.ask_vllm(ids, NEW_TOKENS))
            return
        for budget, made in zip(budgets, self.contexts(context, method, budgets), strict=True):
            held = load_context(made, self.model)
            theirs = self.ask_transformers([*made.placeholders, *question], past_key_values=held)
            placeholders = made.placeholders
            if method == self.compresses:
                asked = {"kv_transfer_params": {"kvp_compress": budget}}
                told = self.ask_vllm(context, 4, min_tokens=4, extra_args=asked)
                placeholders = told.kv_transfer_params["kvp_context"]["placeholders"]
            yield self._texts(theirs, self.ask_vllm([*placeholders, *question], NEW_TOKENS))

    def _texts(self, theirs: str, ours: vllm.RequestOutput) -> list[tuple[str, str]]:
        return [("transformers", theirs), ("vllm", ours.outputs[0].text)]


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Means in % of each method and budget, and paired differences of vLLM's scores."""

    def scores(part: pd.DataFrame, column: str) -> Scores:
        return {None: {(row.task, row.id): getattr(row, column) for row in part.itertuples()}}

    def numbers(name: str, found: Interval) -> dict[str, float]:
        ends = zip(("", "_low", "_high"), found.numbers, strict=True)
        return {f"{name}{end}": round(100 * value, 1) for end, value in ends}

    full, table = rows[rows["method"] == FULL], []
    for (method, budget), part in rows.groupby(["method", "budget"], sort=False):
        ours = scores(part, "vllm")
        table.append(
            {"method": method, "budget": budget, "prompts": len(part)}
            | numbers("vllm", bootstrap_mean(ours))
            | numbers("transformers", bootstrap_mean(scores(part, "transformers")))
            | numbers("minus_transformers", paired_difference(ours, scores(part, "transformers")))
            | numbers("minus_full", paired_difference(ours, scores(full, "vllm")))
        )
    return pd.DataFrame(table)


def main() -> None:
    """Answer the prompts that FILE has no row of, then write the table."""
    given = build_parser().parse_args()
    given.out.touch()
    rows = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
    done = {(row["task"], row["id"], row["method"], row["budget"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder, given.out.open("a", encoding="utf-8") as file:
        both = Both(given, folder)
        for task in split_list(given.tasks):
            settings = TaskSettings(
                split="test", length=given.length, count=given.prompts, seed=SEED,
                essays=given.essays,
            )  # fmt: skip
            samples = build_samples(task, settings, both.tokenizer)
            for sample, method in product(samples, (FULL, *both.methods)):
                asked = ["100%"] if method == FULL else split_list(given.budgets)
                budgets = [one for one in asked if (task, sample.id, method, one) not in done]
                if not budgets:
                    continue
                answers = both.answers(encode(sample, both.tokenizer), method, budgets)
                made = [
                    {
                        "task": task, "id": sample.id, "method": method, "budget": budget,
                        **{name: find_task(task).score(sample, text) for name, text in texts},
                        "texts": [text for _, text in texts],
                    }
                    for budget, texts in zip(budgets, answers, strict=True)
                ]  # fmt: skip
                rows += made
                file.write("".join(json.dumps(row) + "\n" for row in made))
                file.flush()
                for path in Path(folder).glob("*.context"):
                    path.unlink()
    table = summarize(pd.DataFrame(rows))
    table.to_csv(given.out.with_suffix(".csv"), index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
