"""Names in training: inputs of rankers, labels in trace stores. Imports no torch."""

PAPER_INPUTS = ("key", "value", "position")
"""Inputs of the paper's ranker: its position table knows nothing of the end of the cache."""
TOKEN_INPUTS = (*PAPER_INPUTS, "distance")
"""Inputs of a learned ranker that need no query; distance is that to the end of the cache."""
INPUTS = (*TOKEN_INPUTS, "recent")
"""Inputs of a ranker, in its network's order; recent is what the last queries attend to."""

STORED_LABELS = ("kvzip", "kvzip_plus")
"""Labels a trace store may hold: importance of every prompt token by another method."""
NO_TRACES = "no trace store at {}: no such folder; kvp collect makes one"
"""The message for a missing folder; {} stands for its name."""
