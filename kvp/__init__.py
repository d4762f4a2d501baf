"""kvp: learned per-head KV-cache eviction policies.

This package holds the vocabulary, the mathematics, the file formats and the operators; methods live
in `policies`, programs in `trace_collect`, `train` and `eval`.
"""

__version__ = "0.1.0"
