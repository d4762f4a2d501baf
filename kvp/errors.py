"""Errors a user can cause. Each message is one line that names the flag or file and what to do.

Programs turn every `KvpError` into that line on stderr and exit code 2 (`kvp.exit_codes`). Bugs
are not `KvpError`s: they keep their traceback.
"""


class KvpError(Exception):
    """Base of every error a user can cause."""


class UsageError(KvpError):
    """A flag or an argument that cannot work; the message names it."""


class ModelError(KvpError):
    """A model or tokenizer that is missing or that kvp cannot evict from."""


class StoreError(KvpError):
    """A trace store that is damaged, incomplete or does not match the request."""


class PolicyError(KvpError):
    """A policy directory that is damaged or was made for another geometry."""


class CacheError(KvpError):
    """A cache file that is damaged or was made by another model."""


class ResultsError(KvpError):
    """A results folder that is damaged or belongs to another configuration."""


class AddressError(KvpError):
    """An address of an object store that cannot be understood, reached, read or written."""
