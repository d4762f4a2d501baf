"""KVzap: files as kvpress writes them, scores written out, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eval.digests import file_digests
from eval.methods import build_methods
from kvp.errors import KvpError
from kvp.hf import evicting, load_model, prefill_and_evict
from kvp.hf.model_access import watch_states
from kvp.hf.prefill import prefill
from kvp.protection import UNPROTECTED
from kvp.scoring import Scorer, score_layers
from policies import make_scorer

WIDTH, HEADS, LAYERS = 256, 4, 5
"""Of nano."""


@pytest.fixture
def write(tmp_path):
    """Write networks of random weights; returns their folder."""

    def made(hidden, *, width=WIDTH, heads=HEADS, **changed):
        generator = torch.Generator().manual_seed(3)
        maps = {"": (heads, width)}
        if hidden is not None:
            maps = {"0.": (hidden, width), "2.": (heads, hidden)}
        tensors = {}
        for layer in range(LAYERS):
            for part, shape in maps.items():
                weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"layers.{layer}.{part}weight"] = weight
                tensors[f"layers.{layer}.{part}bias"] = torch.randn(shape[0], generator=generator)
        folder = tmp_path / f"gates{hidden}"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        config = {
            "architectures": ["KVzapModel"], "model_type": "kvzap", "input_dim": width,
            "hidden_dim": hidden, "output_dim": heads, "n_modules": LAYERS, **changed,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


def by_hand(folder, layer, state):
    """Scores of one token in float64, map by map."""
    from safetensors.numpy import load_file

    tensors = {
        name: each.astype(np.float64)
        for name, each in load_file(folder / "model.safetensors").items()
    }
    if f"layers.{layer}.weight" in tensors:
        return tensors[f"layers.{layer}.weight"] @ state + tensors[f"layers.{layer}.bias"]
    first = tensors[f"layers.{layer}.0.weight"] @ state + tensors[f"layers.{layer}.0.bias"]
    gelu = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in first])
    return tensors[f"layers.{layer}.2.weight"] @ gelu + tensors[f"layers.{layer}.2.bias"]


@pytest.mark.parametrize("hidden", [None, 7])
def test_scores_are_the_networks_of_the_states_that_enter_attention(write, hidden):
    folder = write(hidden)
    scorer = make_scorer(f"kvzap:{folder}")
    assert isinstance(scorer, Scorer)
    assert scorer.name == f"kvzap:{folder}"
    model, _ = load_model("nano")
    ids = torch.randint(300, 8000, (2, 30), generator=torch.Generator().manual_seed(1))
    entered = {}
    with torch.no_grad(), watch_states(model, entered.__setitem__):
        model(ids)
    seen = prefill(model, ids, scorer.needs, fed_again=1)
    scores = score_layers(scorer, seen.views(scorer.needs, 10))
    assert len(scores) == LAYERS
    for layer, of_layer in enumerate(scores):
        assert of_layer.shape == (2, HEADS, 29)
        for prompt, token in ((0, 0), (1, 17), (1, 28)):
            state = entered[layer][prompt, token].double().numpy()
            expected = by_hand(folder, layer, state)
            np.testing.assert_allclose(of_layer[prompt, :, token], expected, atol=2e-5)


def test_it_evicts_by_budget_and_once(write):
    model, _ = load_model("nano")
    scorer = make_scorer(f"kvzap:{write(None)}")
    ids = torch.randint(300, 8000, (1, 50), generator=torch.Generator().manual_seed(1))
    cache = prefill_and_evict(model, ids, scorer, 12, UNPROTECTED)
    assert all(layer.keys.shape[2] == 12 for layer in cache.stored.values())
    with (
        pytest.raises(KvpError, match="reads hidden states of the whole prompt"),
        evicting(model, scorer, budget=24, every=4),
    ):
        model(ids, use_cache=True)


def test_results_record_which_weights(write):
    folder = write(None)
    methods = build_methods([f"kvzap:{folder}"])
    (digest,) = file_digests([], methods).values()
    assert len(digest) == 64
    assert file_digests([], build_methods([f"kvzap:{write(7)}"])) != file_digests([], methods)
    assert methods[0].spec == f"kvzap:{folder}"


def test_what_cannot_be_used_is_one_line(write, tmp_path, one_line):
    good = write(None)
    refused = {
        "kvzap": "is written kvzap:FOLDER or kvzap:org/name",
        f"kvzap:{good}(window=3)": "without options",
        f"kvzap:{tmp_path / 'nothing'}": "config.json is missing",
        f"kvzap:{write(5, model_type='bert')}": "is not of KVzap",
        f"kvzap:{write(6, n_modules=LAYERS + 1)}": "does not hold the tensors",
        f"kvzap:{write(8, output_dim=0)}": "sizes are no positive whole numbers",
    }
    for spec, message in refused.items():
        with one_line(KvpError, message):
            make_scorer(spec)
    (good / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(KvpError, match="not a readable safetensors file"):
        make_scorer(f"kvzap:{good}")
    model, _ = load_model("nano")
    ids = torch.arange(300, 340)[None]
    for width, heads in ((128, HEADS), (WIDTH, 2)):
        scorer = make_scorer(f"kvzap:{write(9, width=width, heads=heads)}")
        with pytest.raises(KvpError, match="this one has 256 and 4"):
            prefill_and_evict(model, ids, scorer, 30)
