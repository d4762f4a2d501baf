"""kvp lm-eval: the harness's command line with our model class, offline."""

import json
import sys

from eval.lm_harness import cli


def test_a_run_from_the_command_line(model_folder, tmp_path, jsonl, capsys):
    passage = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 4
    rows = [{"passage": passage, "question": "is it so", "label": n % 2} for n in range(3)]
    data = jsonl(tmp_path / "boolq.jsonl", *rows)
    task = {
        "task": "mine", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_choice": ["no", "yes"],
        "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:", "doc_to_target": "label",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    eviction = "method=snapkv+global,budget=25%,question=outside"
    arguments = [
        "--model_args", f"pretrained={model_folder},{eviction}",
        "--tasks", str(tmp_path / "mine.yaml"), "--device", "cpu", "--batch_size", "4",
        "--output_path", str(tmp_path / "out"), "--limit", "2",
    ]  # fmt: skip
    argv = list(sys.argv)
    assert cli.main(arguments) == 0
    assert sys.argv == argv
    assert "|mine" in capsys.readouterr().out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["model"] == "kvp"
    assert results["config"]["model_args"]["budget"] == "25%"
    assert results["n-samples"]["mine"]["effective"] == 2


def test_without_the_harness_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("kvp.plugins.find_spec", lambda _: None)
    assert cli.main(["--tasks", "boolq"]) == 2
    assert "the harness needs the package lm_eval: pip install" in capsys.readouterr().err
