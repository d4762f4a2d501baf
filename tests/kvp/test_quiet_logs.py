from __future__ import annotations

import logging

import pytest

from kvp.progress import quiet_logs


def test_retries_of_the_hub_client_are_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    client = logging.getLogger("huggingface_hub.utils._http")
    before = logging.getLogger("huggingface_hub").level
    with quiet_logs():
        client.warning("Retrying in 8s [Retry 4/5].")
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == before
