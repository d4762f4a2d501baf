"""The learned rankers: one small network per KV head, all of them in one module.

A ranker maps a cached token (key after RoPE, value, position) to a score; it sees no query and no
attention (KVP paper, section 3), unless it has the input `recent` (`policies.recent_features`).
Weights of all heads are stacked, `[A, in, out]`, so that they train as one job on a GPU; on a CPU
the same arithmetic runs head by head, which is faster there (better cache locality). What is left
out: sampling and losses (`train`) and files (`policy_files`).

Architecture (`policies.ranker_spec`, arithmetic in `policies.network`): key and value each Linear
D -> hidden + LayerNorm; position features -> LayerNorm; concatenate; two blocks of Linear ->
hidden, LayerNorm, SiLU; Linear -> 1. With `neighbours` R a further Linear -> 2 R + 1 gives what the
token adds to the scores of those at distances -R to R: a value is needed because of the key before
it. With hidden = 256, D = 128 and a position table of 12,000 rows
of 32 this is the paper's "two layers of 256, about 650K parameters"; the network without a table
has 273,729. `paper` looks positions up in such a table (rows beyond the trained length are never
trained); `fourier` replaces it by features that extrapolate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from policies.network import score_tokens
from policies.ranker_spec import RankerSpec, position_features

__all__ = [
    "STATISTICS",
    "HeadRankers",
    "RankerSpec",
    "bytes_per_token",
    "head_shapes",
    "parameters_per_head",
    "position_features",
    "products_per_token",
]

STATISTICS = frozenset(f"{name}_{part}" for name in ("key", "value") for part in ("mean", "std"))
"""Names of the statistics that inputs are standardised with: float32, whatever the weights are."""
_EPSILON = 1e-6


class HeadRankers(nn.Module):
    """Rankers of A heads (layer-major KV heads); parameters carry the head as first axis."""

    def __init__(
        self, spec: RankerSpec, heads: int, generator: torch.Generator | None = None
    ) -> None:
        """Initialise every head as `torch.nn` would (`Linear`: uniform by fan-in, `Embedding`:
        normal); the same generator state gives the same weights.
        """
        super().__init__()
        self.spec = spec
        self.total_kv_heads = heads
        sizes = {name: spec.width_of(name) for name in spec.projected}
        incoming = sum(sizes.values())
        for name, size in sizes.items():
            if name == "position" and spec.architecture == "paper":
                table = torch.empty(heads, spec.max_positions, size).normal_(generator=generator)
                self.register_parameter("position_table", nn.Parameter(table))
            else:
                self._add_linear(name, spec.features_of(name), size, generator)
        for name in spec.block_names:
            self._add_linear(name, incoming, spec.hidden, generator)
            incoming = sizes[name] = spec.hidden
        self._add_linear("score", incoming, 1, generator)
        if spec.neighbours:  # nothing is added to neighbours before training
            zeros = torch.zeros(heads, incoming, 2 * spec.neighbours + 1)
            self.register_parameter("neighbours_weight", nn.Parameter(zeros))
        for name, size in sizes.items():
            ones, zeros = torch.ones(heads, size), torch.zeros(heads, size)
            self.register_parameter(f"{name}_norm_weight", nn.Parameter(ones))
            self.register_parameter(f"{name}_norm_bias", nn.Parameter(zeros))
        self._add_statistics()

    def _add_statistics(self) -> None:
        """Feature statistics of every head, which change nothing until `standardise`."""
        if self.spec.architecture == "paper":
            return
        for name in self.spec.projected:
            if name in ("key", "value"):
                shape = (self.total_kv_heads, self.spec.head_dim)
                self.register_buffer(f"{name}_mean", torch.zeros(shape))
                self.register_buffer(f"{name}_std", torch.ones(shape))

    def _add_linear(
        self, name: str, inputs: int, outputs: int, generator: torch.Generator | None
    ) -> None:
        bound = 1 / math.sqrt(inputs)
        weight = torch.empty(self.total_kv_heads, inputs, outputs)
        bias = torch.empty(self.total_kv_heads, outputs)
        for part, tensor in (("weight", weight), ("bias", bias)):
            tensor.uniform_(-bound, bound, generator=generator)
            self.register_parameter(f"{name}_{part}", nn.Parameter(tensor))

    def forward(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        length: int | Tensor,
        recent: Tensor | None = None,
        *,
        heads: slice | None = None,
        stacked: bool | None = None,
        contexts: Sequence[int] | None = None,
        gaps: bool = False,
    ) -> Tensor:
        """Score tokens: keys and values [a, N, D] of the a heads in `heads` -> float32 [a, N].

        `recent` is [a, N, features] (`policies.recent_features`), for rankers with that input.

        `positions` is int64 [N], or [a, N] where heads see different contexts; `length` is tokens
        seen at compression (last position + 1), one number or shaped as `positions`. Several
        contexts may be concatenated along N; `contexts` are their lengths, which only rankers with
        `neighbours` need. `gaps`: positions ascend but leave some out, and neighbours are those at
        that distance in position. `stacked` forces one batched product per layer of the network
        (default on accelerators, and of bfloat16 weights) or a loop over heads (float32 on a CPU).
        """
        heads = heads or slice(None)
        count = len(range(self.total_kv_heads)[heads])
        if keys.shape != values.shape or keys.shape[0] != count:
            raise ValueError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be "
                f"[{count}, tokens, {self.spec.head_dim}]"
            )
        if self.spec.reads_queries and (recent is None or recent.shape[:2] != keys.shape[:2]):
            raise ValueError("rankers with the input recent need its features of every token")
        if stacked is None:  # what is faster, docs/results/speed.md
            stacked = keys.device.type != "cpu" or self.dtype == torch.bfloat16
        return score_tokens(
            self.spec, self.weights(heads), keys, values, positions, length, recent,
            stacked=stacked, contexts=contexts, gaps=gaps,
        )  # fmt: skip

    def weights(self, heads: slice) -> dict[str, Tensor]:
        """Parameters and statistics of the a heads in `heads`, name -> [a, ...].

        They carry gradients.
        """
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tensor[heads] for name, tensor in tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; statistics of the inputs and scores are always float32."""
        return next(self.parameters()).dtype

    @property
    def parameter_count(self) -> int:
        """Number of trained values of all heads together."""
        return sum(parameter.numel() for parameter in self.parameters())

    def standardise(
        self, *, key_mean: Tensor, key_std: Tensor, value_mean: Tensor, value_std: Tensor
    ) -> None:
        """Set the per-head feature statistics, each [A, D]; stored with the policy.

        Channels that never vary are only centred; statistics of an input that the rankers do not
        have are not used. Raises ValueError for `paper`, whose inputs are raw.
        """
        if self.spec.architecture == "paper":
            raise ValueError("the paper architecture takes raw keys and values")
        new = {"key_mean": key_mean, "key_std": key_std}
        new |= {"value_mean": value_mean, "value_std": value_std}
        buffers = dict(self.named_buffers())
        for name, statistic in new.items():
            if statistic.shape != (self.total_kv_heads, self.spec.head_dim):
                raise ValueError(f"{name} must be {(self.total_kv_heads, self.spec.head_dim)}")
            if name.endswith("_std"):
                statistic = torch.where(statistic > _EPSILON, statistic, 1.0)
            if name in buffers:
                buffers[name].copy_(statistic)

    def head_states(self) -> list[dict[str, Tensor]]:
        """State of every head alone: tensors without the head axis, detached, contiguous."""
        return [
            {name: tensor[head].clone() for name, tensor in self.state_dict().items()}
            for head in range(self.total_kv_heads)
        ]

    def with_dtype(self, dtype: torch.dtype) -> HeadRankers:
        """A copy with weights of `dtype`; statistics of the inputs stay float32.

        bfloat16 halves them; scores are float32 all the same (`policies.network`).
        """
        rankers = copy.deepcopy(self)
        for parameter in rankers.parameters():
            parameter.data = parameter.data.to(dtype)
        return rankers

    @staticmethod
    def from_head_states(spec: RankerSpec, states: Sequence[Mapping[str, Tensor]]) -> HeadRankers:
        """Inverse of `head_states`; ValueError, naming the head, where a state does not fit."""
        expected = head_shapes(spec)
        for head, state in enumerate(states):
            if {name: tuple(tensor.shape) for name, tensor in state.items()} != expected:
                raise ValueError(f"the tensors of head {head} do not fit {spec}")
        with torch.device("meta"):
            rankers = HeadRankers(spec, len(states))
        stacks = {name: torch.stack([state[name] for state in states]) for name in expected}
        rankers.load_state_dict(stacks, assign=True)
        return rankers


def head_shapes(spec: RankerSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one head's state."""
    with torch.device("meta"):
        states = HeadRankers(spec, 1).state_dict()
    return {name: tuple(tensor.shape[1:]) for name, tensor in states.items()}


def parameters_per_head(spec: RankerSpec) -> int:
    """Number of trained values of one head's ranker, however it was trained."""
    with torch.device("meta"):
        return HeadRankers(spec, 1).parameter_count


def products_per_token(spec: RankerSpec) -> int:
    """Weights that a token is multiplied with in one head's ranker."""
    return sum(
        shape[0] * shape[1]
        for name, shape in head_shapes(spec).items()
        if name.endswith("_weight") and len(shape) == 2 and shape[1] > 1
    )


def bytes_per_token(spec: RankerSpec) -> int:
    """Bytes one head needs per token for activations and the temporaries of their backward pass.

    About 13 float32 vectors of the hidden width (10 were measured to be kept), the two inputs, and
    twice what the token adds to its neighbours.
    """
    taps = 2 * spec.neighbours + 1 if spec.neighbours else 0
    return 4 * (13 * spec.hidden + 2 * spec.head_dim + 2 * taps)
