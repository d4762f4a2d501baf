from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvp.hf import geometry_of
from kvp.hf.output_projection import output_gram


def test_norms_behind_the_projection_are_those_of_the_model(model: PreTrainedModel) -> None:
    geometry = geometry_of(model.config)
    gram = output_gram(model)
    assert gram.shape == (3, 2, geometry.head_dim, geometry.head_dim)
    value = torch.randn(geometry.head_dim, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        projection = model.model.layers[layer].self_attn.o_proj
        for head in range(2):
            squares = []
            for group in range(2):
                padded = torch.zeros(4, geometry.head_dim)
                padded[2 * head + group] = value
                moved = projection(padded.view(1, -1)) - projection(torch.zeros(1, padded.numel()))
                squares.append(moved.square().sum())
            expected = torch.stack(squares).mean()
            found = value @ gram[layer, head] @ value
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
