from __future__ import annotations

from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.method_listing import print_methods
from eval.methods import Method, build_methods, policy_folders
from eval.settings import plan
from kvp.budgets import parse_budgets
from kvp.errors import PolicyError, UsageError
from policies import make_scorer
from policies.registry import ALLOCATORS, METHODS

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
    (named,) = build_methods(_config(methods="random(seed=0)", seed=3))
    assert named.scorer == make_scorer("random(seed=0)")
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


def test_lists_name_everything_with_what_it_reads_and_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_methods()
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    assert names == {"full", "kvp", *METHODS, *ALLOCATORS}
    kvzip = lines[next(n for n, line in enumerate(lines) if line.startswith("  kvzip")) :][:4]
    assert "extra passes that repeat the context" in kvzip[1]
    assert "forward pass" in kvzip[2]
    assert "kvpress" in kvzip[3]
    assert any(line.endswith("(attention-free)") for line in lines)


def test_allocators_apply_to_methods_that_name_none() -> None:
    methods = build_methods(_config(methods="full,snapkv,tova+ada", allocators="uniform,global"))
    assert [method.label for method in methods] == ["full", "snapkv", "snapkv+global", "tova+ada"]
    assert [method.allocator for method in methods] == ["uniform", "uniform", "global", "ada"]
    assert methods[1].rule is None
    assert methods[1].scorer is methods[2].scorer
    assert methods[1].ranking == methods[2].ranking
    presets = build_methods(_config(methods="snapkv(window=9)+ada(safeguard=0.5),h2o+ada:paper"))
    assert [method.label for method in presets] == [
        "snapkv(window=9)+ada(safeguard=0.5)", "h2o+ada:paper",
    ]  # fmt: skip


def test_learned_policies_take_allocators(tiny_policy: Path) -> None:
    methods = build_methods(_config(methods="kvp+global,kvp", policies=str(tiny_policy)))
    assert [method.label for method in methods] == ["kvp/seed0+global", "kvp/seed0"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"methods": "snapvk"}, "unknown method 'snapvk' .*: choose from .*random.*, kvp, full"),
        ({"methods": "snapkv+adda"}, "unknown allocator 'adda'"),
        ({"methods": "knorm", "allocators": "adda"}, "--allocators: unknown allocator 'adda'"),
        ({"methods": "full+ada"}, "the full cache has no allocator"),
        ({"methods": "snapkv+ada(safeguard=2)"}, "safeguard"),
    ],
)
def test_what_cannot_be_combined_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_methods(_config(**fields))
