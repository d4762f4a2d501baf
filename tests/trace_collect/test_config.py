from __future__ import annotations

import pytest

from trace_collect.config import CollectConfig


def test_lists_and_counts() -> None:
    config = CollectConfig(out="x", tasks=" vt, fwe,,vt ", train=3, validation=2, test=1, length=50)
    assert config.task_list == ("vt", "fwe")
    assert config.counts == {"train": 3, "validation": 2, "test": 1}
    assert (config.sequences, config.max_tokens) == (6, 178)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"train": -1}, "--train"),
        ({"train": 0, "validation": 0}, "nothing to collect"),
        ({"length": 0}, "--length"),
        ({"max_new_tokens": 0}, "--max_new_tokens"),
        ({"tasks": " ,"}, "--tasks"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(settings: dict[str, int], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        CollectConfig(out="x", **settings)  # type: ignore[arg-type]
