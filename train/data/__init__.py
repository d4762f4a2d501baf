"""What rankers are trained on: traces, compression points, contexts."""
