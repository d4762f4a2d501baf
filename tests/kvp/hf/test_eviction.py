from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from kvp.errors import KvpError, ModelError, UsageError
from kvp.hf import EvictingCache, evicting, prefill_and_evict
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Needs

Prompt = Callable[..., Tensor]
GREEDY: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[tuple[int, list[list[int]]]]]:
    """For every forward pass inside: tokens fed per row, and their positions."""
    calls: list[tuple[int, list[list[int]]]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append((kwargs["input_ids"].shape[1], kwargs["position_ids"].tolist()))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def generate(model: PreTrainedModel, ids: Tensor, tokens: int, **options: Any) -> Any:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, **{**GREEDY, **options}
    )


def test_prefill_and_evict_then_generate(
    model: PreTrainedModel, prompt: Prompt, fixed: Any, masked_greedy: Any
) -> None:
    """Boundary before the last prompt token: the first answer token already feels the eviction."""
    ids = prompt(40)
    scorer = fixed(39)
    cache = prefill_and_evict(model, ids[:, :-1], scorer, 22)
    assert scorer.calls == 3
    kept = scorer.kept(22)
    assert [layer.positions[0].tolist() for layer in cache.layers] == kept
    assert cache.nbytes == sum(2 * 22 * layer.keys.shape[-1] * 4 * 2 for layer in cache.layers)
    with watched(model) as calls:
        answer = generate(model, ids, 9, past_key_values=cache).sequences[0, 40:].tolist()
    assert calls == [(1, [[position]]) for position in range(39, 48)]
    assert answer == masked_greedy(model, ids, 39, kept, 9)


def test_several_tokens_after_the_boundary(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, masked_greedy: Any
) -> None:
    ids = prompt(40)
    scorer = fixed(30)
    cache = prefill_and_evict(qwen, ids[:, :30], scorer, 21)
    with watched(qwen) as calls:
        answer = generate(qwen, ids, 4, past_key_values=cache).sequences[0, 40:].tolist()
    assert calls == [(10, [list(range(30, 40))]), (1, [[40]]), (1, [[41]]), (1, [[42]])]
    assert answer == masked_greedy(qwen, ids, 30, scorer.kept(21), 4)


def test_evicting_around_generate(
    model: PreTrainedModel, prompt: Prompt, fixed: Any, masked_greedy: Any
) -> None:
    """Boundary after the prompt: the first answer token still comes from full attention."""
    ids = prompt(40)
    scorer = fixed(40)
    with watched(model) as calls, evicting(model, scorer, "50%", Protection(sinks=2, recents=5)):
        output = generate(model, ids, 9)
    assert calls == [(40, [list(range(40))])] + [(1, [[index]]) for index in range(40, 48)]
    kept = scorer.kept(20, sinks=2, recents=5)
    cache = output.past_key_values
    assert isinstance(cache, EvictingCache)
    for layer, heads in zip(cache.layers, kept, strict=True):
        assert layer.positions[0].tolist() == [head + list(range(40, 48)) for head in heads]
    plain = generate(model, ids, 1).sequences
    assert output.sequences[0, 40] == plain[0, 40]
    assert output.sequences[0, 40:].tolist() == masked_greedy(model, ids, 40, kept, 9)


@pytest.mark.parametrize("budget", [40, 64, "100%"])
def test_a_budget_of_the_whole_prompt_changes_nothing(
    model: PreTrainedModel, prompt: Prompt, fixed: Any, budget: int | str
) -> None:
    ids = prompt(40)
    plain = generate(model, ids, 8, output_logits=True)
    scorer = fixed(40)
    with evicting(model, scorer, budget):
        output = generate(model, ids, 8, output_logits=True)
    assert torch.equal(torch.stack(output.logits), torch.stack(plain.logits))
    # The same tokens are fed: a greedy choice between two logits 5e-7 apart depends on the CPU.
    cache = prefill_and_evict(model, ids[:, :-1], scorer, budget)
    fed = plain.sequences[:, ids.shape[1] - 1 : -1]
    logits = model(input_ids=fed, past_key_values=cache).logits[0]
    assert (logits - torch.cat(plain.logits)).abs().max() <= 1e-4
    assert scorer.calls == 0


@pytest.mark.parametrize("budget", [24, "60%", 30])
def test_a_padded_batch_equals_each_prompt_alone(
    model: PreTrainedModel, prompt: Prompt, by_content: Any, budget: int | str
) -> None:
    """Lengths 40, 26 and 9: with a budget of 24 or 30 some prompts keep everything."""
    lengths = (40, 26, 9)
    sequences = [prompt(length, seed=length) for length in lengths]
    ids = torch.cat(
        [torch.nn.functional.pad(sequence, (40 - sequence.shape[1], 0)) for sequence in sequences]
    )
    mask = torch.cat([(torch.arange(40) >= 40 - length).long()[None] for length in lengths])
    protection = Protection(sinks=2, recents=3)
    with evicting(model, by_content(), budget, protection):
        together = generate(model, ids, 8, attention_mask=mask, output_logits=True)
    for index, sequence in enumerate(sequences):
        scorer = by_content()
        with evicting(model, scorer, budget, protection):
            alone = generate(model, sequence, 8, output_logits=True)
        assert (
            together.sequences[index, 40:].tolist()
            == alone.sequences[0, sequence.shape[1] :].tolist()
        )
        difference = torch.stack(together.logits)[:, index] - torch.stack(alone.logits)[:, 0]
        assert difference.abs().max() <= 1e-4
        for mine, single in zip(
            together.past_key_values.layers, alone.past_key_values.layers, strict=True
        ):
            for head in range(2):
                stored = mine.positions[index, head]
                real = stored[stored < torch.iinfo(torch.int64).max]
                assert real.tolist() == single.positions[0, head].tolist()


def test_views_inside_a_padded_batch_hold_no_padding(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any
) -> None:
    ids = prompt(30, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    scorer = by_content(queries=4)
    with evicting(qwen, scorer, 8, UNPROTECTED):
        generate(qwen, ids, 1, attention_mask=mask)
    assert [(v.layer, v.keys.shape[0], v.keys.shape[2]) for v in scorer.views] == [
        (layer, 1, tokens) for tokens in (30, 18) for layer in range(3)
    ]
    for view in scorer.views:
        assert view.positions.tolist() == [list(range(view.keys.shape[2]))]
        assert view.queries is not None
        assert view.queries.shape == (1, 4, 4, 8)
        assert view.budget == 8


def test_sampling_and_beams(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    ids = prompt(30)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    plain = generate(qwen, ids, 6, **beams).sequences
    with evicting(qwen, fixed(30), 30):
        assert torch.equal(generate(qwen, ids, 6, **beams).sequences, plain)
    with evicting(qwen, fixed(30), 21):
        shrunk = generate(qwen, ids, 6, **beams)
        assert shrunk.past_key_values.layers[0].keys.shape[:3] == (3, 2, 21 + 5)
        torch.manual_seed(3)
        sampled = generate(qwen, ids, 6, do_sample=True, num_return_sequences=4)
        assert sampled.sequences.shape == (4, 36)
        torch.manual_seed(3)
        again = generate(qwen, ids, 6, do_sample=True, num_return_sequences=4)
        assert torch.equal(sampled.sequences, again.sequences)


@pytest.mark.parametrize("inside", [True, False])
def test_a_second_turn_continues_the_shrunk_cache(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, masked_greedy: Any, inside: bool
) -> None:
    ids = prompt(40)
    scorer = fixed(40)

    def second(first: Any) -> Tensor:
        turn = torch.cat([first.sequences, prompt(5, seed=6)], dim=1)
        with watched(qwen) as calls:
            output = generate(qwen, turn, 4, past_key_values=first.past_key_values)
        assert [tokens for tokens, _ in calls] == [6, 1, 1, 1]
        assert [position for _, fed in calls for position in fed[0]] == list(range(42, 51))
        sequences: Tensor = output.sequences
        return sequences

    with evicting(qwen, scorer, 22):
        first = generate(qwen, ids, 3)
        if inside:
            result = second(first)
    if not inside:
        result = second(first)
    expected = masked_greedy(qwen, result[:, :48], 40, scorer.kept(22), 4)
    assert result[0, 48:].tolist() == expected
    assert scorer.calls == 3


def test_an_empty_evicting_cache_is_filled(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    cache = EvictingCache()
    with evicting(qwen, fixed(40), 22):
        output = generate(qwen, prompt(40), 2, past_key_values=cache)
    assert output.past_key_values is cache
    assert cache.evicted


def test_a_prompt_that_is_wholly_cached_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    ids = prompt(30)
    for budget in (22, 30):
        cache = prefill_and_evict(qwen, ids, fixed(30), budget)
        with pytest.raises(UsageError, match="at least one prompt token"):
            generate(qwen, ids, 4, past_key_values=cache)


def test_everything_is_given_back(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    qwen.set_attn_implementation("sdpa")
    plain = generate(qwen, prompt(30), 4).sequences
    before = dict(vars(qwen.config))
    cache = EvictingCache()

    class Failing:
        name, needs = "failing", Needs(queries=2)

        def score(self, view: Any) -> Tensor:
            raise ZeroDivisionError

    def run(scorer: Any, **options: Any) -> None:
        with evicting(qwen, scorer, 22):
            generate(qwen, prompt(30), 4, **options)

    run(fixed(30))
    with pytest.raises(ZeroDivisionError):
        run(Failing(), past_key_values=cache)
    assert cache.recorder is None
    assert dict(vars(qwen.config)) == before
    assert not qwen._forward_pre_hooks
    assert not qwen._forward_hooks
    output = generate(qwen, prompt(30), 4)
    assert torch.equal(output.sequences, plain)
    assert type(output.past_key_values) is DynamicCache


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
        ({"prefill_chunk_size": 8}, "prefill_chunk_size=None"),
        ({"prompt_lookup_num_tokens": 2}, "assistant|rolled back"),
        ({"attention_mask": torch.tensor([[1] * 29 + [0]])}, "padding_side"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 20])}, "padding_side"),
    ],
)
def test_ways_of_generating_that_cannot_work(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, options: dict[str, Any], message: str
) -> None:
    with evicting(qwen, fixed(30), 22), pytest.raises(UsageError, match=message) as caught:
        generate(qwen, prompt(30), 4, **options)
    assert "\n" not in str(caught.value)


def test_a_foreign_cache_is_refused(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
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


def test_a_percentage_never_keeps_fewer_than_the_protected_tokens(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any
) -> None:
    """Prompts of 160, 40 and 10 tokens at 25 %: 40, 20 (protected) and 10 (all) tokens stay."""
    lengths, widest = (160, 40, 10), 160
    ids = prompt(widest, batch=3)
    mask = torch.stack([(torch.arange(widest) >= widest - n).long() for n in lengths])
    with evicting(qwen, by_content(), "25%"):
        output = generate(qwen, ids, 1, attention_mask=mask)
    for layer in output.past_key_values.layers:
        present = layer.positions < torch.iinfo(torch.int64).max
        assert present.sum(dim=-1).tolist() == [[40, 40], [20, 20], [10, 10]]
    assert (
        prefill_and_evict(qwen, ids[:1, :80], by_content(), "12.5%").layers[0].keys.shape[2] == 20
    )


@pytest.fixture
def longrope() -> PreTrainedModel:
    """Phi-3 with other RoPE frequencies past 48 tokens."""
    torch.manual_seed(7)
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        original_max_position_embeddings=48, initializer_range=0.3, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4, "original_max_position_embeddings": 48, "factor": 4.0,
        },
    )  # fmt: skip
    model = Phi3ForCausalLM(config).train(False).requires_grad_(False)
    model.set_attn_implementation("kvp")
    return model


def test_longrope_on_one_side_of_its_switch(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    """A shrunk cache must not make generate start over: only new tokens are fed."""
    for tokens in (40, 60):
        ids = prompt(tokens)
        cache = prefill_and_evict(longrope, ids[:, :-1], fixed(tokens - 1), 22)
        with watched(longrope) as calls:
            generate(longrope, ids, 6, past_key_values=cache)
        assert calls == [(1, [[index]]) for index in range(tokens - 1, tokens + 5)]


def test_longrope_prompts_beyond_the_switch(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    """generate drops its empty cache there; the answer must come from a shrunk one all the same."""
    ids = prompt(60)
    with evicting(longrope, fixed(60), 22):
        output = generate(longrope, ids, 6)
    assert output.past_key_values.layers[0].keys.shape[2] == 22 + 5
    cache = prefill_and_evict(longrope, ids, fixed(60), 22)
    expected = [int(generate(longrope, ids, 1).sequences[0, -1])]
    with torch.no_grad():
        for _ in range(5):
            logits = longrope(torch.tensor([expected[-1:]]), past_key_values=cache).logits
            expected.append(int(logits[0, -1].argmax()))
    assert output.sequences[0, 60:].tolist() == expected


def test_longrope_across_its_switch_is_refused(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any
) -> None:
    ids = prompt(44)
    with evicting(longrope, fixed(44), 22), pytest.raises(UsageError, match="RoPE"):
        generate(longrope, ids, 10)
    cache = prefill_and_evict(longrope, ids, fixed(44), 22)
    with pytest.raises(UsageError, match="changes its RoPE after 48 tokens"):
        longrope(prompt(6), past_key_values=cache)


def test_tokens_beyond_a_window_as_long_as_the_model_are_refused(
    build: Any, prompt: Prompt, fixed: Any
) -> None:
    model = build("mistral")
    model.config.sliding_window = model.config.max_position_embeddings = 48
    with evicting(model, fixed(40), 22):
        generate(model, prompt(40), 9)
        with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
            generate(model, prompt(40), 10)
    with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
        prefill_and_evict(model, prompt(60), fixed(60), 22)


def test_sliding_windows_are_refused(build: Any, prompt: Prompt, fixed: Any) -> None:
    model = build("mistral")
    model.config.sliding_window = 32
    for attempt in (
        lambda: evicting(model, fixed(30), 22),
        lambda: prefill_and_evict(model, prompt(30), fixed(30), 22),
    ):
        with pytest.raises(ModelError, match="sliding window of 32") as caught:
            attempt()
        assert isinstance(caught.value, KvpError)
        assert "\n" not in str(caught.value)
