"""Eviction after a prefill, with equal and with uneven budgets."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvp
from kvp.errors import UsageError
from kvp.hf import EvictingCache, evicting, prefill_and_evict
from kvp.hf.visibility import EMPTY
from kvp.protection import Protection
from kvp.scoring import Needs, Noise, Reconstruction
from policies import make_allocator

PROTECTION = Protection(sinks=2, recents=3)


class Given:
    """The same counts for every request."""

    name = "given"
    meets_budget = False

    def __init__(self, counts):
        self.counts = counts

    def allocate(self, request):
        return torch.as_tensor(self.counts)


def kept_by(scorer, counts, protection=PROTECTION):
    """[layer][head] tokens, by sorting in plain Python."""
    return [
        [
            scorer.kept(count, protection.sinks, protection.recents)[layer][head]
            for head, count in enumerate(heads)
        ]
        for layer, heads in enumerate(counts.tolist())
    ]


def positions(layer, entry=0):
    return [[p for p in head if p < EMPTY] for head in layer.positions[entry].tolist()]


@pytest.mark.parametrize(("by", "fed_again"), [(0, 0), (6, 1)], ids=["even", "uneven"])
def test_prefill_and_evict_then_generate(
    model, prompt, fixed, masked_logits, generate, uneven, by, fed_again
):
    """The first answer token feels the eviction: 39 tokens are ranked, the last one is fed.

    Where it is fed again it is scored, too, is the best of all, and yet not kept.
    """
    ids = prompt(40)
    scorer, ranked = fixed(39 + fed_again), fixed(39)
    scorer.scores[..., 39:] = 2.0
    ranked.scores = scorer.scores[..., :39]
    fed, allocator = ids[:, : 39 + fed_again], uneven(by) if by else None
    cache = prefill_and_evict(
        model, fed, scorer, 12, PROTECTION, allocator=allocator, fed_again=fed_again
    )
    assert scorer.layers == [0, 1, 2]
    kept = ranked.kept(12, PROTECTION.sinks, PROTECTION.recents)
    if allocator is not None:
        request = allocator.requests[-1]
        assert (request.budget, request.floor, request.sizes) == (12, 5, None)
        assert torch.equal(request.scores.isinf().sum(-1), torch.full((3, 2), 5))
        assert torch.equal(request.scores[..., 2:36], ranked.scores[..., 2:36])
        kept = kept_by(ranked, allocator.allocate(request))
    assert [positions(layer) for layer in cache.layers] == kept
    assert cache.get_seq_length() == 39
    width = model.config.head_dim if model.config.model_type == "qwen3" else 8
    assert cache.nbytes == 3 * 2 * 12 * 2 * width * 4
    output = generate(model, ids, 9, past_key_values=cache, output_logits=True)
    assert cache.get_seq_length() == 48
    expected = masked_logits(model, output.sequences[:, :-1], 39, kept)[0, 39:]
    torch.testing.assert_close(torch.cat(output.logits), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("allocator", [None, make_allocator("global")], ids=["even", "best"])
@pytest.mark.parametrize("budget", [8, "60%", 30])
def test_a_padded_batch_equals_each_prompt_alone(
    qwen, prompt, by_content, budget, allocator, generate, left_padded
):
    """Lengths 40, 26 and 9, each prompt's budget split by itself; some keep everything."""
    sequences = [prompt(length, seed=length) for length in (40, 26, 9)]
    ids, mask = left_padded([sequence[0] for sequence in sequences])
    with evicting(qwen, by_content(), budget, PROTECTION, allocator=allocator):
        together = generate(qwen, ids, 8, attention_mask=mask, output_logits=True)
        alone = [generate(qwen, sequence, 8, output_logits=True) for sequence in sequences]
    for index, single in enumerate(alone):
        difference = torch.stack(together.logits)[:, index] - torch.stack(single.logits)[:, 0]
        assert difference.abs().max() <= 1e-4
        for mine, its in zip(
            together.past_key_values.layers, single.past_key_values.layers, strict=True
        ):
            assert positions(mine, index) == positions(its)


@pytest.mark.parametrize("budget", [40, 64, "100%"])
def test_a_budget_of_the_whole_prompt_changes_nothing(qwen, prompt, fixed, budget, generate):
    ids = prompt(40)
    plain = generate(qwen, ids, 8, output_logits=True)
    scorer = fixed(40)
    with evicting(qwen, scorer, budget):
        output = generate(qwen, ids, 8, output_logits=True)
    assert torch.equal(torch.stack(output.logits), torch.stack(plain.logits))
    # The same tokens are fed: a greedy choice between two logits 5e-7 apart depends on the CPU.
    fed = plain.sequences[:, ids.shape[1] - 1 : -1]
    for again in (0, 1):  # the last token is not read, or read and fed again
        cache = prefill_and_evict(qwen, ids[:, : 39 + again], scorer, budget, fed_again=again)
        assert cache.layers[0].positions[0].tolist() == [list(range(39))] * 2
        logits = qwen(input_ids=fed, past_key_values=cache).logits[0]
        assert (logits - torch.cat(plain.logits)).abs().max() <= 1e-4
    assert not scorer.layers


def test_a_method_that_fails_leaves_nothing_behind(qwen, prompt, generate):
    before, cache = dict(vars(qwen.config)), EvictingCache()

    class Failing:
        name, needs = "failing", Needs(queries=2)

        def score(self, view):
            raise ZeroDivisionError

    with pytest.raises(UsageError, match="method failing"), evicting(qwen, Failing(), 22):
        generate(qwen, prompt(30), 4, past_key_values=cache)
    assert cache.recorder is None
    assert dict(vars(qwen.config)) == before
    assert not qwen._forward_pre_hooks | qwen._forward_hooks
    assert type(generate(qwen, prompt(30), 4).past_key_values) is DynamicCache


def test_an_allocator_runs_at_any_budget(qwen, prompt, fixed):
    """One that sizes the cache itself may keep less; one that keeps all changes nothing."""
    ids, counts = prompt(30), [[20, 21], [22, 23], [24, 25]]
    cache = prefill_and_evict(qwen, ids, fixed(30), "100%", allocator=Given(counts))
    assert [[len(head) for head in positions(layer)] for layer in cache.layers] == counts
    whole = prefill_and_evict(qwen, ids, fixed(30), 30, allocator=make_allocator("global"))
    assert not whole.evicted


def test_sizes_of_a_scorer_reach_the_allocator(qwen, prompt, fixed, uneven):
    def sizes_of(scores):
        assert int(scores.isinf().sum()) == scores[..., 0].numel() * 20  # 4 + 16 are protected
        return (scores > 0.5).sum(-1)

    scorer, allocator = fixed(30), uneven()
    scorer.sizes = sizes_of
    prefill_and_evict(qwen, prompt(30), scorer, 22, allocator=allocator)
    sizes = allocator.requests[0].sizes
    wanted = scorer.scores > 0.5
    wanted[..., :4] = wanted[..., -16:] = True
    assert torch.equal(sizes, wanted.sum(-1))  # protected tokens come on top of those it wants


class Everything:
    """Reads whatever a supply can give, and remembers its views."""

    name = "everything"

    needs = Needs(
        queries=4, rope=True, hidden_after=2, text=5,
        reconstruction=Reconstruction(chunk=10), noise=Noise(tokens=8),
    )  # fmt: skip

    def __init__(self):
        self.views = []

    def score(self, view):
        self.views.append(view)
        assert view.rope is not None
        return view.reconstruction - view.noise + 1e-3 * view.hidden.mean.mean(-1)[:, None, None]


def test_views_carry_the_scorer_inputs(qwen, prompt, letters, generate, left_padded):
    """Inside `evicting`, with a padded batch, as from a prefill of each prompt alone."""
    tokenizer, scorer = letters(), Everything()
    sequences = [prompt(length, seed=length) for length in (30, 21)]
    ids, mask = left_padded([sequence[0] for sequence in sequences])
    options = {"allocator": make_allocator("global"), "tokenizer": tokenizer}
    with evicting(qwen, scorer, "50%", PROTECTION, **options):
        together = generate(qwen, ids, 6, attention_mask=mask).past_key_values
    for index, sequence in enumerate(sequences):
        alone = Everything()
        cache = prefill_and_evict(qwen, sequence, alone, "50%", PROTECTION, **options)
        for mine, its in zip(scorer.views[3 * index :][:3], alone.views, strict=True):
            text = tokenizer.decode(sequence[0, -5:], skip_special_tokens=True)
            assert mine.text == its.text == text
            for found, expected in (
                (mine.reconstruction, its.reconstruction),
                (mine.noise, its.noise),
                (mine.hidden.variance, its.hidden.variance),
            ):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        for mine, single in zip(together.layers, cache.layers, strict=True):
            kept = [[p for p in head if p < sequence.shape[1]] for head in positions(mine, index)]
            assert kept == positions(single)


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", [None, "ada", "global"])
@pytest.mark.parametrize("policy", ["nano", "kvzip"])
def test_evicting_on_a_gpu_is_that_of_the_cpu(policy, allocator):
    """The answer, and the tokens that are kept but for a few of equal scores up to rounding."""
    answers, kept = [], []
    for device in ("cpu", "cuda"):
        model, tokenizer = kvp.load_model("nano", device=device)
        text = "The grass is green. The pass key is 71943. The sky is blue. " * 8
        ids = tokenizer(text, return_tensors="pt").to(device)
        with kvp.evicting(model, policy, "25%", allocator=allocator, tokenizer=tokenizer) as told:
            answers.append(model.generate(**ids, max_new_tokens=8, do_sample=False).tolist())
        every = np.ndindex(told.tokens.shape[1:])  # layers and heads
        kept.append({(*at, int(token)) for at in every for token in told.positions(*at)})
    assert answers[0] == answers[1]
    assert len(kept[0] & kept[1]) >= 0.99 * len(kept[0] | kept[1])
