"""One network for all heads: heads learn from each other.

The heads share all weights; each has an embedding, learned with them, and the statistics its keys
and values are standardised with. The embedding e enters the first block as if
it were one more input: it adds e W to that block's bias. A trained head is therefore an ordinary
ranker whose first bias is b + e W, and exported policies need to know nothing of sharing. What is
left out: one process trains the whole network, since every head's gradient reaches all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from policies.ranker import HeadRankers, RankerSpec
from train.optim.schedule import clip_per_head

EMBEDDING_WIDTH = 32


class SharedRankers(HeadRankers):
    """Rankers of A heads from one network: its parameters are [1, ...], embeddings [A, E]."""

    embedding: Tensor
    """[A, E] float32, trained, one embedding per head."""
    embedding_weight: Tensor
    """[1, E, hidden] float32, trained: W: e W is added to the first block's bias."""

    def __init__(
        self,
        spec: RankerSpec,
        heads: int,
        generator: torch.Generator | None = None,
        *,
        embedding_width: int = EMBEDDING_WIDTH,
    ) -> None:
        """Initialise the network as one head of `HeadRankers`, embeddings as `nn.Embedding`.

        W is scaled by the fan-in of the first block with the embedding among its inputs. The same
        generator state gives the same weights; ValueError where `embedding_width` is not positive.
        """
        if embedding_width < 1:
            raise ValueError(f"embedding_width must be at least 1, got {embedding_width}")
        super().__init__(spec, 1, generator)
        self.total_kv_heads = heads
        self._add_statistics()
        bound = 1 / math.sqrt(sum(map(spec.width_of, spec.projected)) + embedding_width)
        weight = torch.empty(1, embedding_width, spec.hidden)
        self.embedding_weight = nn.Parameter(weight.uniform_(-bound, bound, generator=generator))
        embedding = torch.empty(heads, embedding_width).normal_(generator=generator)
        self.embedding = nn.Parameter(embedding)

    def weights(self, heads: slice) -> dict[str, Tensor]:
        """As `HeadRankers.weights`; only the first bias and the statistics differ between heads."""
        weights: dict[str, Tensor] = dict(self.named_parameters())
        shift = weights.pop("embedding")[heads] @ weights.pop("embedding_weight")[0]  # [a, hidden]
        weights["first_bias"] = weights["first_bias"] + shift
        return weights | {name: buffer[heads] for name, buffer in self.named_buffers()}


def clip_gradients(rankers: HeadRankers, max_norm: float) -> Tensor:
    """Clip the gradients of `rankers` in place; returns the norms before, one per network.

    Independent rankers are clipped one by one, [A]. A shared network has one norm, [1], over all of
    its parameters, taken per head: a step's loss is a sum over heads, so its gradient may be A
    times as long as one ranker's.
    """
    if not isinstance(rankers, SharedRankers):
        return clip_per_head(rankers.parameters(), max_norm)
    limit = max_norm * rankers.total_kv_heads
    norm = torch.nn.utils.clip_grad_norm_(rankers.parameters(), limit)
    return norm[None] / rankers.total_kv_heads
