"""RULER's questions about compressed contexts, answered by vLLM and by transformers.

    python recipes/engines/ruler_on_vllm.py MODEL POLICY OUT TASKS PROMPTS BUDGETS ESSAYS [SQUAD]

A row has three answers and scores: transformers from the context, vLLM from its file, and vLLM from
the context that it compressed itself. TASKS and BUDGETS are lists such as vt,fwe and 25%,12.5%;
prompts have at most 2,048 tokens, seed 2041. In an environment with vLLM (docs/engines.md).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import vllm
from vllm.config import KVTransferConfig

from kvp import load_model
from kvp.budgets import parse_budget
from kvp.contexts import kept_rows, whole_blocks
from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples, find_task
from kvp.hf.contexts import context_of, load_context
from kvp.hf.eviction import prefill_and_evict
from kvp.ranking import Protection
from kvp.vllm.plugin import configured_method

LENGTH, SEED, NEW_TOKENS = 2048, 2041, 64


class Both:
    """A model in transformers and in vLLM with kvp's connector."""

    def __init__(self, path: str, policy: str, folder: str) -> None:
        self.folder = folder
        self.scorer, self.allocator = configured_method(policy)
        self.model, self.tokenizer = load_model(path, dtype="bfloat16")
        self.engine = vllm.LLM(
            path, dtype="bfloat16", enforce_eager=True, max_model_len=2 * LENGTH, block_size=32,
            enable_prefix_caching=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvpConnector", kv_connector_module_path="kvp.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"contexts": folder, "policy": policy, "memory_gb": 0.5},
            ),
        )  # fmt: skip

    def generate(self, ids: Sequence[int], tokens: int, **options: object) -> vllm.RequestOutput:
        """The greedy answer of vLLM."""
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, **options)
        return self.engine.generate({"prompt_token_ids": list(ids)}, sampling, use_tqdm=False)[0]

    def answers(self, context: list[int], question: list[int], budget: str) -> list[str]:
        """From transformers, from vLLM by file, and from vLLM by its own compression."""
        protection = Protection()
        kept = kept_rows(parse_budget(budget), len(context), least=protection.tokens)
        feed = torch.tensor([context])
        cache = prefill_and_evict(
            self.model, feed, self.scorer, kept, protection,
            allocator=whole_blocks(self.allocator, kept, len(context)), tokenizer=self.tokenizer,
        )  # fmt: skip
        name = getattr(self.scorer, "label", self.scorer.name)
        made = context_of(cache, self.model, self.tokenizer, context, policy=name, budget=budget)
        made.write(self.folder)
        ids = torch.tensor([[*made.placeholders, *question]])
        out = self.model.generate(
            ids, past_key_values=load_context(made, self.model), max_new_tokens=NEW_TOKENS,
            do_sample=False, repetition_penalty=1.0,
        )  # fmt: skip
        theirs = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        by_file = self.generate([*made.placeholders, *question], NEW_TOKENS)
        asked = {"kv_transfer_params": {"kvp_compress": budget}}
        told = self.generate(context, 4, min_tokens=4, extra_args=asked)
        own = told.kv_transfer_params["kvp_context"]["placeholders"]
        by_itself = self.generate([*own, *question], NEW_TOKENS)
        return [theirs, by_file.outputs[0].text, by_itself.outputs[0].text]


def main(
    path: str, policy: str, out: str, tasks: str, prompts: str, budgets: str, essays: str,
    squad: str | None = None,
) -> None:  # fmt: skip
    """Answer, write a row each, and print the means of the three scores."""
    scores: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as file:
        both = Both(path, policy, folder)
        for name in tasks.split(","):
            settings = TaskSettings(
                split="test", length=LENGTH, count=int(prompts), seed=SEED, essays=essays,
                squad=squad if name == "qa_1" else None,
            )  # fmt: skip
            for sample in build_samples(name, settings, both.tokenizer):
                ids = encode(sample, both.tokenizer)
                context = list(ids.ids[: ids.context_length])
                question = list(ids.ids[ids.context_length : ids.prompt_length])
                for budget in budgets.split(","):
                    answers = both.answers(context, question, budget)
                    row = [find_task(name).score(sample, answer) for answer in answers]
                    scores.setdefault(budget, []).append(row)
                    told = {"id": sample.id, "budget": budget, "answers": answers, "scores": row}
                    file.write(json.dumps(told) + "\n")
                    file.flush()
    for budget, rows in scores.items():
        means = [100 * sum(column) / len(rows) for column in zip(*rows, strict=True)]
        print(budget, "transformers {:.0f}, vLLM by file {:.0f}, by itself {:.0f}".format(*means))


if __name__ == "__main__":
    main(*sys.argv[1:])
