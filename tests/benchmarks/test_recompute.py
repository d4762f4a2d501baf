"""Answers computed again with masks are those of kvp-eval, and a wrong one is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.recompute.__main__ import main as recompute
from kvp.allocation import ranked_tokens
from kvp.artifacts.jsonl import JsonLines
from kvp.geometry import Geometry
from kvp.programs import evaluate as kvp_eval
from policies.calibration import Calibration
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec
from policies.ranker_spec import INPUTS

METHODS = (
    "full,kvp,kvp+global,streaming_llm,ring,knorm+ada,keydiff,tova,snapkv+global,h2o,"
    "snapkv(window=8,kernel=9,pool=avg)+ada(safeguard=0.5),expected_attention,"
    "kvzip(chunk=100)+global:kvzip,oracle,random,lagkv,lagkv(lag=16,n_sink=0)+pyramid,"
    "tova:kvpress+pyramid(beta=3,window=0)"
)
GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)

Evaluate = Callable[..., Path]
Main = Callable[[list[str]], int]


def _policy(folder: Path, spec: RankerSpec) -> None:
    rankers = HeadRankers(spec, heads=GEOMETRY.total_kv_heads)
    if spec.neighbours:
        with torch.no_grad():
            rankers.neighbours_weight.normal_()
    knots = torch.randn(2, GEOMETRY.total_kv_heads, 4).sort(dim=-1).values
    save_policy(
        folder,
        rankers,
        PolicyMeta(geometry=GEOMETRY, model={"id": "m", "revision": None}, training={"seed": 0}),
        calibration=Calibration(target="share", scores=knots[0], values=knots[1]),
    )


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recompute")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        turning = (1.0, 0.3, 0.1, 0.03)
        _policy(folder / "fourier", RankerSpec(head_dim=8, hidden=8, key_frequencies=turning))
        _policy(folder / "paper", RankerSpec(head_dim=8, hidden=8, architecture="paper"))
        _policy(folder / "recent", RankerSpec(head_dim=8, hidden=8, inputs=INPUTS, neighbours=5))
    return ",".join(map(str, folder.iterdir()))


@pytest.fixture
def main(model_folder: Path, policies: str) -> Main:
    """The program, told where the model and the policies lie: results do not say it."""
    where = ["--model", str(model_folder), "--policies", policies]
    return lambda arguments: recompute([*arguments, *where])


@pytest.fixture(scope="module")
def evaluate(model_folder: Path, policies: str) -> Evaluate:
    def run(out: Path, **changes: str) -> Path:
        settings = {
            "model": str(model_folder), "policies": policies,
            "methods": METHODS, "tasks": "niah_single_1,chat", "budgets": "12.5%,25%",
            "prompts": "1", "length": "260", "timing_prompts": "0", "tokens": "false",
            "max_new_tokens": "4", "bootstrap": "10", "out": str(out), **changes,
        }  # fmt: skip
        assert (
            kvp_eval([part for name, text in settings.items() for part in (f"--{name}", text)]) == 0
        )
        return out

    return run


@pytest.fixture(scope="module")
def results(evaluate: Evaluate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluate(tmp_path_factory.mktemp("results") / "right")


def test_all_cells_are_the_same(
    main: Main, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(results), "--cells", "80", "--seed", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[1] == "not drawn: random"
    assert last == "80 of 80 cells are the same"
    drawn = lines[3:]
    assert len({line.partition(" same: ")[0] for line in drawn}) == 80
    for word in (
        "kvp/fourier",
        "kvp/paper",
        "kvp/recent",
        "+global",
        "+ada",
        "+pyramid",
        "lagkv",
        "not seen",
        "on",
        "off",
        "nats",
    ):
        assert any(word in line for line in drawn)


def test_another_seed_draws_other_cells(
    main: Main, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for seed in ("0", "0", "1"):
        assert main([str(results), "--cells", "2", "--seed", seed]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("field", ["prediction", "score", "nll", "kept_tokens"])
def test_an_altered_row_is_found(
    main: Main, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    shutil.copytree(results, tmp_path / "altered")
    lines = JsonLines(tmp_path / "altered" / "rows.jsonl")
    task = "chat" if field == "nll" else "niah_single_1"
    row = next(row for row in lines if (row["method"], row["task"]) == ("keydiff", task))
    row[field] = "1234567" if field == "prediction" else row[field] + 0.5
    lines.rewrite([row])
    assert main([str(tmp_path / "altered")]) == 1
    line, last = capsys.readouterr().out.splitlines()[-2:]
    assert f"DIFFERS in {field}:" in line
    assert last == "0 of 1 cells are the same"


def test_one_token_kept_wrongly_is_found(
    main: Main, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_a_mistake(ranking: Tensor, counts: Tensor) -> Tensor:
        wrong = ranking.clone()
        best, next_best = int(counts[1, 0]) - 1, int(counts[1, 0])
        wrong[1, 0, [best, next_best]] = ranking[1, 0, [next_best, best]]
        return ranked_tokens(wrong, counts)

    settings: dict[str, Any] = {
        "methods": "keydiff", "tasks": "chat", "budgets": "25%", "protection": "off",
        "protocols": "query_aware",
    }  # fmt: skip
    with patch("kvp.selection.ranked_tokens", with_a_mistake):
        wrong = evaluate(tmp_path / "wrong", **settings)
    assert main([str(wrong)]) == 1
    assert "DIFFERS in nll:" in capsys.readouterr().out
    assert main([str(evaluate(tmp_path / "right", **settings))]) == 0


def test_what_cannot_be_computed_again_is_refused(
    main: Main, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = {"methods": "random", "tasks": "chat", "budgets": "25%"}
    assert main([str(evaluate(tmp_path / "random", **drawn))]) == 2
    assert "has no row that can be computed again" in capsys.readouterr().err
    half = {"methods": "full", "tasks": "chat", "dtype": "bfloat16"}
    assert main([str(evaluate(tmp_path / "half", **half))]) == 2
    assert "use a folder of --dtype float32" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "has no manifest.json: name a folder that kvp-eval wrote" in capsys.readouterr().err
