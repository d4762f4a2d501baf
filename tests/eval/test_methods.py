from __future__ import annotations

from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.methods import Method, build_methods, plan, policy_folders, print_methods
from kvp.budgets import parse_budgets
from kvp.errors import PolicyError, UsageError
from policies import make_scorer

TOVA = Method(name="tova", scorer=make_scorer("tova"))
FULL = Method(name="full")


def _config(**fields: object) -> EvalConfig:
    return EvalConfig(out="unused", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"protocols": "query_awre"}, "--protocols: no protocol 'query_awre'"),
        ({"prompts": 0}, "--prompts must be at least 1"),
        ({"recents": -1}, "--recents must be at least 0"),
        ({"methods": " , "}, "--methods is empty"),
        ({"max_new_tokens": 0}, "--max_new_tokens must be at least 1"),
    ],
)
def test_impossible_settings_name_their_flag(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _config(**fields)


def test_methods_carry_preset_and_options_as_variant() -> None:
    config = _config(
        methods="full,snapkv,snapkv:kvpress,snapkv(window=9),random,snapkv(kernel=5)", seed=3
    )
    methods = build_methods(config)
    assert [(method.name, method.variant) for method in methods] == [
        ("full", "auto"), ("snapkv", "auto"), ("snapkv", "kvpress"), ("snapkv", "window=9"),
        ("random", "auto"),
    ]  # fmt: skip
    assert methods[0].scorer is None
    assert methods[-1].scorer == make_scorer("random", seed=3)
    assert [method.label for method in methods][2:4] == ["snapkv:kvpress", "snapkv(window=9)"]


def test_unknown_methods_and_missing_policies_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown method 'snapvk'"):
        build_methods(_config(methods="snapvk"))
    with pytest.raises(UsageError, match="--methods kvp needs --policies"):
        build_methods(_config(methods="kvp"))
    with pytest.raises(PolicyError, match=r"holds no policy\.json"):
        build_methods(_config(methods="kvp", policies="nowhere"))


def test_policies_are_labelled_by_folder_or_by_hand(tmp_path: Path) -> None:
    for name in ("one", "many/seed0", "many/seed1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "policy.json").touch()
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    assert list(policy_folders([one, many])) == ["one", "seed0", "seed1"]
    assert policy_folders([f"mine={one}"]) == {"mine": tmp_path / "one"}
    assert list(policy_folders([f"a={many}", f"b={many}"])) == [
        "a.seed0", "a.seed1", "b.seed0", "b.seed1",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="two policies are called 'one'"):
        policy_folders([one, one])


def test_plan_crosses_methods_budgets_and_protection() -> None:
    cells, notes = plan(
        [FULL, TOVA], parse_budgets("25%,50"), protection="both", protected_tokens=20, shortest=100
    )
    assert notes == []
    assert [(cell.method.name, cell.protected, str(cell.budget)) for cell in cells] == [
        ("full", False, "None"), ("tova", True, "25%"), ("tova", False, "25%"),
        ("tova", True, "50"), ("tova", False, "50"),
    ]  # fmt: skip


def test_budgets_below_the_protected_tokens_are_noted_or_refused() -> None:
    budgets = parse_budgets("10%,30")
    both, notes = plan([TOVA], budgets, protection="both", protected_tokens=20, shortest=150)
    assert [(cell.protected, str(cell.budget)) for cell in both] == [
        (False, "10%"), (True, "30"), (False, "30"),
    ]  # fmt: skip
    assert notes == [
        "--budgets 10% is 15 of 150 tokens, below the 20 protected ones: run without protection "
        "only"
    ]
    with pytest.raises(UsageError, match="below the 20 protected ones; raise it"):
        plan([TOVA], budgets, protection="on", protected_tokens=20, shortest=150)
    off, notes = plan([TOVA], budgets, protection="off", protected_tokens=20, shortest=150)
    assert (len(off), notes) == (2, [])


def test_roster_prints_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    print_methods()
    words = set(capsys.readouterr().out.split())
    assert {"full", "kvp", "random", "snapkv", "oracle", "attention-free"} <= words
