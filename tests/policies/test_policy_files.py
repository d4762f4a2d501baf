"""Policy directories: bit-exact round trips, and every kind of damage named."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvp.allocation import check_fits_model
from kvp.artifacts.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.artifacts.tensors import write_safetensors
from kvp.errors import PolicyError
from kvp.geometry import Geometry
from policies import load_policy
from policies.learned import Calibration
from policies.policy_files import PolicyMeta, head_file, load_shard, save_policy
from policies.ranker import HeadRankers, RankerSpec

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
META = PolicyMeta(
    geometry=GEOMETRY,
    model={"id": "nano", "revision": None},
    training={"seed": 3, "steps": 10},
    held_out=[{"skill": 0.5 + head / 10} for head in range(4)],
)
HEAD = "layer_01_head_00.safetensors"


def _rankers(architecture="fourier", heads=4):
    spec = RankerSpec(head_dim=8, hidden=12, max_positions=64, architecture=architecture)
    return HeadRankers(spec, heads, torch.Generator().manual_seed(0))


def _standardised():
    rankers, each = _rankers(), torch.rand(4, 8) + 0.5
    rankers.standardise(key_mean=each, key_std=each, value_mean=each, value_std=each)
    return rankers


@pytest.fixture
def policy_dir(tmp_path):
    save_policy(tmp_path / "policy", _rankers(), META)
    return tmp_path / "policy"


@pytest.mark.parametrize("architecture", ["fourier", "paper"])
def test_round_trip_is_bit_exact(tmp_path, make_view, architecture):
    rankers = _standardised() if architecture == "fourier" else _rankers(architecture)
    save_policy(tmp_path / "deep" / "policy", rankers, META, calibration=_calibration())
    policy = load_policy(str(tmp_path / "deep" / "policy"))
    assert torch.equal(policy.calibration.scores, _calibration().scores)
    assert torch.equal(policy.calibration.values, _calibration().values)
    assert policy.rankers.spec == rankers.spec
    for name, tensor in rankers.state_dict().items():
        assert torch.equal(policy.rankers.state_dict()[name], tensor)
    assert not any(parameter.requires_grad for parameter in policy.rankers.parameters())
    assert policy.geometry == GEOMETRY
    assert policy.metadata["model"] == {"id": "nano", "revision": None}
    assert policy.metadata["training"] == {"seed": 3, "steps": 10}
    assert [head["skill"] for head in policy.metadata["held_out"]] == [0.5, 0.6, 0.7, 0.8]
    view = make_view(tokens=9)
    again = load_policy(tmp_path / "deep" / "policy").score(view)
    assert torch.equal(policy.score(view), again)


def test_directory_holds_one_file_per_head_and_the_index(policy_dir):
    names = {path.name for path in policy_dir.iterdir()}
    heads = {head_file(layer, head) for layer in range(2) for head in range(2)}
    assert names == {"policy.json", *heads}
    assert head_file(1, 0) == HEAD
    index = json.loads(text := (policy_dir / "policy.json").read_text())
    assert json.dumps(index["files"][HEAD])[1:-1] in text  # on one line
    assert set(index) == {
        "format", "format_version", "architecture", "hyperparameters", "geometry", "model", "rope",
        "weights", "files", "heads", "calibration", "training", "held_out", "sha256",
    }  # fmt: skip
    assert (index["format_version"], index["architecture"], index["rope"]) == (1, "fourier", "post")


def test_other_peoples_files_are_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    save_policy(tmp_path, _rankers(), META)
    with pytest.raises(PolicyError, match="holds a policy: name another directory"):
        save_policy(tmp_path, _rankers(), META)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_rankers_of_another_geometry_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="2 rankers of head_dim 8 for 2 layers x 2 KV heads"):
        save_policy(tmp_path / "policy", _rankers(heads=2), META)
    assert not (tmp_path / "policy").exists()


def test_an_export_that_stopped_half_way_is_not_a_policy(tmp_path, monkeypatch):
    """The next one leaves nothing of it, even where it is smaller."""
    calls = 0

    def full_disk(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no space left on device")
        write_safetensors(*args, **kwargs)

    monkeypatch.setattr("policies.policy_files.write_safetensors", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_policy(tmp_path, _rankers(), META)
    with pytest.raises(PolicyError, match=r"has no policy.json: .* its export did not finish"):
        load_policy(tmp_path)
    monkeypatch.undo()
    small = replace(META, geometry=replace(GEOMETRY, layers=1, kv_heads=1), held_out=[])
    save_policy(tmp_path, _rankers(heads=1), small)
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", head_file(0, 0)}
    assert load_policy(tmp_path).geometry.layers == 1


WRONG = {
    "architecture": (lambda state: {"key_bias": torch.zeros(13)}, "another architecture"),
    "not finite": (lambda state: {"key_std": state["key_std"] / 0}, "key_std holds numbers that"),
}


@pytest.mark.parametrize("damage", WRONG)
def test_head_with_a_right_checksum_but_wrong_content(policy_dir, damage, one_line):
    """A file somebody else put there and recorded: still refused, still named."""
    path = policy_dir / HEAD
    state = load_file(path)
    change, message = WRONG[damage]
    save_file({**state, **change(state)}, path)
    index = read_sealed_json(policy_dir / "policy.json")
    index["files"][HEAD]["sha256"] = sha256_file(path)
    write_sealed_json(policy_dir / "policy.json", index)
    with one_line(PolicyError, message, match=HEAD):
        load_policy(policy_dir)


def test_geometry_check_names_both_sides(policy_dir):
    policy = load_policy(policy_dir)
    check_fits_model(policy, GEOMETRY)
    other = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)
    with pytest.raises(PolicyError) as error:
        check_fits_model(policy, other)
    assert str(error.value) == (
        f"policy {policy_dir} was trained for nano, 2 layers x 2 KV heads (4 query heads, head_dim "
        "8); the model has 28 layers x 4 KV heads (28 query heads, head_dim 128): load the "
        "model that this policy was trained for, or train a policy of this one (docs/your_model.md)"
    )


def _calibration():
    knots = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).cumsum(-1) + 0.1
    return Calibration(target="share", scores=knots, values=knots - 9)


def test_a_policy_that_an_earlier_version_fine_tuned_loads(tmp_path):
    recipe = {"label": "max_reply_attention", "objective": "listwise", "steps": 9}
    training = {"recipe": recipe, "distillation": {"command": ["kvp", "distill"], "best_step": 3}}
    calibration = replace(_calibration(), target="distilled")
    save_policy(tmp_path, _rankers(), replace(META, training=training), calibration=calibration)
    policy = load_policy(tmp_path)
    assert policy.metadata["training"] == training
    assert "calibrated (distilled)" in repr(policy)


def test_bfloat16_weights_halve_a_policy_and_keep_its_order(tmp_path, make_view):
    save_policy(tmp_path / "policy", _standardised(), META, calibration=_calibration())
    shard = load_shard(tmp_path / "policy")
    rankers = shard.rankers.with_dtype(torch.bfloat16)
    save_policy(tmp_path / "small", rankers, shard.meta, calibration=shard.calibration)
    index = json.loads((tmp_path / "small" / "policy.json").read_text())
    assert index["weights"] == "bfloat16"
    state = load_file(tmp_path / "small" / HEAD)
    for name, tensor in load_file(tmp_path / "policy" / HEAD).items():
        kept = name.endswith(("_mean", "_std"))
        assert torch.equal(state[name], tensor if kept else tensor.bfloat16())
    exact, policy = load_policy(tmp_path / "policy"), load_policy(tmp_path / "small")
    assert policy.calibration is not None
    assert policy.metadata == exact.metadata
    view = make_view(tokens=50)
    torch.testing.assert_close(policy.score(view), exact.score(view), rtol=0, atol=0.05)


def test_other_number_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"are float32 or bfloat16, not torch\.float16"):
        save_policy(tmp_path / "small", _rankers().with_dtype(torch.float16), META)
    assert not (tmp_path / "small").exists()
