"""An evicting block around wrapped models, in threads and inference mode, with foreign caches."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvp import nano
from kvp.errors import ModelError, UsageError
from kvp.hf import EvictingCache, evicting, observe, prefill_and_evict
from kvp.hf.model_access import another_model, weights_digest
from kvp.hf.prefill import unwrapped
from kvp.ranking import UNPROTECTED
from kvp.scoring import Needs

Prompt = Callable[..., Tensor]


def stored(output: Any) -> int:
    return int(output.past_key_values.layers[0].keys.shape[2])


class LikePeft(nn.Module):
    """The shape of peft.PeftModel: its own `generate`, and `get_base_model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = Delegating(model)

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model.model  # type: ignore[return-value]

    def generate(self, **options: Any) -> Any:
        return self.base_model.generate(**options)


class Delegating(nn.Module):
    """Hands out whatever the model has, as `LoraModel` and many users' wrappers do."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Opaque(nn.Module):
    """Shows nothing of the model it calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.hidden_model = model

    def generate(self, **options: Any) -> Any:
        return self.hidden_model.generate(**options)  # type: ignore[operator]


WRAPPERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "peft": LikePeft,
    "delegating": Delegating,
    "delegating twice": lambda model: Delegating(LikePeft(model)),  # type: ignore[arg-type]
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_wrapped_models_are_evicted_from(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, kind: str, generate: Any
) -> None:
    """The answer of the wrapper is that of the model inside a block of its own."""
    ids, wrapper = prompt(40), WRAPPERS[kind](qwen)
    with evicting(qwen, fixed(40), 22):
        expected = generate(qwen, ids, 5)
    with evicting(wrapper, fixed(40), 22):
        output = generate(wrapper, ids, 5)
    assert stored(output) == 22 + 4
    assert torch.equal(output.sequences, expected.sequences)
    cache = prefill_and_evict(wrapper, ids, fixed(40), 22)
    assert cache.layers[0].keys.shape[2] == 22
    assert observe(wrapper, ids).cache.get_seq_length() == 40
    assert not qwen._forward_pre_hooks


def test_a_wrapper_that_hides_its_model_is_refused(qwen: PreTrainedModel, fixed: Any) -> None:
    with pytest.raises(ModelError, match="Opaque is no transformers model") as caught:
        evicting(Opaque(qwen), fixed(40), 22)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert unwrapped(qwen) is qwen


def test_a_compiled_forward_gives_the_same_tokens(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    ids = prompt(40)
    with evicting(qwen, fixed(40), 22):
        expected = generate(qwen, ids, 4).sequences
    qwen.compile(backend="eager")
    with evicting(qwen, fixed(40), 22):
        output = generate(qwen, ids, 4)
    assert stored(output) == 22 + 3
    assert torch.equal(output.sequences, expected)


class ByHidden:
    """Scores that read queries and hidden states of the prompt."""

    needs = Needs(queries=3, hidden_after=2)
    name = "by_hidden"

    def score(self, view: Any) -> Tensor:
        attention = view.queries.float().mean(dim=(1, 2))[:, None, None] * view.keys.float()
        return attention.sum(dim=-1) * view.hidden.mean.sum(dim=-1)[:, None, None]


def test_threads_keep_their_calls_apart(
    qwen: PreTrainedModel, prompt: Prompt, generate: Any
) -> None:
    """Four calls that prefill at the same time answer as each does alone."""
    prompts = [prompt(30 + 5 * index, seed=index) for index in range(4)]
    expected = []
    for ids in prompts:
        with evicting(qwen, ByHidden(), 22):
            expected.append(generate(qwen, ids, 4))
    together = threading.Barrier(4)
    results: dict[int, Any] = {}
    met: set[int] = set()

    def meet(module: Any, args: Any) -> None:
        if threading.get_ident() not in met:  # once per thread, in the middle of its prefill
            met.add(threading.get_ident())
            together.wait(60)

    def run(index: int) -> None:
        results[index] = generate(qwen, prompts[index], 4)

    handle = qwen.model.layers[1].register_forward_pre_hook(meet)
    with evicting(qwen, ByHidden(), 22):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    handle.remove()
    for index, alone in enumerate(expected):
        assert stored(results[index]) == 22 + 3
        assert results[index].past_key_values.recorder is None
        assert torch.equal(results[index].sequences, alone.sequences)


def test_leaving_during_a_prefill_of_another_thread_is_an_error(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    inside, left = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(module: Any, args: Any) -> None:
        inside.set()
        left.wait(60)

    def run() -> None:
        try:
            generate(qwen, prompt(40), 3)
        except ModelError as error:
            errors.append(error)

    qwen.set_attn_implementation("sdpa")
    block = evicting(qwen, fixed(40), 22)
    handle = qwen.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=run)
    block.__enter__()
    thread.start()
    inside.wait(60)
    with pytest.raises(UsageError, match="still in its prefill"):
        block.__exit__(None, None, None)
    left.set()
    thread.join(60)
    handle.remove()
    assert len(errors) == 1  # not a full cache that nobody notices


def test_an_observation_in_another_thread_gives_no_attention_back_too_early(
    qwen: PreTrainedModel, prompt: Prompt
) -> None:
    qwen.set_attn_implementation("sdpa")
    inside, done = threading.Event(), threading.Event()

    def wait(module: Any, args: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            done.wait(60)

    handle = qwen.model.layers[1].register_forward_pre_hook(wait)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(observe(qwen, prompt(12))))
    thread.start()
    inside.wait(60)
    observe(qwen, prompt(12))
    done.set()
    thread.join(60)
    handle.remove()
    assert len(results) == 1
    assert qwen.config._attn_implementation == "sdpa"


def test_the_callers_own_empty_cache_is_filled(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
) -> None:
    """A chat that keeps one cache object feeds only its new tokens."""
    cache: Any = DynamicCache()
    ids = prompt(40)
    with evicting(qwen, by_content(), 22):
        first = generate(qwen, ids, 3, past_key_values=cache)
        assert first.past_key_values is cache
        assert isinstance(cache, EvictingCache)
        assert (cache.get_seq_length(), stored(first)) == (42, 24)
        turn = torch.cat([first.sequences, prompt(5)], dim=1)
        second = generate(qwen, turn, 3, past_key_values=cache)
    assert (cache.get_seq_length(), stored(second)) == (50, 24)


def test_attention_weights_are_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    qwen.set_attn_implementation("eager")
    with evicting(qwen, fixed(40), 22), pytest.raises(UsageError, match="output_attentions=False"):
        generate(qwen, prompt(40), 3, output_attentions=True)


def test_arguments_may_be_positional(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    cache = DynamicCache()
    with evicting(qwen, fixed(40), 22), torch.no_grad():
        qwen(prompt(40), past_key_values=cache)
        qwen(prompt(40), None, None, DynamicCache())
    assert cache.layers[0].keys.shape[2] == 22


def test_a_forward_pass_without_a_cache_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    with evicting(qwen, fixed(40), 22), pytest.raises(UsageError, match="needs a cache"):
        qwen(prompt(40))


def test_kvp_inside_a_block_is_refused(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    for attempt in (
        lambda: observe(qwen, prompt(40)),
        lambda: prefill_and_evict(qwen, prompt(40), fixed(40), 30),
    ):
        with evicting(qwen, fixed(40), 22), pytest.raises(UsageError, match="already inside"):
            attempt()


def test_a_scorer_may_run_the_model(qwen: PreTrainedModel, prompt: Prompt, generate: Any) -> None:
    ids = prompt(40)

    class SecondLook:
        needs, name = Needs(), "second_look"

        def score(self, view: Any) -> Tensor:
            seen = observe(qwen, ids, queries=0)
            return seen.keys[view.layer].float().norm(dim=-1)

    with evicting(qwen, SecondLook(), 22):
        assert stored(generate(qwen, ids, 3)) == 22 + 2


def test_the_length_of_another_prompt_says_nothing(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
) -> None:
    """Conversation A has seen 42 tokens; B's prompt is 42 long; A goes on."""
    with evicting(qwen, by_content(), 22):
        first = generate(qwen, prompt(40), 3)
        generate(qwen, prompt(42), 3)
        turn = torch.cat([first.sequences, prompt(5)], dim=1)
        assert stored(generate(qwen, turn, 2, past_key_values=first.past_key_values)) == 23


@pytest.mark.parametrize("ragged", [False, True])
def test_a_turn_in_inference_mode_goes_on_outside(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, ragged: bool, generate: Any
) -> None:
    class Uneven:
        name = "uneven"

        def allocate(self, request: Any) -> Tensor:
            return torch.tensor([[21, 23]]).expand(request.scores.shape[0], -1).contiguous()

    allocator = Uneven() if ragged else None
    ids = prompt(40)
    with evicting(qwen, fixed(40), 22, allocator=allocator):
        expected = generate(qwen, ids, 9).sequences
    with evicting(qwen, fixed(40), 22, allocator=allocator), torch.inference_mode():
        first = generate(qwen, ids, 4)
    tokens = first.sequences.clone()
    output = generate(qwen, tokens, 5, past_key_values=first.past_key_values)
    assert torch.equal(output.sequences, expected)


def test_policies_of_another_model_warn(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    scorer = fixed(40)
    scorer.label = "runs/mine"
    scorer.metadata = {"model": {"id": "nano", "weights": weights_digest(qwen)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evicting(qwen, scorer, 22)
    scorer.metadata = {"model": {"id": "nano", "weights": "another"}}
    qwen.config.name_or_path = "mine/qwen"
    for attempt in (
        lambda: evicting(qwen, scorer, 22),
        lambda: prefill_and_evict(qwen, prompt(40), scorer, 22, UNPROTECTED),
    ):
        with pytest.warns(UserWarning, match="runs/mine was trained on nano.*model is mine/qwen"):
            attempt()


def test_other_weights_of_the_bundled_model_are_another_model(qwen: PreTrainedModel) -> None:
    recorded = {"id": "nano", "weights": "another"}
    qwen.config.name_or_path = "mine/qwen"
    assert another_model(qwen, {**recorded, "id": "mine/qwen"}) is None  # another dtype, say
    qwen.config.name_or_path = str(nano.path())
    assert another_model(qwen, recorded) == "nano, this model is nano with other weights"
    assert another_model(qwen, {**recorded, "weights": weights_digest(qwen)}) is None
    assert another_model(copy.deepcopy(qwen).half(), recorded) is None
    assert another_model(qwen, {"id": "nano"}) is None
