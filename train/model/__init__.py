"""The Lightning module that trains all rankers, and its parts."""
