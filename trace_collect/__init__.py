"""kvp collect: run a model over prompts and store queries, keys and values for training."""
