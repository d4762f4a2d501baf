"""What artefacts record of names: no local path."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvp.errors import ModelError
from kvp.manifest import portable, recorded_name


def test_local_paths_lose_all_but_their_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = {
        "out": f"{tmp_path}/new",
        "data": f"ruler:0.5,{tmp_path}/notes:0.5",
        "command": ["--policies", f"mine={tmp_path}/policy", "./notes", "."],
        "methods": ["snapkv+ada", "tuned:../settings.json"],
        "steps": 3,
    }
    assert portable(settings) == {
        "out": "new",
        "data": "ruler:0.5,notes:0.5",
        "command": ["--policies", "mine=policy", "notes", "."],
        "methods": ["snapkv+ada", "tuned:settings.json"],
        "steps": 3,
    }


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-7B", "s3://bucket/traces", "hf://datasets/a/b"])
def test_names_that_mean_the_same_elsewhere_stay(text: str) -> None:
    assert portable(text) == text


def test_models_are_called_by_their_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert recorded_name("nano") == "nano"
    assert recorded_name("org/model") == "org/model"
    assert recorded_name(str(folder)) == "my-model"
    (folder / "small.Q4.gguf").touch()
    assert recorded_name(str(folder)) == "small.Q4"
    assert recorded_name(str(folder / "small.Q4.gguf")) == "small.Q4"
    (folder / "other.gguf").touch()
    with pytest.raises(ModelError, match="name one"):
        recorded_name(str(folder))
