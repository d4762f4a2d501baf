"""Whole first layers (K-Norm as published), by hand; `tests/golden` has the rule in Python."""

import pytest
import torch

from kvp import Protection, evicting, load_model
from policies.registry import make_allocator


@pytest.mark.parametrize(
    ("layers", "tokens", "budget", "floor", "counts"),
    [
        (5, 100, 50, 1, [100, 100, 17, 17, 16]),  # 5 * 50 - 200 = 50 for three layers
        (4, 60, 60, 1, [60, 60, 60, 60]),
        (4, 60, 40, 20, [60, 60, 20, 20]),  # what is left is the floor
        (5, 100, 30, 1, [74, 73, 1, 1, 1]),  # 150 tokens are less than two layers
        (3, 100, 30, 20, [35, 35, 20]),
        (2, 100, 30, 1, [30, 30]),
        (1, 100, 30, 1, [30]),
        # published: half of 4,096 tokens kept in all but two of 32 layers
        (32, 4096, 2176, 1, [4096] * 2 + [2048] * 30),
    ],
)
def test_the_first_layers_are_whole_and_the_others_share_the_rest(
    layers_of, layers, tokens, budget, floor, counts
):
    request = layers_of(layers, budget, tokens, floor=floor)
    assert make_allocator("uniform:knorm").allocate(request).tolist() == [[n, n] for n in counts]


def test_knorm_as_published_on_a_model():
    """nano's first two layers keep all; each head of the others its shortest keys."""
    model, tokenizer = load_model("nano")
    prompt = tokenizer("The grass is green. The sky is blue. " * 6, return_tensors="pt")
    tokens = prompt.input_ids.shape[1]
    with torch.no_grad():
        keys = [layer.keys[0] for layer in model(**prompt).past_key_values.layers]
    with evicting(
        model, "knorm+uniform:knorm", budget="60%", protection=Protection(sinks=0, recents=0)
    ) as kept:
        model.generate(**prompt, max_new_tokens=1)
    assert (kept.tokens[0, :2] == tokens).all()
    for layer in (2, 3, 4):
        for head, of_head in enumerate(keys[layer]):
            held = kept.positions(layer, head).tolist()
            assert abs(len(held) - (5 * 0.6 - 2) / 3 * tokens) < 2
            shortest = of_head.norm(dim=-1).argsort()[: len(held)]
            assert held == sorted(shortest.tolist())
