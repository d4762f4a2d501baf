from __future__ import annotations

import subprocess
import sys

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
        ({"rate": 0.0}, "--rate"),
        ({"tasks": " ,"}, "--tasks"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(settings: dict[str, int], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        CollectConfig(out="x", **settings)  # type: ignore[arg-type]


def test_help_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from trace_collect.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print({'torch', 'transformers', 'zarr'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip().endswith("set()")
    assert "--max_new_tokens" in done.stdout
    assert "The answer comes on top" in done.stdout
