"""kvp tune: choose the setting of every method on validation prompts, by the same search for each.

`search` decides what is tried next, `run` measures it with the machinery of kvp eval; the result is
an `eval.tune.tuned_settings`, which kvp eval runs (`--methods tuned:FILE`).
"""
