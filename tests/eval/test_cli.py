from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eval.config import EvalConfig, TuneConfig
from eval.methods import build_methods
from kvp.programs import run_program
from policies import split_method

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_shipped_configurations_are_sound(path: Path) -> None:
    settings = yaml.safe_load(path.read_text())
    if "methods" not in settings:  # another program's
        return
    if "settings_per_method" in settings:
        config = TuneConfig(out="unused", **settings).evaluation
    else:
        config = EvalConfig(out="unused", **settings)
    methods = [spec for spec in config.method_list if split_method(spec)[0] != "kvp"]
    assert build_methods(methods, allocators=config.allocator_list)


def test_out_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program("eval", ["--prompts", "3"]) == 2
    assert "--out is missing" in capsys.readouterr().err
