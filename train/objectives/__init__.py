"""Objectives of rankers; all are of the type `train.objectives.losses.Objective`.

Every KV head is an agent with a policy of its own (the paper's view): nothing mixes heads, and
losses are summed over heads, so that what "gradient norm 5" means does not depend on how many heads
train together. A new objective is one function, one line in `OBJECTIVES` and one row in
docs/method.md; a user's own is `package.module:function`. No torch here: command lines read the
names.
"""

from kvp.plugins import Registry

OBJECTIVES = Registry(
    flag="--objective",
    builtin={
        "rloo": "train.objectives.losses:rloo_objective",
        "rloo_batch": "train.objectives.losses:rloo_batch_objective",
        "exact": "train.objectives.losses:exact_objective",
        "listwise": "train.objectives.losses:listwise_objective",
        "regress": "train.objectives.losses:regress_objective",
        "soft_rank": "train.objectives.relaxed:soft_rank_objective",
        "soft_sort": "train.objectives.relaxed:soft_sort_objective",
        "neural_sort": "train.objectives.relaxed:neural_sort_objective",
    },
)

_SAMPLED = ("rloo", "rloo_batch")
_SORTS = ("soft_rank", "soft_sort", "neural_sort")

READ_BY: dict[str, tuple[str, ...]] = {
    "permutations": _SAMPLED,
    "reward": (*_SAMPLED, "exact"),
    "sort_loss": _SORTS,
    "temperature": _SORTS,
}
"""Settings of a recipe -> the built-in objectives that read them; all others ignore them."""


__all__ = ["OBJECTIVES", "READ_BY"]
