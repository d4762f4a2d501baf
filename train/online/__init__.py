"""Training from a running model: traces pass through a bounded buffer, or fill a store."""
