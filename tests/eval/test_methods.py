import hashlib
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml

from eval.config import EvalConfig
from eval.digests import file_digests
from eval.method_listing import PLAIN, needs_in_words
from eval.method_listing import run as print_methods
from eval.methods import build_methods, make_objects, method_of
from eval.policy_arguments import policy_sources
from eval.prepared_run import build_run_methods
from eval.tune.config import TuneConfig
from kvp.errors import PolicyError, UsageError
from kvp.hf.scorer_inputs import whole_prompt_input
from kvp.names import NULLS
from kvp.plugins import import_object
from kvp.program.settings import Group
from kvp.scoring import ALL_QUERIES, Needs, Noise, Reconstruction
from kvp.specification import split_label, split_method
from policies import load_policy, make_scorer
from policies.registry import ALLOCATORS, SCORERS


def _methods(methods, **fields):
    config = EvalConfig(out="unused", methods=methods, **fields)
    return build_run_methods(config, make_objects(config.method_list))


def _specs(methods, **fields):
    return [method.spec for method in _methods(methods, **fields)]


def test_methods_carry_preset_and_options_as_variant():
    methods = _methods(
        "full,snapkv,snapkv:kvpress,snapkv(window=9),random,snapkv(kernel=5)", seed=3
    )
    assert [(method.method, method.variant) for method in methods] == [
        ("full", "auto"), ("snapkv", "auto"), ("snapkv", "kvpress"), ("snapkv", "window=9"),
        ("random", "auto"),
    ]  # fmt: skip
    assert methods[0].scorer is None
    assert methods[-1].scorer == make_scorer("random(seed=3)")
    (named,) = _methods("random(seed=0)", seed=3)
    assert (named.scorer, named.variant) == (make_scorer("random(seed=0)"), "seed=0")
    own = SCORERS["random"]
    for given in (["random"], [own], [(own, None)], [("random", None)], ["random", own]):
        drawn = [(one.variant, one.scorer.seed) for one in _methods([*given, own()], seed=3)]
        assert drawn == [("auto", 3), ("seed=0", 0)]
    assert [method.spec for method in methods][2:4] == ["snapkv:kvpress", "snapkv(window=9)"]


def test_missing_policies_are_refused():
    with pytest.raises(UsageError, match="--methods kvp needs --policies"):
        _methods("kvp", model="another")
    assert EvalConfig(out="unused", methods="tuned:somewhere").policy_list == ("nano",)
    (bundled,) = _methods("kvp+global")
    assert (bundled.spec, bundled.policy) == ("kvp/nano+global", "nano")
    assert method_of(replace(bundled.scorer, metadata={}, label="mine")).spec == "kvp/mine"
    assert _specs(["kvp", (load_policy("nano"), "ada")]) == ["kvp/nano", "kvp/nano+ada"]
    with pytest.raises(UsageError, match=r"both called 'kvp'.*, or pass the same object twice$"):
        _methods(["kvp", (replace(bundled.scorer, calibration=None), "ada")])
    for name, given in (("nowhere", "nowhere"), ("", "best=")):
        with pytest.raises(PolicyError, match=f"--policies: there is no folder '{name}'"):
            _methods("kvp", policies=given)
        with pytest.raises(PolicyError, match=f"^--policies: there is no folder '{name}'"):
            EvalConfig(out="unused", policies=given).check_names()


def test_policies_are_labelled_by_folder_or_by_hand(tmp_path):
    for name in ("one", "many/seed0", "many/seed1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "policy.json").touch()
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    assert list(policy_sources([one, many])) == ["one", "seed0", "seed1"]
    (mine,) = policy_sources([f"mine={one}"]).items()
    assert (mine[0], mine[1].folder) == ("mine", tmp_path / "one")
    assert split_label("a=s3://b/lr=1") == ("a", "s3://b/lr=1")
    assert split_label("s3://b/lr=1") == ("", "s3://b/lr=1")
    assert list(policy_sources([f"a={many}", f"b={many}"])) == [
        "a.seed0", "a.seed1", "b.seed0", "b.seed1",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="two policies are called 'one'"):
        policy_sources([one, one])
    (tmp_path / "one/policy.json").rename(tmp_path / "one/run.json")
    with pytest.raises(PolicyError, match=r"^--policies: .*/one has no policy.json: .*unfinished"):
        policy_sources([one])


def test_the_list_says_what_every_method_reads_and_costs(capsys):
    print_methods(Group())
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    assert names == {"full", "kvp", "kvzap:WEIGHTS", *SCORERS, *ALLOCATORS}
    kvzip = lines[next(n for n, line in enumerate(lines) if line.startswith("  kvzip")) :][:4]
    assert "extra passes that repeat the context" in kvzip[1]
    assert "forward pass" in kvzip[2]
    assert "kvpress" in kvzip[3]
    assert any(line.endswith("(attention-free)") for line in lines)
    after = lines[next(n for n, line in enumerate(lines) if line.startswith("Nulls")) :]
    group = after[: after.index("")]
    assert [line.split()[0] for line in group if line[:3].strip()[:1].islower()] == list(NULLS)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Needs(), "keys, values, positions"),
        (Needs(queries=1, rope=True, hidden_after=4),
         "last query, hidden states, rotary embedding"),
        (Needs(queries=ALL_QUERIES, future=True, question=True),
         "future attention, every query, where the question begins"),
        (Needs(reconstruction=Reconstruction(), noise=Noise()),
         "extra passes that repeat the context, an extra pass of random tokens"),
        (Needs(queries=16, text=256, budget=True),
         "last 16 queries, the prompt's text; the budget, scored anew for each"),
    ],
)  # fmt: skip
def test_needs_are_put_in_words(needs, words):
    assert needs_in_words(needs) == words


def test_every_need_has_words():
    passes = {"reconstruction": Reconstruction(), "noise": Noise()}
    with_it = {"every_state": {"hidden_after": 2}}
    switches = {name: True for name, usual in vars(Needs()).items() if usual is False}
    values = {**dict.fromkeys(vars(Needs()), 2), **switches, **passes}
    each = {name: Needs(**with_it.get(name, {}), **{name: values[name]}) for name in values}
    assert PLAIN not in map(needs_in_words, each.values())
    anytime = [name for name, needs in each.items() if not whole_prompt_input(needs)]
    assert anytime == ["queries", "future", "question", "budget", "layer_group"]


def test_nulls_are_all_controls_with_the_seed_of_the_run():
    methods = _methods("full,nulls+ada", seed=3)
    assert [method.spec for method in methods] == ["full", *(f"{name}+ada" for name in NULLS)]
    seeds = [getattr(method.scorer, "seed", None) for method in methods]
    assert seeds == [None, 3, 3, 3, None, None]


def test_allocators_apply_to_methods_that_name_none():
    methods = _methods("full,snapkv,tova+ada", allocators="uniform,global")
    assert [(method.spec, method.allocator_name) for method in methods] == [
        ("full", "uniform"), ("snapkv", "uniform"), ("snapkv+global", "global"),
        ("tova+ada", "ada"),
    ]  # fmt: skip
    assert methods[1].allocator is None
    assert methods[1].scorer is methods[2].scorer
    assert methods[1].scorer_key == methods[2].scorer_key
    presets = ["snapkv(window=9)+ada(safeguard=0.5)", "h2o+global:kvzip"]
    assert _specs(",".join(presets)) == presets


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("snapvk", "unknown method 'snapvk' .*: choose from .*random.*, kvp, full"),
        ("kvpp", r"^--methods: unknown method 'kvpp' \(did you mean kvp\?\): choose"),
        ("nano", r"'nano' \(this is a policy: write kvp with --policies nano\)"),
        ("snapkv,null", r"unknown method 'null' \(did you mean nulls\?\)"),
        ("full+ada", "the full cache has no allocator"),
        ("snapkv,tuned: ", "^--methods: tuned needs a file: write tuned:FILE"),
    ],
)
def test_what_cannot_be_combined_is_refused(methods, message):
    with pytest.raises(UsageError, match=message):
        _methods(methods)


OWN_WITH_OPTIONS = """
class Plain:
    name, needs = "plain", Needs()

    def __init__(self, step=1):
        self.step = step

    def score(self, view):
        return view.keys[..., 0].float()


@dataclass(frozen=True, kw_only=True)
class Derived(BaseScorer):
    step: int = 1
    base_name: ClassVar[str] = "derived"
"""


def test_methods_of_a_user_with_other_options_are_told_apart_or_refused(own_module, tmp_path):
    imports = (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from kvp.scoring import Needs\nfrom policies.registry import BaseScorer\n"
    )
    own_module("own_options", imports + OWN_WITH_OPTIONS)

    def labels(methods):
        return _specs(methods.replace("@", "own_options:"))

    assert labels("@Derived,@Derived(step=2),@Derived(step=1)") == ["derived", "derived(step=2)"]
    assert labels("@Plain,@Plain+ada") == ["plain", "plain+ada"]
    digest = hashlib.sha256((tmp_path / "own_options.py").read_bytes()).hexdigest()
    digests = file_digests([], _methods("full,h2o,own_options:Plain+ada"), ["chat"])
    assert (digests.pop("own_options.py"), *digests) == (digest, "options of plain")
    plain = import_object("own_options:Plain", "")
    assert labels("@Plain(step=1)") == ["plain"]  # the default
    assert digests.items() - file_digests([], _methods([plain(step=2)])).items()
    with pytest.raises(UsageError, match=r"both called 'plain'.*BaseScorer"):
        _methods(["own_options:Plain", plain(step=2)])
    own_module("more_options", imports + OWN_WITH_OPTIONS)
    with pytest.raises(UsageError, match=r"^--methods: more_options:Derived and .* 'derived': giv"):
        labels("@Derived,more_options:Derived+ada")
    with pytest.raises(UsageError, match=r"^--methods: Derived and another are both called 'deriv"):
        _methods(["own_options:Derived", import_object("more_options:Derived", "")()])
    assert len(_methods(["own_options:Derived", import_object("own_options:Derived", "")])) == 1


def test_two_allocators_of_one_name_are_refused_and_one_given_twice_is_one():
    own = type("Own", (), {"name": "own", "allocate": ALLOCATORS["ada"]().allocate})
    with pytest.raises(UsageError, match=r"^--methods: Own and another are both called 'own'"):
        _methods([(SCORERS["snapkv"], own()), (SCORERS["tova"], own())])
    for given in (own, own()):
        assert len(_methods([(SCORERS[name], given) for name in ("tova", "tova", "h2o")])) == 2
    held = make_dataclass("Held", ["weights"], bases=(own,))
    with pytest.raises(UsageError, match=r"called 'own' \(pass the same .* failed \(RuntimeError"):
        _methods([(SCORERS[name], held(torch.ones(3))) for name in ("tova", "h2o")])


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_shipped_configurations_are_sound(path):
    settings = yaml.safe_load(path.read_text())
    if "methods" not in settings:  # another program's
        return
    tuned = "settings_per_method" in settings
    config = (TuneConfig if tuned else EvalConfig)(out="unused", **settings)
    config = config.eval_config if tuned else config
    methods = [spec for spec in config.method_list if split_method(spec)[0] != "kvp"]
    assert build_methods(methods, allocators=config.allocator_list)
