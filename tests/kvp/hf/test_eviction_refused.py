"""What eviction refuses: one line each, before or instead of a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from kvp.errors import ModelError, UsageError
from kvp.hf import evicting, prefill_and_evict
from kvp.ranking import UNPROTECTED
from kvp.scoring import Needs
from policies import make_scorer

Prompt = Callable[..., Tensor]


def test_a_prompt_that_is_wholly_cached_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    ids = prompt(30)
    for budget in (22, 30):
        cache = prefill_and_evict(qwen, ids, fixed(30), budget)
        with pytest.raises(UsageError, match="at least one prompt token"):
            generate(qwen, ids, 4, past_key_values=cache)


def test_names_in_place_of_methods_are_refused(qwen: PreTrainedModel, fixed: Any) -> None:
    with pytest.raises(UsageError, match="make_scorer"):
        evicting(qwen, "snapkv", 22)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="make_allocator"):
        evicting(qwen, fixed(30), 22, allocator="global")  # type: ignore[arg-type]


def test_nesting_and_reuse_are_refused(qwen: PreTrainedModel, fixed: Any) -> None:
    block = evicting(qwen, fixed(30), 22)
    with block, pytest.raises(UsageError, match="already inside"):
        evicting(qwen, fixed(30), 24).__enter__()
    assert not qwen._forward_pre_hooks
    with pytest.raises(UsageError, match="entered twice"):
        block.__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache=True"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"prompt_lookup_num_tokens": 2}, "rolled back"),
        ({"attention_mask": torch.tensor([[1] * 29 + [0]])}, "padding_side"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 20])}, "padding_side"),
    ],
)
def test_ways_of_generating_that_cannot_work(
    qwen: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    options: dict[str, Any],
    message: str,
    generate: Any,
) -> None:
    with evicting(qwen, by_content(), 22), pytest.raises(UsageError, match=message) as caught:
        generate(qwen, prompt(30), 4, **options)
    assert "\n" not in str(caught.value)


def test_a_foreign_cache_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    ids = prompt(30)
    cache = DynamicCache(config=qwen.config)
    qwen(ids[:, :20], past_key_values=cache)
    with (
        evicting(qwen, fixed(30), 22),
        pytest.raises(UsageError, match="filled outside"),
    ):
        generate(qwen, ids, 4, past_key_values=cache)


def test_budgets_and_scorers_that_cannot_work(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    class Oracle:
        name, needs = "oracle", Needs(future=True)

        def score(self, view: Any) -> Tensor:
            raise NotImplementedError

    class Broken:
        name, needs = "broken", Needs()

        def score(self, view: Any) -> Tensor:
            return torch.full(view.keys.shape[:3], torch.nan)

    ids = prompt(30)
    for attempt, message in (
        (lambda: evicting(qwen, fixed(30), 19), "budget 19 keeps 19 tokens, fewer than the 20"),
        (
            lambda: prefill_and_evict(qwen, ids, fixed(30), 15),
            "budget 15 keeps 15 tokens, fewer than the 20",
        ),
        (lambda: prefill_and_evict(qwen, ids, fixed(30), "many"), "many"),
        (lambda: evicting(qwen, Oracle(), 22), "oracle"),
        (lambda: prefill_and_evict(qwen, ids, Oracle(), 22), "oracle"),
        (lambda: prefill_and_evict(qwen, ids, Broken(), 22), "without NaN"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert prefill_and_evict(qwen, ids, fixed(30), 1, UNPROTECTED).layers[0].keys.shape[2] == 1


@pytest.mark.parametrize("method", ["expected_attention", "gvote", "gvote(space=query)"])
def test_a_method_whose_inputs_the_model_lacks_is_named(prompt: Prompt, method: str) -> None:
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).eval().requires_grad_(False)
    for apply in (evicting, partial(prefill_and_evict, input_ids=prompt(30))):
        with pytest.raises(ModelError) as caught:
            apply(model, scorer=make_scorer(method), budget=22)
        assert str(caught.value).startswith(f"method {method}: GPTNeoXForCausalLM has no attention")
    assert prefill_and_evict(model, prompt(30), make_scorer("keydiff"), 22).get_seq_length() == 30
