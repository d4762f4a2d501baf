"""Compressed contexts for engines: files, transformers, a vLLM connector and its client."""
