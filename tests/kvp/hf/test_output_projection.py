from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.hf import geometry_of
from kvp.hf.model_access import output_gram, projected_norms


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
            result = value @ gram[layer, head] @ value
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Packed(nn.Module):
    """A projection like quantised ones: no weight of the usual shape, and a bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter((linear.weight * 2**16).round().int().flatten(), False)
        self.shape = linear.weight.shape

    def forward(self, states: Tensor) -> Tensor:
        return states @ (self.weight.view(self.shape) / 2**16).T + 0.5


def test_quantised_projections_have_the_same_norms(qwen: PreTrainedModel) -> None:
    """Labels (`output_gram`) and KVzip+ (`projected_norms`) both read them as they act."""
    attention = qwen.model.layers[0].self_attn
    values = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    norms, gram = projected_norms(attention, values, 2), output_gram(qwen)
    assert norms.shape == (1, 2, 2, 5)
    for layer in qwen.model.layers:
        layer.self_attn.o_proj = Packed(layer.self_attn.o_proj)
    torch.testing.assert_close(projected_norms(attention, values, 2), norms, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(output_gram(qwen), gram, rtol=1e-3, atol=1e-3)
