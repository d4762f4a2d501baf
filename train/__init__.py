"""`kvp train`: trace store -> policy directory."""
