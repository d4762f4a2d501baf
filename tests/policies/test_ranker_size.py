"""The size of a ranker is that of its tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from policies.ranker import HeadRankers, RankerSpec
from policies.ranker_size import products_per_token

SPEC = RankerSpec(head_dim=16, hidden=32, neighbours=3)


def test_products_are_those_of_the_network() -> None:
    rankers, tokens = HeadRankers(SPEC, 2), 50
    keys = torch.randn(2, tokens, 16)
    with FlopCounterMode(display=False) as counter:
        rankers(keys, keys, torch.arange(tokens), tokens)
    forward = counter.get_total_flops()  # less the last layer
    assert forward == pytest.approx(2 * 2 * tokens * products_per_token(SPEC), rel=0.05)
