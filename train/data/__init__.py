"""What a training learns from: traces, compression points, labels and contexts."""
