"""kvp-evolve: budgets per layer or head, by evolution (EvolKV) or from stored cost curves.

Only the search runs a model. Both write a budget file (`policies.budget_files`).
"""
