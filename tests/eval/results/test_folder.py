from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.results.folder import open_folder, write_manifest
from kvp.errors import ResultsError


def _config(folder: Path, **fields: object) -> EvalConfig:
    return EvalConfig(out=str(folder / "results"), **fields)  # type: ignore[arg-type]


def test_a_run_may_grow_in_its_own_folder(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert open_folder(config, {}) == {}
    write_manifest(config, {}, {"seed0": "aa"}, ["a note"])
    larger = replace(config, prompts=7, methods="tova", tasks="chat", budgets="30", device="cuda")
    earlier = open_folder(larger, {"seed1": "bb"})
    write_manifest(larger, earlier, {"seed1": "bb"}, ["a note", "another"])
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}
    assert manifest["notes"] == ["a note", "another"]
    assert manifest["config"]["prompts"] == 7
    assert [run["config"]["prompts"] for run in manifest["earlier_runs"]] == [100]
    write_manifest(larger, open_folder(larger, {}), {}, [])  # a resumed run is not a new one
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert len(manifest["earlier_runs"]) == 1
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}


@pytest.mark.parametrize(
    ("field", "value"), [("length", 1024), ("seed", 1), ("recents", 8), ("split", "validation")]
)
def test_another_configuration_is_refused_by_its_flag(
    tmp_path: Path, field: str, value: object
) -> None:
    config = _config(tmp_path)
    write_manifest(config, {}, {}, [])
    with pytest.raises(ResultsError, match=rf"another configuration \(--{field} is"):
        open_folder(replace(config, **{field: value}), {})


def test_another_policy_of_the_same_label_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    write_manifest(config, {}, {"seed0": "aa"}, [])
    with pytest.raises(ResultsError, match="another policy or budget file called 'seed0'"):
        open_folder(config, {"seed0": "bb"})


def test_folders_that_hold_no_results_are_left_alone(tmp_path: Path) -> None:
    config = _config(tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    assert open_folder(config, {}) == {}
    (results / "letter.txt").touch()
    with pytest.raises(ResultsError, match="is not empty and holds no results"):
        open_folder(config, {})
    (results / "manifest.json").write_text("{")
    with pytest.raises(ResultsError, match=r"manifest\.json is damaged"):
        open_folder(config, {})
    (results / "manifest.json").write_text("{}")
    with pytest.raises(ResultsError, match=r"manifest\.json describes no results"):
        open_folder(config, {})
    (results / "manifest.json").write_text('{"format": "kvp-results", "format_version": 2}')
    with pytest.raises(ResultsError, match=r"manifest\.json is damaged"):
        open_folder(config, {})
    (results / "manifest.json").write_text('{"format": "kvp-results", "format_version": 1}')
    with pytest.raises(ResultsError, match="has format_version 1, this kvp-eval writes 2"):
        open_folder(config, {})
    with pytest.raises(ResultsError, match="is a file"):
        open_folder(replace(config, out=str(results / "letter.txt")), {})
