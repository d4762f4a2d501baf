"""What rankers learn: one file per family, all objectives with the signature `batch.Objective`.

Every head is an agent of its own: nothing mixes heads, and losses are summed over heads, so that
what "gradient norm 5" means does not depend on how many heads train together. A new objective is
one file, one line in `OBJECTIVES`, one name in `train.recipe` and one row in docs/method.md.
"""

from train.objectives import exact, listwise, regress, relaxed, rloo
from train.objectives.objective_batch import Batch, Objective
from train.recipe import ObjectiveName

OBJECTIVES: dict[ObjectiveName, Objective] = {
    "rloo": rloo.objective,
    "rloo_batch": rloo.batch_objective,
    "exact": exact.objective,
    "listwise": listwise.objective,
    "regress": regress.objective,
    "soft_rank": relaxed.soft_rank_objective,
    "soft_sort": relaxed.soft_sort_objective,
    "neural_sort": relaxed.neural_sort_objective,
}

__all__ = ["OBJECTIVES", "Batch", "Objective"]
