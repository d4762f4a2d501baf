"""Operators: one folder each; `reference.py` is the definition, a kernel joins it when measured."""
