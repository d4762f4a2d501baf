"""Training straight from a running model: traces pass through a bounded buffer, no store at all."""
