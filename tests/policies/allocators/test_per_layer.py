"""Counts per layer by hand, where a rule meets its bounds; `tests/golden` has the rules."""

import pytest
import torch

from kvp import Protection, evicting, load_model
from kvp.allocation import Request
from policies.registry import make_allocator


@pytest.mark.parametrize(
    ("spec", "layers", "tokens", "budget", "floor", "counts"),
    [
        # The line of B = 32 over 5 layers: 70.4, 55.2, 40, 24.8, 9.6. The highest is raised to 20;
        # the others share 180 in proportion to 190.4.
        ("pyramid", 5, 500, 40, 20, [67, 52, 38, 23, 20]),
        # B = 52, high = 101.4 but at most 60 - 8 = 52: nothing is left of the pyramid.
        ("pyramid", 4, 60, 60, 1, [60] * 4),
        # B = 42: high 52, low 32, and 8 for each.
        ("pyramid", 3, 60, 50, 1, [60, 50, 40]),
        ("pyramid", 1, 900, 64, 1, [64]),
        ("pyramid", 3, 900, 8, 1, [8, 8, 8]),
        ("pyramid", 3, 900, 5, 1, [5, 5, 5]),
        # Per layer 154.29, 90 and 25.71, for 4, 4 and 2 layers 1028.6 in all; scaled to 900 these
        # are 135, 78.75 and 22.5, and four are rounded up.
        ("windowkv(group=4)", 10, 4000, 90, 1, [135] * 4 + [79] * 4 + [22] * 2),
        # Line 115.7 78.6 41.4 4.3: two layers at all 80, the others share 80 as 41.4 to 4.3:
        # 72.5 and 7.5.
        ("windowkv(group=1)", 4, 80, 60, 1, [80, 80, 73, 7]),
        ("uniform:knorm", 5, 100, 50, 1, [100, 100, 17, 17, 16]),  # 250 - 200 = 50 for three layers
        ("uniform:knorm", 4, 60, 40, 20, [60, 60, 20, 20]),  # what is left is the floor
        ("uniform:knorm", 5, 100, 30, 1, [74, 73, 1, 1, 1]),  # 150 are less than two layers
        ("uniform:knorm", 1, 100, 30, 1, [30]),
        # published: half of 4,096 tokens kept in all but two of 32 layers
        ("uniform:knorm", 32, 4096, 2176, 1, [4096] * 2 + [2048] * 30),
    ],
)
def test_counts_by_hand(spec, layers, tokens, budget, floor, counts):
    request = Request(scores=torch.rand(layers, 2, tokens), budget=budget, floor=floor)
    assert make_allocator(spec).allocate(request).tolist() == [[n, n] for n in counts]


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
