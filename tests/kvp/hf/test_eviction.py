from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvp.errors import UsageError
from kvp.hf import EvictingCache, evicting, prefill_and_evict
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Needs
from policies import make_allocator

Prompt = Callable[..., Tensor]


def test_prefill_and_evict_then_generate(
    model: PreTrainedModel,
    prompt: Prompt,
    fixed: Any,
    masked_greedy: Any,
    generate: Any,
    watched: Any,
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


@pytest.mark.parametrize("allocated", [False, True])
def test_the_last_token_is_scored_and_fed_again(
    model: PreTrainedModel,
    prompt: Prompt,
    fixed: Any,
    masked_greedy: Any,
    generate: Any,
    watched: Any,
    *,
    allocated: bool,
) -> None:
    """All 40 tokens are scored, 39 are ranked, and the last one is fed at its own position."""
    ids = prompt(40)
    scorer, ranked = fixed(40), fixed(39)
    scorer.scores[..., 39] = 2.0  # the best of all, and yet not kept
    ranked.scores = scorer.scores[..., :39]
    allocator = make_allocator("uniform") if allocated else None
    cache = prefill_and_evict(model, ids, scorer, 22, allocator=allocator, fed_again=1)
    kept = ranked.kept(22)
    assert [layer.positions[0].tolist() for layer in cache.layers] == kept
    assert cache.get_seq_length() == 39
    assert cache.nbytes == sum(2 * 22 * layer.keys.shape[-1] * 4 * 2 for layer in cache.layers)
    with watched(model) as calls:
        answer = generate(model, ids, 9, past_key_values=cache).sequences[0, 40:].tolist()
    assert calls == [(1, [[position]]) for position in range(39, 48)]
    assert answer == masked_greedy(model, ids, 39, kept, 9)


@pytest.mark.parametrize("allocated", [False, True])
def test_with_everything_kept_feeding_again_changes_nothing(
    model: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any, *, allocated: bool
) -> None:
    ids = prompt(40)
    plain = generate(model, ids, 8, output_logits=True)
    allocator = make_allocator("uniform") if allocated else None
    cache = prefill_and_evict(model, ids, fixed(40), 39, allocator=allocator, fed_again=1)
    assert cache.layers[0].positions[0].tolist() == [list(range(39))] * 2
    fed = plain.sequences[:, 39:-1]
    logits = model(input_ids=fed, past_key_values=cache).logits[0]
    assert (logits - torch.cat(plain.logits)).abs().max() <= 1e-4


@pytest.mark.parametrize("fed_again", [-1, 5])
def test_feeding_everything_again_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, fed_again: int
) -> None:
    with pytest.raises(UsageError, match=f"fed_again must be 0 to 4 of 5 tokens, got {fed_again}"):
        prefill_and_evict(qwen, prompt(5), fixed(5), 2, UNPROTECTED, fed_again=fed_again)


def test_several_tokens_after_the_boundary(
    qwen: PreTrainedModel,
    prompt: Prompt,
    fixed: Any,
    masked_greedy: Any,
    generate: Any,
    watched: Any,
) -> None:
    ids = prompt(40)
    scorer = fixed(30)
    cache = prefill_and_evict(qwen, ids[:, :30], scorer, 21)
    with watched(qwen) as calls:
        answer = generate(qwen, ids, 4, past_key_values=cache).sequences[0, 40:].tolist()
    assert calls == [(10, [list(range(30, 40))]), (1, [[40]]), (1, [[41]]), (1, [[42]])]
    assert answer == masked_greedy(qwen, ids, 30, scorer.kept(21), 4)


def test_evicting_around_generate(
    model: PreTrainedModel,
    prompt: Prompt,
    fixed: Any,
    masked_greedy: Any,
    generate: Any,
    watched: Any,
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
    model: PreTrainedModel, prompt: Prompt, fixed: Any, budget: int | str, generate: Any
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
    model: PreTrainedModel, prompt: Prompt, by_content: Any, budget: int | str, generate: Any
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
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
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


def test_sampling_and_beams(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
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


def test_a_second_turn_outside_of_the_block_evicts_nothing(
    qwen: PreTrainedModel,
    prompt: Prompt,
    fixed: Any,
    masked_greedy: Any,
    generate: Any,
    watched: Any,
) -> None:
    ids = prompt(40)
    scorer = fixed(40)
    with evicting(qwen, scorer, 22):
        first = generate(qwen, ids, 3)
    turn = torch.cat([first.sequences, prompt(5, seed=6)], dim=1)
    with watched(qwen) as calls:
        result = generate(qwen, turn, 4, past_key_values=first.past_key_values).sequences
    assert [tokens for tokens, _ in calls] == [6, 1, 1, 1]
    assert [position for _, fed in calls for position in fed[0]] == list(range(42, 51))
    expected = masked_greedy(qwen, result[:, :48], 40, scorer.kept(22), 4)
    assert result[0, 48:].tolist() == expected
    assert scorer.calls == 3


def test_an_empty_evicting_cache_is_filled(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    cache = EvictingCache()
    with evicting(qwen, fixed(40), 22):
        output = generate(qwen, prompt(40), 2, past_key_values=cache)
    assert output.past_key_values is cache
    assert cache.evicted


def test_everything_is_given_back(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
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
    with pytest.raises(UsageError, match="method failing"):
        run(Failing(), past_key_values=cache)
    assert cache.recorder is None
    assert dict(vars(qwen.config)) == before
    assert not qwen._forward_pre_hooks
    assert not qwen._forward_hooks
    output = generate(qwen, prompt(30), 4)
    assert torch.equal(output.sequences, plain)
    assert type(output.past_key_values) is DynamicCache


def test_a_percentage_never_keeps_fewer_than_the_protected_tokens(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
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
