"""Scorer and allocator in one specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED
from kvp.scoring import AUTO_GROUP, Needs, Noise, Reconstruction
from policies import make_allocator, make_method, make_scorer, split_method
from policies.budget_files import BudgetFile, save_budgets
from policies.method_spec import needs_in_words


@pytest.mark.parametrize(
    ("spec", "scorer", "allocator"),
    [
        ("snapkv", "snapkv", "uniform"),
        ("snapkv+uniform", "snapkv", "uniform"),
        ("kvzip+global", "kvzip", "global"),
        ("contrastkv + global:kvzip", "contrastkv", "global:kvzip"),
        ("snapkv:kvpress+ada(safeguard=0.3)", "snapkv:kvpress", "ada(safeguard=0.3)"),
        (" snapkv( window = 16 ) + ada:paper ", "snapkv(window=16)", "ada:paper"),
        ("random(seed=+3)+pyramid(beta=1e+1)", "random(seed=3)", "pyramid(beta=10)"),
        ("gvote+self_sized", "gvote", "self_sized"),
        ("windowkv+windowkv", "windowkv", "windowkv"),
    ],
)
def test_both_sides_are_built_and_names_rebuild_them(
    spec: str, scorer: str, allocator: str
) -> None:
    built = make_method(spec)
    assert (built[0].name, built[1].name) == (scorer, allocator)
    assert built == (make_scorer(scorer), make_allocator(allocator))
    assert make_method(f"{scorer}+{allocator}") == built


@pytest.mark.parametrize(
    "name", ["plain.json", "with space/a=b:c [x]/öäü-1.5.json", "folder", "12"]
)
def test_files_may_have_any_name_without_comma_plus_and_parentheses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    budgets = BudgetFile(
        model={"id": "m", "revision": None}, layers=2, kv_heads=1, scorer="snapkv", budget=8,
        protocol="query_aware", protection=UNPROTECTED, cached_tokens=64, counts=(12, 4), seed=0,
    )  # fmt: skip
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "folder":
        path.mkdir()
    save_budgets(path / "budgets.json" if name == "folder" else path, budgets, {})
    monkeypatch.chdir(tmp_path)
    for written in (str(path), name):
        for rounding in ("", "(rounding=faithful)"):
            _, allocator = make_method(f"keydiff+evolved:{written}{rounding}")
            assert allocator.name == f"evolved:{written}{rounding}"
            assert make_allocator(allocator.name) == allocator


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("snapkv", ("snapkv", None)),
        ("kvp+global", ("kvp", "global")),
        ("a(b=1e+3)+c(d=+1)", ("a(b=1e+3)", "c(d=+1)")),
        ("a+", ("a", "")),
        ("a+b+c", ("a", "b+c")),
        ("a(b+c", ("a(b+c", None)),
        ("", ("", None)),
    ],
)
def test_a_plus_outside_parentheses_parts_them(spec: str, parts: tuple[str, str | None]) -> None:
    assert split_method(spec) == parts


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv+", "allocator '' is not of the form"),
        ("+ada", "method '' is not of the form"),
        ("snapkv+ada+global", "allocator 'ada+global' is not of the form"),
        ("snapkv+snapkv", "unknown allocator 'snapkv': choose from uniform, pyramid, ada"),
        ("ada", "unknown method 'ada': choose from random, "),
        ("snapkv:+ada", "method 'snapkv:' is not of the form"),
        (
            "snapkv+self_sized",
            "snapkv+self_sized: snapkv does not say how many tokens it needs; choose an allo",
        ),
        ("snapkv+evolved", "evolved needs a file: write evolved:FILE"),
        ("snapkv(window=1e+2)", "snapkv: window must be an integer >= 1 or auto, got 100.0"),
    ],
)
def test_mistakes_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_method(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Needs(), "keys, values, positions"),
        (Needs(layer_group=AUTO_GROUP), "keys, values, positions"),
        (Needs(queries=1, rope=True, hidden_after=4),
         "last query, hidden states, rotary embedding"),
        (Needs(reconstruction=Reconstruction(), noise=Noise()),
         "extra passes that repeat the context, an extra pass of random tokens"),
        (Needs(queries=16, text=256, classifier="x"),
         "last 16 queries, the prompt's text, a text classifier"),
    ],
)  # fmt: skip
def test_needs_are_put_in_words(needs: Needs, words: str) -> None:
    assert needs_in_words(needs) == words
