"""The results folder: its manifest, its records, and what readers check of them."""
