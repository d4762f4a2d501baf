"""Training from a running model: its traces stay in RAM, and none lies on a disk."""
