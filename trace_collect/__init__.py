"""kvp-collect: run a model over prompts and store what its attention saw, for offline training."""
