import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvp.scoring import View
from kvp.store import TraceReader
from policies.policy_files import load_policy
from train.job.summary import CHARTS

TINY = {
    "inputs": "key,value,position,distance",
    "contexts": "2",
    "hidden": "16",
    "permutations": "4",
    "min_prefix": "40",
    "lr": "0.01",
    "validate_every": "10",
    "checkpoint_every": "7",
}


BETTER = {"contexts": 8, "hidden": 64, "permutations": 8, "lr": "0.005", "steps": 100}
"""Steps that have a chance to learn the task."""


@pytest.fixture(scope="module")
def trained(train, store, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "policy"
    assert train(store, out, **BETTER) == 0
    return out


def test_training_learns_what_attention_follows(trained):
    held_out = json.loads((trained / "policy.json").read_text())["held_out"]
    assert len(held_out) == 4
    assert min(head["skill"] for head in held_out) > 0.85
    lost = {f"lost_at_{budget}" for budget in ("6.25%", "12.5%", "25%", "50%")}
    assert set(held_out[0]) == {"skill", *lost, "best_heuristic", "best_heuristic_skill"}


def learned_channels(policy, store):
    """Per head, the key channel its scores follow most on a held-out sequence."""
    scorer, result = load_policy(policy), []
    for layer, (keys, values) in enumerate(zip(*TraceReader(store).kv(7), strict=True)):
        view = View(
            layer=layer,
            keys=keys[None],
            values=values[None],
            positions=torch.arange(96)[None],
            budget=12,
        )
        for of_head, scores in zip(keys, scorer.score(view)[0], strict=True):
            channels = torch.cat([of_head.T, scores[None]])
            result.append(int(torch.corrcoef(channels)[-1, :-1].abs().argmax()))
    return result


@pytest.mark.parametrize(
    ("objective", "label"), [("listwise", "future_attention"), ("regress", "kvzip_plus")]
)
def test_every_objective_learns_the_label_it_is_given(
    train, objective, label, make_store, tmp_path
):
    store = make_store(labels=("kvzip_plus",))
    better = {"contexts": 8, "hidden": 32, "lr": "0.01", "steps": 60}
    given = {"objective": objective, "label": label}
    assert train(store, tmp_path / "policy", **better, **given) == 0
    expected = [0, 1, 2, 3] if label == "future_attention" else [2, 3, 4, 5]
    assert learned_channels(tmp_path / "policy", store) == expected
    shifts = load_policy(tmp_path / "policy").rankers.score_bias  # a loss of the order sees none
    assert bool(shifts.any()) == (objective == "regress")
    content = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert content["training"]["recipe"]["objective"] == objective
    # held-out numbers are about attention whatever the label was
    skill = min(head["skill"] for head in content["held_out"])
    assert (skill > 0.7) == (label == "future_attention")


def test_keys_are_seen_from_the_end_of_the_cache(train, make_store, tmp_path):
    store = make_store(frequencies=(0.5, 0.125))
    for frame, known in (("end", (0.5, 0.125)), ("stored", ())):
        out = tmp_path / frame
        assert train(store, out, steps=2, key_frame=frame) == 0
        assert load_policy(out).rankers.spec.key_frequencies == known
    ends, stored = (
        load_file(tmp_path / frame / "layer_00_head_00.safetensors")["key_std"]
        for frame in ("end", "stored")
    )
    assert (ends[:4] != stored[:4]).all()  # channels 0 and 2, 1 and 3 turn, the others do not
    torch.testing.assert_close(ends[4:], stored[4:])


def test_traces_without_rope_frequencies_need_keys_as_stored(train, make_store, tmp_path, capsys):
    store = make_store(frequencies=None)
    assert train(store, tmp_path / "policy", steps=2, key_frame="end") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "--key_frame end" in error
    assert "--key_frame stored" in error
    assert not (tmp_path / "policy").exists()
    assert train(store, tmp_path / "policy", steps=2, key_frame="stored") == 0
    only_values = {"inputs": "value", "key_frame": "end"}
    assert train(store, tmp_path / "values", steps=2, **only_values) == 0


def test_training_on_the_first_sequences(train, store, tmp_path, capsys):
    assert train(store, tmp_path / "policy", steps=2, sequences=5) == 0
    content = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert content["training"]["traces"]["train"] == 5
    assert train(store, tmp_path / "more", steps=2, sequences=7) == 2
    assert "--sequences 7: the store has 6 training" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_the_policy_is_calibrated_and_records_what_made_it(trained, store):
    content = json.loads((trained / "policy.json").read_text())
    assert content["geometry"] == TraceReader(store).geometry.to_dict()
    assert content["model"] == {"id": "synthetic", "revision": None}
    training = content["training"]
    assert training["config"]["steps"] == 100
    assert training["recipe"]["weight_decay"] == 1e-3
    assert training["traces"]["train"] == 6
    assert len(training["best_step"]) == 4
    assert content["hyperparameters"]["reference_length"] == 96
    assert content["calibration"]["target"] == "reply_contribution"
    assert len(content["calibration"]["scores"]) == 4


def test_logs_stay_next_to_the_policy_and_checkpoints_go(trained):
    logs = trained / "logs" / "policy"  # TensorBoard's name of the run
    assert list(logs.glob("events.*"))
    events = EventAccumulator(str(logs))
    events.Reload()
    names = events.Tags()["scalars"]
    assert {"train/lr", "held_out/skill"} <= set(names)
    charts = CHARTS["training"].values()  # on one page of TensorBoard
    shown = [name for _, tags in charts for tag in tags for name in names if re.match(tag, name)]
    of_layers = [f"{kind}_by_layer/{layer}" for kind in ("skill", "kept") for layer in ("00", "01")]
    assert shown == ["train/loss", *of_layers]
    assert all(0 < event.value < 1 for event in events.Scalars("kept_by_layer/00"))
    assert not (trained / "checkpoints").exists()
    assert not list(trained.rglob("*.partial"))


def test_a_finished_run_is_left_alone(trained, train, store, capsys):
    before = (trained / "policy.json").read_bytes()
    assert train(store, trained, **BETTER) == 0
    assert "already holds the finished policy" in capsys.readouterr().out
    assert (trained / "policy.json").read_bytes() == before
    assert train(store, trained, **BETTER | {"lr": "0.004"}) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "lr: 0.005 there, 0.004 here" in error
    assert "name a new folder" in error


def test_one_seed_gives_one_policy_and_another_seed_another(
    train, store, tmp_path, assert_same, weights
):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(store, tmp_path / name, steps=12, seed=seed) == 0
    assert_same(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(
        weights(tmp_path / "a")["layer_00_head_00.safetensors"]["first_weight"],
        weights(tmp_path / "c")["layer_00_head_00.safetensors"]["first_weight"],
    )


def test_heads_do_not_influence_each_other(train, store, make_store, tmp_path, weights):
    others = make_store(noise=1)  # head 0 of layer 0 sees the same traces, all others do not
    assert train(store, tmp_path / "a", steps=15) == 0
    assert train(others, tmp_path / "b", steps=15) == 0
    ours, theirs = weights(tmp_path / "a"), weights(tmp_path / "b")
    same = {
        name: all(torch.equal(tensor, theirs[name][key]) for key, tensor in state.items())
        for name, state in ours.items()
    }
    assert list(same.values()) == [True, False, False, False]


def test_recomputing_activations_changes_nothing(train, store, tmp_path, assert_same):
    assert train(store, tmp_path / "a", steps=6) == 0
    # 4 heads of 2 contexts of about 50 tokens and 1 kB each need 0.4 MB: groups of 2
    assert train(store, tmp_path / "b", steps=6, activation_gb="2.4e-4") == 0
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("inputs", ["key,value", "key,recent", "distance"])
def test_rankers_have_the_inputs_that_are_named(train, store, tmp_path, inputs):
    assert train(store, tmp_path / "policy", steps=1, inputs=inputs) == 0
    assert load_policy(tmp_path / "policy").rankers.spec.inputs == tuple(inputs.split(","))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"write": 5}, "lacks 3 of 8 sequences"),
        ({"validation": 0}, "no validation sequences"),
        ({"train": 0}, "no train sequences"),
        ({"tokens": 38}, "longer than --min_prefix 40"),
    ],
)
def test_unusable_stores_are_refused(train, plan, message, make_store, tmp_path, capsys):
    assert train(make_store(**plan), tmp_path / "policy", steps=2) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
    assert not (tmp_path / "policy").exists()


@pytest.mark.gpu
def test_training_on_a_gpu_learns_too(train, store, tmp_path):
    assert train(store, tmp_path / "policy", device="cuda", **BETTER) == 0
    held_out = json.loads((tmp_path / "policy" / "policy.json").read_text())["held_out"]
    assert min(head["skill"] for head in held_out) > 0.85
