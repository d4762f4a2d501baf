"""The model, the prompt and the prefill without any method: the same for kvp and kvpress.

Runs in both environments, so nothing here imports `kvp.hf`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.measuring import Seconds, medians, shares_of
from kvp import nano
from kvp.geometry import Geometry
from policies.learned import LearnedScorer
from policies.policy_files import load_policy
from policies.ranker import HeadRankers

HEAD_DIM = 64
KEPT = 0.25
"""Share of the tokens that stay."""
VOCABULARY = 8192
"""Entries of nano's tokenizer, which serves methods that repeat or read the prompt."""


def model_of(given: argparse.Namespace) -> PreTrainedModel:
    """A random Qwen2 with about the proportions of the 7B one: one KV head for 8 query heads."""
    heads = given.width // HEAD_DIM
    config = Qwen2Config(
        hidden_size=given.width, intermediate_size=given.width * 21 // 4,
        num_hidden_layers=given.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8), vocab_size=VOCABULARY,
        max_position_embeddings=2**19, rope_theta=1e6, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    model = Qwen2ForCausalLM(config).eval()
    model.config.name_or_path = str(nano.path())  # where kvpress looks for a tokenizer
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    return model.to(given.device, dtype)


def prompt(tokens: int, device: str) -> Tensor:
    """Random ids [1, tokens]."""
    ids = torch.randint(300, 8000, (1, tokens), generator=torch.Generator().manual_seed(7))
    return ids.to(device)


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor) -> None:
    """The forward pass of transformers alone, with a cache, for the logits of the last token."""
    model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)


def learned(model: PreTrainedModel) -> LearnedScorer:
    """A policy of random weights with networks as large as those of the bundled policy."""
    config = model.config
    geometry = Geometry(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=HEAD_DIM,
    )
    spec = replace(load_policy("nano").rankers.spec, head_dim=HEAD_DIM)
    rankers = HeadRankers(spec, geometry.total_kv_heads, torch.Generator().manual_seed(0))
    rankers = rankers.requires_grad_(False).to(model.device)
    return LearnedScorer(rankers=rankers, geometry=geometry)


def rounds(given: argparse.Namespace) -> range:
    """The rounds at `given.child` tokens; the last of --repeats is for all later --tokens."""
    repeats = given.repeats.split(",")
    place = given.tokens.split(",").index(str(given.child))
    return range(int(repeats[min(place, len(repeats) - 1)]))


def selected(given: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Names whose method, without a preset, is in --methods; all of them where it is empty."""
    wanted = set(given.methods.split(",")) if given.methods else None
    return [name for name in names if wanted is None or name.partition(":")[0] in wanted]


@dataclass
class Times:
    """Times of one method: in each round what it adds, the prefill alone, and both together."""

    method: str
    source: str
    environment: str
    by_difference: bool = False
    rounds: list[tuple[Seconds, Seconds, Seconds]] = field(default_factory=list)

    def row(self, tokens: int) -> dict[str, Any]:
        """The method's row in the file."""
        added, bare, whole = zip(*self.rounds, strict=True)
        prefills = {f"prefill_{name}": value for name, value in medians(bare).items()}
        return {
            "method": self.method, "source": self.source, "environment": self.environment,
            "tokens": tokens, "by_difference": self.by_difference, **medians(added),
            **prefills, **shares_of(added, bare), "whole_share": shares_of(whole, bare)["share"],
        }  # fmt: skip
