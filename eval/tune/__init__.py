"""kvp tune: choose the setting of every method on validation prompts, with equal effort for each.

`search` decides what is tried next, `measure` measures it with the machinery of kvp-eval, and
`settings_file` is the result, which kvp-eval runs (`--methods tuned:FILE`).
"""
