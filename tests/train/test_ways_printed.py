"""`kvp-train --dry-run` without traces: the ways to a policy, their costs and a command."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.costs.memory import Memory
from train.costs.of_model import assumed_seconds
from train.costs.plan import Plan
from train.costs.table import commands
from train.costs.ways import Cost, costs_of

from kvp.cli import parse
from kvp.data.synthetic.prose import prose
from kvp.errors import UsageError
from kvp.hf import load_config
from kvp.programs import collect
from kvp.programs import train as main
from train.config import TrainConfig
from train.dry_run import planned
from train.online.training_data import OnlineTrainingData, open_online_training_data

SHORT = ("--length=300", "--max_new_tokens=4")
SMALL = (*SHORT, "--tasks=niah_single_1,niah_single_2")


def parsed(flags: list[str]) -> TrainConfig:
    """The configuration that kvp-train makes of its flags."""
    return parse(TrainConfig, flags)


def online(plan: Plan) -> Cost:
    """The way without a store."""
    return costs_of(plan, assumed_seconds(plan, "h100"))[-1]


@pytest.fixture(scope="module")
def qwen() -> Path:
    """The configuration of Qwen2.5-7B alone."""
    return Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen2.5-7b"


def test_a_7b_model_from_its_configuration_alone(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(qwen), "--dtype=bfloat16", "--length=4096", "--rates=h100")
    assert main(["--dry-run", "--out", str(tmp_path / "p"), *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "7.62 B parameters, bfloat16; 100 training and 40 validation" in printed[0]
    assert [line.split("  ")[0] for line in printed[1:5]] == [
        "way",
        "full traces",
        "importance store",
        "--source model",
    ]
    assert any(line.startswith("recommended: --source model, ") for line in printed)
    assert printed[-2] == (
        f"  kvp-train --source model --model {qwen} --dtype bfloat16 --length 4096 --device cuda "
        "--sequences 100 --buffer 100 --validation_sequences 40 --memory_gb 49 "
        f"--out {tmp_path / 'p'}"
    )
    assert printed[-1] == "dry run: nothing was written"
    assert not (tmp_path / "p").exists()


def test_what_it_recommends_runs(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "p"))
    sizes = ("--sequences=4", "--validation_sequences=2", "--steps=2", "--contexts=1", "--hidden=8")
    flags = ("--model", str(model_folder), *SMALL, *sizes, *out)
    assert main(["--dry-run", "--source=model", *flags]) == 0
    printed = capsys.readouterr().out
    assert "times: measured: processor time of one thread on cpu" in printed
    (command,) = re.findall(r"^  kvp-train (--source model .*)$", printed, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert (tmp_path / "p" / "policy.json").is_file()
    assert "buffer: 4 sequences and 2 for validation" in capsys.readouterr().out


def test_several_processes_are_said_to_share(
    qwen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--dry-run", "--model", str(qwen), "--rates=h100", "--devices=4"]
    assert main([*flags, "--out", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr().out
    assert (
        "note: times are of one process, RAM and GPU memory the most that each of --de" in printed
    )
    assert "torchrun --nproc-per-node 4 -m kvp collect" in printed
    assert re.search(r"^  kvp-train --source model .* --devices 4 --out", printed, re.MULTILINE)
    # of the processes of torchrun the first one speaks
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert main([*flags, "--out", str(tmp_path / "p")]) == 0
    assert capsys.readouterr().out == ""


def test_a_rate_stands_for_the_model(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dry-run", "--model", str(qwen), "--rates=a100", "--rate=100", "--sequences=10")
    assert main([*flags, "--out", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr().out
    assert "running the model: 100 tokens/s, as --rate says" in printed
    assert "10 training and 40 validation" in printed
    assert "training.md" not in printed


def test_rankers_that_read_queries_have_no_importance_store(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dry-run", "--model", str(qwen), "--rates=h100", "--inputs=key,value,recent")
    assert main([*flags, "--out", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr().out
    assert not re.search("^importance store ", printed, re.MULTILINE)
    assert "no importance store: --inputs key,value,recent need queries" in printed


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts, of which fewer are for training."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": prose(n, 90, "train")}) for n in range(40)))
    return path


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        ("--sequences=5",),
        ("--sequences=130",),
        ("--source=model", "--sequences=130", "--buffer=20"),
        ("--sequences=130", "--buffer=130"),
        ("--sequences=130", "--buffer=50", "--epochs_per_sequence=3"),
        ("--label=kvzip", "--sequences=9"),
        ("--points_per_sequence=4", "--uniform_points=0", "--answers=reference"),
        ("--preset=paper", "--steps=40", "--sequences=101"),
        ("--data=TEXTS", "--min_prefix=40"),
    ],
)
def test_every_size_it_recommends_is_accepted(
    sizes: tuple[str, ...],
    model_folder: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By kvp-train up to the point where the model would run."""
    given = [size.replace("TEXTS", str(texts)) for size in sizes]
    short = ("--steps=200", "--hidden=8", "--validation_sequences=3", "--memory_gb=0.001")
    kind = SHORT if texts.name in str(given) else SMALL
    base = ["--model", str(model_folder), *kind, *short, "--out", str(tmp_path / "p")]
    assert main(["--dry-run", "--rates=h100", "--device=cpu", *base, *given]) == 0
    config = parsed(["--dry-run", *base, *given])
    plan = planned(config, load_config(config.model))
    (command,) = commands(replace(online(plan), memory=Memory(ram_bytes=0)), plan)
    capsys.readouterr()
    opened = []

    def opening(*args: Any) -> OnlineTrainingData:
        opened.append(open_online_training_data(*args))
        raise UsageError("that is enough")

    monkeypatch.setattr("train.online.training_data.open_online_training_data", opening)
    program, *flags = shlex.split(command)
    assert (program, main(flags)) == ("kvp-train", 2)
    assert capsys.readouterr().err.endswith("that is enough\n")
    (data,) = opened
    assert len(data.training) == plan.buffer
    assert data.training.schedule.needed(config.recipe()) == plan.traced
    assert data.traces.plan.grid in (0, plan.kept_points)


@pytest.mark.parametrize("label", ["max_reply_attention", "max_future_attention", "kvzip", "OWN"])
@pytest.mark.parametrize("way", ["full traces", "importance store"])
def test_a_store_of_the_recommended_command_has_the_label(
    way: str, label: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_labels.py").write_text(
        "from train.labels.label import Label\n"
        "OWN = Label(from_queries=lambda q, k, n, stop: k.float()[..., :n, :].square().sum(-1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sizes = ("--sequences=2", "--validation_sequences=1", "--steps=1", "--contexts=1", "--hidden=8")
    flags = ("--model", str(model_folder), *SMALL, *sizes, "--out", str(tmp_path / "p"))
    config = parsed(["--dry-run", "--label", label.replace("OWN", "own_labels:OWN"), *flags])
    plan = planned(config, load_config(config.model))
    (cost,) = (cost for cost in costs_of(plan, assumed_seconds(plan, "h100")) if cost.way == way)
    on_cpu = replace(cost, memory=Memory(ram_bytes=0))
    for command, program in zip(commands(on_cpu, plan), (collect, main), strict=True):
        assert program(shlex.split(command)[1:]) == 0
    trained = json.loads((tmp_path / "p" / "policy.json").read_text())["training"]["recipe"]
    swapped = way == "importance store" and label == "OWN"
    assert trained["label"] == ("max_reply_attention" if swapped else config.label)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate=0",), "--rate must be positive, got 0"),
        (("--rates=mine",), "--rates"),
        (("--length=40000",), "exceeds the context of"),
        (("--device=cuda:7",), "--device cuda:7 is not available here"),
        (("--model=/no/such",), "--model /no/such: no such folder"),
    ],
)
def test_what_cannot_work_is_one_line(
    flags: tuple[str, ...],
    message: str,
    qwen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--dry-run", "--model", str(qwen), "--out", str(tmp_path / "p"), *flags]
    assert main(given) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvp-train: error: ")
    assert message in error


def test_more_sequences_than_the_buffer_roll(model_folder: Path) -> None:
    config = TrainConfig(
        out="p", dry_run=True, model=str(model_folder), length=300, max_new_tokens=4,
        tasks="niah_single_1", sequences=1000, steps=100, contexts=8,
    )  # fmt: skip
    plan = planned(config, load_config(config.model))
    assert (plan.train, plan.buffer, plan.epochs) == (1000, 100, 8)
    assert plan.traced == 100 + 7 * 100 // 8  # 8 passes, each sequence in 8 of them
    assert (plan.kept_points, plan.batch) == (8, 16)
    assert planned(replace(config, buffer=1000), load_config(config.model)).epochs == 0
    assert not plan.lengths.bound
    assert 200 < plan.lengths.prompt <= 300


def test_without_a_tokenizer_lengths_are_bounds(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    config = TrainConfig(out="p", dry_run=True, model=str(tmp_path), length=300)
    plan = planned(config, load_config(config.model))
    assert (plan.lengths.prompt, plan.lengths.answer, plan.lengths.bound) == (300, 128, True)
