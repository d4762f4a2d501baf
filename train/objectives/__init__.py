"""What rankers learn: one file per objective, all with the signature `batch.Objective`.

Every head is an agent of its own: nothing mixes heads, and losses are summed over heads, so that
what "gradient norm 5" means does not depend on how many heads train together. A new objective is
one file, one line in `OBJECTIVES`, one name in `train.presets` and one row in docs/method.md.
"""

from train.objectives import listwise, regress, rloo
from train.objectives.batch import Batch, Objective
from train.presets import ObjectiveName

OBJECTIVES: dict[ObjectiveName, Objective] = {
    "rloo": rloo.objective,
    "listwise": listwise.objective,
    "regress": regress.objective,
}

__all__ = ["OBJECTIVES", "Batch", "Objective"]
