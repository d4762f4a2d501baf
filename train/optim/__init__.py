"""Optimiser, learning-rate schedule, gradient clipping and weight averaging."""
