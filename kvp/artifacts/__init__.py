"""Output files and folders (`docs/formats.md`): atomic writes, one writer at a time."""
