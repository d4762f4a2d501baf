"""Results folders: their rows, statistics, comparisons and the sentences about them; tuned settings."""
