"""Silence about what other libraries try and fail at, where a program says it in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("huggingface_hub", "datasets")


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence the hub client and `datasets`: retries and failures end in one error of ours."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
