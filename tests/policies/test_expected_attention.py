"""Expected Attention: edges; `tests/golden` has the scores."""

from dataclasses import replace

import torch

from policies.expected_attention import ExpectedAttention


def test_positions_need_not_start_at_zero(make_view):
    """Moving all tokens and their queries by the same distance changes nothing."""
    view = make_view(tokens=30)
    shift = view.rope.rotation(torch.tensor([17]))
    moved = replace(
        view,
        positions=view.positions + 17,
        keys=view.rope.rotate(view.keys, *shift),
        queries=view.rope.rotate(view.queries, *shift),
    )
    scorer = ExpectedAttention()
    torch.testing.assert_close(scorer.score(moved), scorer.score(view), rtol=1e-3, atol=1e-5)
