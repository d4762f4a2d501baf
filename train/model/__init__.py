"""The Lightning module that trains all rankers, and what it is built of."""
