"""Results folders: rows, statistics, comparisons and sentences about them; tuned settings."""
