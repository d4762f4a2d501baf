"""kvp evolve: budgets per layer by evolution (EvolKV), into a budget file."""
