"""Operators: `reference.py` of a folder is the definition; a faster form joins it when measured."""
