"""How scorers and allocators are written, and which options cannot be."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Ge

from kvp.bounds import Share
from kvp.errors import KvpError, UsageError
from kvp.names import ALLOCATOR_NAMES
from kvp.protection import UNPROTECTED
from kvp.scoring import ALL_QUERIES, AUTO_GROUP, Needs, Noise, Reconstruction
from kvp.specification import split_method
from policies import make_allocator, make_method, make_scorer, resolve_method
from policies.base import AUTO, BaseScorer
from policies.budget_files import BudgetFile, save_budgets
from policies.registry import SCORERS
from policies.sources import find_policy


@pytest.mark.parametrize(
    ("spec", "scorer", "allocator"),
    [
        ("snapkv", "snapkv", "uniform"),
        ("contrastkv + global:kvzip", "contrastkv", "global:kvzip"),
        ("snapkv:kvpress+ada(safeguard=0.3)", "snapkv:kvpress", "ada(safeguard=0.3)"),
        (" snapkv( window = 16 ) + global:kvzip ", "snapkv(window=16)", "global:kvzip"),
        ("random(seed=+3)+pyramid(beta=1e+1)", "random(seed=3)", "pyramid(beta=10)"),
    ],
)
def test_both_sides_are_built_and_names_rebuild_them(spec, scorer, allocator):
    built = make_method(spec)
    assert (built[0].name, built[1].name) == (scorer, allocator)
    assert built == (make_scorer(scorer), make_allocator(allocator))
    assert make_method(f"{scorer}+{allocator}") == built
    assert str(built) == f"{scorer}+{allocator}"  # as `--methods` has it
    assert repr(built[0]) == scorer


@pytest.mark.parametrize(
    "name", ["plain.json", "with space/a=b:c [x]/öäü-1.5.json", "folder", "12", "007", "1e3"]
)
def test_files_may_have_any_name_without_comma_plus_and_parentheses(tmp_path, monkeypatch, name):
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
    assert make_allocator(f"evolved(file={name})") == make_allocator(f"evolved:{name}")
    for written in (str(path), name):
        for rounding in ("", "(rounding=faithful)"):
            _, allocator = make_method(f"keydiff+evolved:{written}{rounding}")
            assert allocator.name == f"evolved:{written}{rounding}"
            assert make_allocator(allocator.name) == allocator


def test_a_plus_outside_parentheses_parts_them(tmp_path):
    assert split_method("snapkv") == ("snapkv", None)
    assert split_method("kvp+global") == ("kvp", "global")
    assert split_method("a+") == ("a", "")
    assert split_method("a(b+c") == ("a(b+c", None)
    assert split_method("") == ("", None)
    policy = tmp_path / "a+b"
    policy.symlink_to(find_policy("nano").folder)
    for written, shared in ((f"{policy}", None), (f"{policy} + global", make_allocator("global"))):
        scorer, allocator = resolve_method(written)
        assert (scorer.label, allocator) == (str(policy), shared)


def test_options_override_presets():
    scorer = make_scorer(" snapkv:paper( window = 16 , kernel=9 ) ")
    assert scorer.name == "snapkv(window=16,kernel=9)"
    assert make_scorer("snapkv(window=auto)") == make_scorer("snapkv(kernel=5,pool=max)")
    assert make_scorer("h2o(recents=False)").name == "h2o(recents=false)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv+", "allocator '' is not of the form"),
        ("+ada", "method '' is not of the form"),
        ("snapkv+ada+global", "allocator 'ada+global' is not of the form"),
        ("snapkv+snapkv",
         f"'snapkv' (this is a method): choose from {', '.join(ALLOCATOR_NAMES)}"),
        ("knorm+uniform(a=1)", "uniform has no option 'a': its options are whole"),
        ("knorm+ada(safeguard=1.5)", "ada: safeguard must be less than or equal to 1, got 1.5"),
        ("knorm+windowkv(group=0)", "windowkv: group must be greater than or equal to 1 or 'auto'"),
        ("knorm+shared(pool=sum)", "shared: pool must be 'logsumexp', 'mean' or 'max', got"),
        ("knorm+evolved:no/such.json", "no/such.json is no budget file"),
        ("snapkv+self_sized", "snapkv+self_sized: snapkv does not say how many tokens it needs; c"),
        ("snapkv+evolved", "evolved needs a file: write evolved:FILE"),
        ("snapkv+evolved:a(file=b)", "evolved needs one file: write evolved:FILE"),
        ("magic", "unknown method 'magic': choose from random, random_pinned, random_per_layer, "
                  "ring, streaming_llm, knorm, keydiff, lagkv, snapkv, tova, h2o, "),
        ("", "method '' is not of the form name, name:preset or name(option=value)"),
        ("snapkv(window=16", "is not of the form"),
        (300 * "n", "unknown method 'nnn"),
        ("snapkv:nobody", "snapkv has no preset 'nobody': its presets are kvpress, paper, off"),
        ("oracle:kvpress", "oracle has no preset 'kvpress': its presets are none"),
        ("snapkv(windw=3)", "no option 'windw' (did you mean window?): its options are window, "),
        ("snapkv(window)", "snapkv: 'window' is not of the form option=value"),
        ("snapkv(window=)", "snapkv: 'window=' is not of the form option=value"),
        ("snapkv(window=1,window=2)", "snapkv: option 'window' is given twice"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(spec, message, one_line):
    with one_line(KvpError, message) as error:
        make_method(spec)
    assert isinstance(error.value, UsageError) or "budget file" in message


WINDOW = Needs(queries=4, layer_group=AUTO_GROUP)


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        ("kvzip", Needs(reconstruction=Reconstruction(chunk=2048, sinks=4))),
        ("kvzip(plus=true,full=true,chunk=7,sinks=0)",
         Needs(reconstruction=Reconstruction(chunk=7, sinks=0, weighted=True, full=True))),
        ("contrastkv(chunk=9,denominator=full,noise=16,seed=3)",
         Needs(reconstruction=Reconstruction(chunk=9, full=True), noise=Noise(tokens=16, seed=3))),
        ("contrastkv(contrast=context)",
         Needs(reconstruction=Reconstruction(), noise=Noise(beginning=0.1))),
        ("expected_attention", Needs(queries=ALL_QUERIES, rope=True)),
        ("gvote(skip=7)", Needs(queries=1, rope=True, hidden_after=7)),
        ("gvote(space=query)", Needs(queries=ALL_QUERIES, rope=True)),
        ("windowkv", WINDOW),
        ("windowkv(task=aggregation,group=7)", Needs(queries=16, layer_group=7)),
        ("windowkv(setting=llama,task=aggregation)", replace(WINDOW, queries=32)),
        ("windowkv(observed=9)", replace(WINDOW, queries=9)),
    ],
)  # fmt: skip
def test_needs_follow_the_options(spec, needs):
    assert make_scorer(spec).needs == needs


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("contrastkv", {"beta": 0.6}, "beta must be less than or equal to 0.5, got 0.6"),
        ("contrastkv", {"gamma": -1}, "gamma must be greater than or equal to 0, got -1"),
        ("contrastkv", {"gamma": float("inf")}, "gamma must be a finite number, got inf"),
        ("contrastkv", {"contrast": "text"}, "contrast must be 'random' or 'context', got"),
        ("expected_attention", {"covariance": 1}, "covariance must be a valid boolean, got 1"),
        ("h2o", {"window": 8}, "window=8 needs recents=false"),
        ("lagkv", {"lag": 1}, "lag must be greater than or equal to 2 or 'auto', got 1"),
        ("snapkv", {"kernel": 4}, "kernel must be odd, got 4"),
        ("windowkv", {"task": "poetry"}, "task must be 'qa' or 'aggregation', got 'poetry'"),
    ],
)
def test_bad_options_are_refused(method, options, message):
    with pytest.raises(UsageError, match=f"^{method}: {message}"):
        SCORERS[method](**options)


@dataclass(frozen=True, kw_only=True)
class Shares(BaseScorer):
    """Has an automatic option that may be any share, one without bounds, and texts."""

    base_name: ClassVar[str] = "shares"
    share: Share | Literal["auto"] = AUTO
    offset: float = -3
    bits: Literal["4", "8"] = "8"
    ratio: "float | None" = None


def test_annotations_tell_the_type_and_the_bounds_of_an_option():
    assert repr([Shares(share=share).share for share in (AUTO, 0.5, 1)]) == "['auto', 0.5, 1.0]"
    assert Shares().offset == -3.0
    assert make_scorer(Shares(offset=-1.5, bits="4")).name == "shares(offset=-1.5,bits=4)"
    assert Shares.build(None, {"bits": "4", "ratio": "2"}) == Shares(bits="4", ratio=2)
    for bad, message in (
        ({"share": 2}, "share must be less than or equal to 1 or 'auto', got 2"),
        ({"ratio": "abc"}, "ratio must be a valid number, got 'abc'"),
        ({"ratio": float("nan")}, "ratio must be a finite number, got nan"),
        ({"offset": True}, "offset must be a valid number, got True"),
        ({"bits": 4}, "bits must be '4' or '8', got 4"),
    ):
        with pytest.raises(UsageError, match=f"^shares: {message}"):
            Shares(**bad)
    bounded = {"__annotations__": {"offset": Annotated[float, Ge(0)]}, "offset": 1.0}
    for declared, message in (
        ({"grid": {"share": (1, -1)}}, "presets or grid of Own: share must be greater than or eq"),
        ({**bounded, "offset": -1.0}, "shares: offset must be greater than or equal to 0, got -1"),
        ({"__annotations__": {"offset": "Unknown"}}, "Own has an annotation that cannot be read"),
    ):
        own = dataclass(frozen=True, kw_only=True)(type("Own", (Shares,), declared))
        with pytest.raises(UsageError, match=f"^{message}"):
            make_scorer(own)
    own = dataclass(frozen=True, kw_only=True)(type("Own", (Shares,), {"name": "named"}))
    with pytest.raises(UsageError, match=r"Own: its own name 'named' is .* \(offset=2\): set base"):
        make_scorer(own()).build(None, {"offset": "2"})
