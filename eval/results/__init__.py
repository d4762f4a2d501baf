"""The results folder: its manifest and its records."""
