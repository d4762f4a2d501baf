"""kvp eval: measure eviction methods on tasks, from a model and policies to JSONL records.

`run.run` is the program, `config.EvalConfig` its settings, `report` reads the results folder alone.
"""
