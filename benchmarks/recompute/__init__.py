"""Answers of kvp-eval, computed a second time without kvp's cache, scorers, eviction and decoding.

`python -m benchmarks.recompute RESULTS` draws cells of the tables of a results folder and one
prompt of each, and computes its record again: the model is transformers' own, run over the whole
sequence for every new token, with an attention mask per layer and KV head in place of a smaller
cache. Which tokens that mask shows is decided here, by scorers and allocators written again from
their definitions. Shared with kvp are the prompts: tasks, tokenizer and the tokens of a sample.
"""
