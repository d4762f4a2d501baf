"""One command that measures what kvp costs and writes docs/performance.md from what it found."""
