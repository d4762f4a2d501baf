from __future__ import annotations

from pathlib import Path

import pytest

from kvp.data.text_files import read_text
from kvp.errors import UsageError


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "c.md").write_text("Not this.")
    assert read_text(str(tmp_path), "essays") == "First.\n\nSecond."
    assert read_text(str(tmp_path / "b.txt"), "essays") == "Second."


@pytest.mark.parametrize("what", ["missing", "empty folder", "blank"])
def test_unusable_texts_name_the_flag(tmp_path: Path, what: str) -> None:
    path = tmp_path / "t"
    if what == "empty folder":
        path.mkdir()
    elif what == "blank":
        path.write_text(" \n")
    with pytest.raises(UsageError, match="--essays"):
        read_text(str(path), "essays")
