"""A data set of the hub by name and configuration, from a local cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.task import TaskSettings
from kvp.errors import UsageError

SETTINGS = TaskSettings(length=99)
LENGTHS = ("4096", "8192")


def rows(length: str) -> list[dict[str, Any]]:
    return [
        {
            "context": f"Context {number} of {length}. ", "question": "What?",
            "answer_prefix": " Answer:", "answer": ["1", "2"], "task": "qa_1",
            "max_new_tokens": 32,
        }
        for number in range(3)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


def cached(cache: Path, name: str, length: str) -> None:
    """What `load_dataset(name, length)` leaves in its cache."""
    from datasets import Dataset, DatasetInfo
    from datasets.arrow_writer import ArrowWriter

    owner, _, short = name.partition("/")
    folder = cache / f"{owner}___{short}" / length / "0.0.0" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    features = Dataset.from_list(rows(length)).features
    with ArrowWriter(path=str(folder / f"{short}-test.arrow"), features=features) as writer:
        for row in rows(length):
            writer.write(row)
        examples, size = writer.finalize()
    part = {"name": "test", "num_bytes": size, "num_examples": examples, "dataset_name": short}
    DatasetInfo(
        features=features, builder_name="parquet", dataset_name=short, config_name=length,
        version="0.0.0", splits={"test": part},
    ).write_to_directory(str(folder))  # fmt: skip


def test_by_name_and_configuration(cache: Path) -> None:
    for length in LENGTHS:
        cached(cache, "somebody/ruler", length)
    for length in LENGTHS:
        usable, _ = read_documents(f"somebody/ruler:{length}", "data", SETTINGS)
        assert [one.questions[0].context for one in usable if one.questions] == [
            row["context"] for row in rows(length)
        ]
        first = usable[0].questions[0]
        assert first is not None
        assert (first.answers, first.task, first.metric) == (("1", "2"), "qa_1", "part")
    with pytest.raises(UsageError, match=r"multiple .* configurations in the cache: (8192|4096)"):
        read_documents("somebody/ruler", "data", SETTINGS)
