"""kvp eval: measure eviction methods on tasks, from a model and policies to JSONL records.

`run.run` is the program, `config.EvalConfig` its settings. Reports are made from the results folder
alone (`eval.report`).
"""
