"""`kvp calibrate` from its command line: the policy it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from kvp.geometry import Geometry
from kvp.programs import run_program, train
from kvp.scoring import View
from policies.policy_files import PolicyMeta, load_policy, save_policy
from policies.ranker import HeadRankers, RankerSpec

main = partial(run_program, "calibrate")

MakeStore = Callable[..., Path]
GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "policy"
    small = ["--contexts", "2", "--hidden", "16", "--permutations", "4", "--min_prefix", "40"]
    small += ["--inputs", "key,value,position,distance"]
    assert train(["--traces", str(store), "--out", str(out), "--steps", "6", *small]) == 0
    return out


@pytest.fixture
def policy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "policy"))


def calibrate(policy: Path, store: Path, *more: str) -> int:
    return main(["--policy", str(policy), "--traces", str(store), *more])


def scores(policy: Path) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    view = View(
        layer=1,
        keys=torch.randn(1, 2, 60, 8, generator=random),
        values=torch.randn(1, 2, 60, 8, generator=random),
        positions=torch.arange(60)[None],
        budget=9,
    )
    return load_policy(policy).score(view)


def test_training_and_calibrating_agree(policy: Path, store: Path) -> None:
    before = (policy / "policy.json").read_bytes()
    assert calibrate(policy, store, "--calibration", "none") == 0
    assert json.loads((policy / "policy.json").read_text())["calibration"] is None
    assert calibrate(policy, store) == 0
    assert (policy / "policy.json").read_bytes() == before


def test_calibration_changes_scores_but_no_ranking(policy: Path, store: Path) -> None:
    assert calibrate(policy, store, "--calibration", "none") == 0
    raw = scores(policy)
    for target in ("contribution", "reply_contribution"):
        assert calibrate(policy, store, "--calibration", target) == 0
        calibrated = scores(policy)
        assert not torch.allclose(calibrated, raw)
        assert (calibrated.gather(-1, raw.argsort(-1)).diff(dim=-1) >= 0).all()


def test_policies_without_calibration_can_get_one(store: Path, tmp_path: Path) -> None:
    rankers = HeadRankers(RankerSpec(head_dim=8, hidden=8), 4, torch.Generator().manual_seed(0))
    meta = PolicyMeta(geometry=GEOMETRY, model={"id": "synthetic", "revision": None})
    save_policy(tmp_path / "plain", rankers, meta)
    assert load_policy(tmp_path / "plain").calibration is None
    assert calibrate(tmp_path / "plain", store, "--calibration_contexts", "1") == 0
    assert load_policy(tmp_path / "plain").calibration is not None


def test_what_cannot_be_calibrated_is_left_as_it_was(
    policy: Path,
    store: Path,
    make_store: MakeStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (policy / "policy.json").read_bytes()
    other = make_store(geometry=Geometry(layers=1, query_heads=4, kv_heads=2, head_dim=8))
    for flags, message in [
        ((policy, other), "was trained for 2 layers x 2 KV heads"),
        ((policy, make_store(queries=False)), "collected without queries"),
        ((policy, make_store(validation=0)), "no validation sequences"),
        ((policy, make_store(write=3)), "lacks 5 of 8 sequences"),
        ((tmp_path / "none", store), "has no policy.json"),
        (
            (policy, store, "--calibration_contexts", "0"),
            "--calibration_contexts must be at least 1",
        ),
        ((policy, store, "--memory_gb", "0"), "--memory_gb must be positive"),
        ((policy, store, "--device", "banana"), "--device must be"),
    ]:
        capsys.readouterr()
        assert calibrate(*flags) == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (policy / "policy.json").read_bytes() == before
