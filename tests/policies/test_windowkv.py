"""WindowKV: settings, layer sharing; `tests/golden` has the scores."""

import pytest
import torch

from kvp.scoring import score_layers
from policies.windowkv import WindowKV


def test_settings_are_those_of_the_paper_but_for_what_is_given():
    assert WindowKV().sizes_for("qa") == (4, 32, 32)
    assert WindowKV().sizes_for("aggregation") == (16, 32, 16)
    llama = WindowKV(**WindowKV.presets["llama"])
    assert llama.sizes_for("qa") == (16, 8, 8)
    assert llama.sizes_for("aggregation") == (32, 16, 8)
    assert WindowKV(window=8).sizes_for("aggregation") == (16, 8, 4)
    assert WindowKV(window=8, top=20, observed=3).sizes_for("qa") == (3, 8, 8)


@pytest.mark.parametrize(("group", "leaders"), [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4])])
def test_layers_take_over_the_choice_of_the_first(make_view, group, leaders):
    views = [make_view(tokens=60, layer=layer, seed=layer) for layer in range(5)]
    scorer = WindowKV(group=group)
    scores = score_layers(scorer, views)
    for layer, leader in enumerate(leaders):
        assert torch.equal(scores[layer], scorer.score(views[leader]))
