"""Training data: traces, compression points, contexts."""
