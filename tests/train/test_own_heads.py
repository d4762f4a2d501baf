"""`--heads auto`: which heads a process trains, and where it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvp.config_groups import Rank
from kvp.errors import StoreError, UsageError
from kvp.programs import train as main
from train.config import TrainConfig
from train.own_heads import heads_of, own_heads


@pytest.mark.parametrize(("count", "total"), [(1, 4), (2, 4), (3, 20), (7, 112), (112, 112)])
def test_every_head_has_one_process(count: int, total: int) -> None:
    shares = [heads_of(Rank(index=index, count=count), total) for index in range(count)]
    assert [head for share in shares for head in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1


def test_more_processes_than_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="--heads auto: 5 processes, but only 4 KV heads"):
        heads_of(Rank(index=0, count=5), 4)


@pytest.fixture
def second_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun and srun start the second of three processes."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_of_three")
def test_the_settings_of_one_process(store: Path, tmp_path: Path) -> None:
    config = TrainConfig(heads="auto", out=str(tmp_path / "out"), traces=str(store))
    own = own_heads(config)
    assert (own.heads, own.out) == ("1:2", str(tmp_path / "out" / "heads-1-2"))
    model = own_heads(TrainConfig(heads="auto", out="o", source="model", model="nano"))
    assert model.heads == "6:13"
    with pytest.raises(StoreError, match="is not a trace store"):
        own_heads(TrainConfig(heads="auto", out="o", traces=str(tmp_path)))


def test_alone_it_trains_all(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    config = TrainConfig(heads="auto", out="out", traces=str(store))
    assert own_heads(config) == TrainConfig(out="out", traces=str(store))


@pytest.mark.usefixtures("second_of_three")
def test_a_process_of_several_writes_its_shard(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning sees the same variables, and must not take this for a rank that writes nothing."""
    out = tmp_path / "out"
    flags = ["--steps=4", "--hidden=16", "--min_prefix=40", "--contexts=2", "--heads=auto"]
    assert main([f"--traces={store}", f"--out={out}", *flags]) == 0
    assert {path.name for path in (out / "heads-1-2").glob("*.safetensors")} == {
        "layer_00_head_01.safetensors"
    }
    said = capsys.readouterr().out
    assert f"next: kvp merge --shards {out} --out POLICY, when all heads are trained" in said
