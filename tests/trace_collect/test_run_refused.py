"""What kvp collect refuses: one line, exit code 2, and before the weights are loaded."""

import json
import shutil
from types import SimpleNamespace

import pytest


@pytest.fixture
def no_weights(monkeypatch):
    """Fail the test where weights are loaded."""

    def load(*_, **__):
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr("trace_collect.run.load_configured_model", load)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=/no/such/folder"], "--model /no/such/folder: no such folder"),
        (["--length=1021"], "--max_new_tokens 4 exceeds the context"),
        (["--length=60"], "--length 60: the smallest niah_single_1 prompt"),
        (["--out=README.md"], "is a file"),
        (["--tasks=ruler", "--length=20"], "no task of ruler fits"),
        (["--train=0", "--validation=0"], "nothing to collect"),
        (["--device=cuda:99"], "--device cuda:99"),
        (["--labels=kvzip,snap"], "--labels: no label 'snap'; use kvzip, kvzip_plus"),
        (["--train=-1"], "--train must be at least 0"),
        (["--tasks= ,"], "--tasks is empty"),
    ],
)
def test_what_cannot_work_is_one_line_before_the_weights_are_loaded(
    run, tmp_path, flags, message, refused
):
    assert run(*flags) == 2
    assert message in refused()
    assert not (tmp_path / "out").exists()


def test_a_model_of_windows_alone_cannot_be_collected_from(run, model_folder, tmp_path, refused):
    windowed = tmp_path / "windowed"
    shutil.copytree(model_folder, windowed)
    config = json.loads((windowed / "config.json").read_text())
    layers = ["sliding_attention", "sliding_attention"]
    config.update(use_sliding_window=True, sliding_window=64, layer_types=layers)
    (windowed / "config.json").write_text(json.dumps(config))
    assert run("--model", str(windowed)) == 2
    assert "64 tokens" in refused()


def test_a_full_disk_is_refused_before_the_weights_are_loaded(
    run, monkeypatch, no_weights, refused
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert run() == 2
    assert "1.0 kB free on that disk" in refused()
