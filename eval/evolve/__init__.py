"""kvp evolve: budgets per layer or head, by evolution (EvolKV) or from stored cost curves.

Only the search runs a model. Both write a budget file (`policies.budget_files`).
"""

from __future__ import annotations

from eval.evolve.config import EvolveConfig


def choose_budgets(config: EvolveConfig) -> None:
    """Run kvp evolve; raises KvpError on anything the user can mend."""
    if config.cost_curves is None:
        from eval.evolve.run import run_search

        run_search(config)
    else:
        from eval.evolve.from_cost_curves import run_curves

        run_curves(config)
