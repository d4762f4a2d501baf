"""The version of kvp, which the package, `--version` and everything written name."""

__version__ = "0.1.0"
