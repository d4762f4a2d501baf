from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eval.cli import main
from eval.config import EvalConfig
from eval.methods import build_methods
from eval.tune.config import TuneConfig
from policies import split_method

CONFIGS = Path(__file__).parents[2] / "configs"


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from eval.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.endswith("set()\n")
    for flag in ("--budgets", "--protocols", "--traces", "Tokens kept per KV head"):
        assert flag in out.stdout


def test_list_prints_the_registry_without_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "oracle" in out
    assert "attention-free" in out


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
    assert main(["--prompts", "3"]) == 2
    assert "--out is missing" in capsys.readouterr().err
