"""Cache files: another process goes on as this one would, and nothing else is read as a cache."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

import kvp
from kvp.artifacts.manifest import digest_json
from kvp.artifacts.tensors import tensors_digest, write_sealed_safetensors
from kvp.errors import CacheError, UsageError
from kvp.hf import EvictingCache, load_cache, observe, prefill_and_evict, save_cache
from kvp.hf.cache import Turn
from kvp.hf.model_access import layer_devices
from policies import make_allocator, make_scorer

CONTEXT = 40
KINDS = ("full", "dense", "ragged")
"""Nothing evicted; heads alike; heads of different lengths."""


@pytest.fixture
def made(qwen, prompt):
    """Make a cache that has been fed three tokens since its compression."""

    def make(kind):
        ids, scorer = prompt(CONTEXT, batch=2), make_scorer("keydiff")
        if kind == "full":
            cache = observe(qwen, ids, queries=0).cache
        else:
            allocator = make_allocator("global") if kind == "ragged" else None
            cache = prefill_and_evict(qwen, ids, scorer, 24, allocator=allocator)
        qwen(prompt(3, batch=2, seed=4), past_key_values=cache)
        return cache

    return make


def same_layers(first, second):
    """Whether two caches hold the same, bit for bit, in the same dtypes."""
    for ours, theirs in zip(first.layers, second.layers, strict=True):
        one, other = ours.state, theirs.state
        facts = [(type(layer), state.seen, state.evicted, state.gaps)
                 for layer, state in ((ours, one), (theirs, other))]  # fmt: skip
        if facts[0] != facts[1] or one.tensors.keys() != other.tensors.keys():
            return False
        for name, tensor in one.tensors.items():
            there = other.tensors[name]
            if tensor.dtype != there.dtype or not torch.equal(tensor, there):
                return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(qwen, prompt, made, kind, tmp_path):
    cache, path = made(kind), tmp_path / "context.safetensors"
    cache.turn = Turn(prompts=(CONTEXT, CONTEXT), shrunk_at=CONTEXT)
    save_cache(cache, path, model=qwen)
    assert [file.name for file in tmp_path.iterdir()] == ["context.safetensors"]
    loaded = load_cache(path, qwen)
    assert same_layers(cache, loaded)
    assert (loaded.turn, loaded.get_seq_length()) == (cache.turn, CONTEXT + 3)
    assert (loaded.recorder, loaded.evicted) == (None, kind != "full")
    for step in range(9):
        token = prompt(1, batch=2, seed=50 + step)
        expected = qwen(token, past_key_values=cache).logits
        assert torch.equal(qwen(token, past_key_values=loaded).logits, expected)
    path.unlink()  # what was loaded does not lie in the file
    assert same_layers(cache, loaded)


CONTINUE = """
import json, sys, torch
from kvp import load_cache, load_model
ids = torch.tensor([json.loads(sys.argv[1])])
for path, dtype in (sys.argv[2].split(), sys.argv[3].split()):
    model, _ = load_model("nano", dtype=dtype)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
        past_key_values=load_cache(path, model),
    )
    print(output[0, ids.shape[1] :].tolist())
"""


def test_another_process_continues_with_the_same_tokens(tmp_path):
    arguments, expected = [], []
    for dtype, rule in (("float32", make_allocator("global")), ("bfloat16", None)):
        model, tokenizer = kvp.load_model("nano", dtype=dtype)
        text = "The special number of the green door is 4711. " * 6 + "What is the special number?"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        cache = prefill_and_evict(model, ids[:, :-8], make_scorer("keydiff"), 40, allocator=rule)
        path = tmp_path / dtype
        kvp.save_cache(cache, path, model=model)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
            max_new_tokens=12, do_sample=False,
        )  # fmt: skip
        expected.append(output[0, ids.shape[1] :].tolist())
        arguments.append(f"{path} {dtype}")
    run = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(ids[0].tolist()), *arguments],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert [json.loads(line) for line in run.stdout.splitlines()] == expected


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_every_flipped_byte_is_noticed(qwen, made, kind, tmp_path):
    """A byte of the safetensors header, of kvp's header, and of tensors at many places."""
    path = tmp_path / "context.safetensors"
    save_cache(made(kind), path, model=qwen)
    whole = path.read_bytes()
    for place in [*range(0, len(whole), len(whole) // 61), len(whole) - 1]:
        broken = bytearray(whole)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(CacheError) as caught:
            load_cache(path, qwen)
        assert str(caught.value).startswith(f"{path} ")
        assert "\n" not in str(caught.value)
    for kept in (0, 4, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(CacheError, match="not a readable safetensors file"):
            load_cache(path, qwen)
    path.write_bytes(whole)
    assert load_cache(path, qwen).evicted


def test_foreign_files_are_one_line(qwen, made, tmp_path):
    missing, foreign, pickled = (tmp_path / name for name in ("missing", "foreign", "pickled"))
    save_file({"weight": torch.ones(2)}, foreign)
    pickled.write_bytes(pickle.dumps({"keys": 1}))
    other, newer = tmp_path / "other", tmp_path / "newer"
    save_file({"weight": torch.ones(2)}, other, {"kvp": "[1, 2]"})
    save_cache(made("dense"), newer, model=qwen)
    with safe_open(newer, framework="pt") as stream:
        header = json.loads(stream.metadata()["kvp"])
    header.pop("sha256")
    header["format_version"] = 2
    save_file(
        {"a": torch.ones(1)}, newer, {"kvp": json.dumps({**header, "sha256": digest_json(header)})}
    )
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (missing, "is missing"),
        (foreign, "was not written by save_cache"),
        (pickled, "not a readable safetensors file"),
        (other, "is damaged: no checksum in it"),
        (newer, "has format version 2, this kvp reads 3: make it anew"),
        (tmp_path, "is no regular file"),
        (tmp_path / "pipe", "is no regular file"),
    ):
        with pytest.raises(CacheError, match=message) as caught:
            load_cache(path, qwen)
        assert str(caught.value).startswith(f"{path} ")
        assert "\n" not in str(caught.value)


def parts(path):
    """Header and tensors of a cache file."""
    with safe_open(path, framework="pt") as stream:
        header = json.loads(stream.metadata()["kvp"])
    del header["sha256"]
    return header, load_file(path)


def sealed(path, header, tensors):
    """A file of both behind a right seal."""
    digest = tensors_digest(tensors) if header["tensors"] else None
    write_sealed_safetensors(path, tensors, {**header, "tensors": digest})


def facts(**changes):
    return lambda header, tensors: header["layers"][1].update(changes)


def entry(name, value):
    return lambda header, tensors: header.update({name: value})


def tensor(name, change):
    return lambda header, tensors: tensors.update({name: change(tensors[name]).contiguous()})


def queries(value, layers=range(3), window=None, width=4):
    """Recorded queries, [2, 4, width, 16]."""

    def change(header, tensors):
        header["window"] = window
        shape = (2, 4, width, tensors["1.keys"].shape[-1])
        tensors.update(
            {f"{layer}.queries": torch.as_tensor(value).expand(shape).clone() for layer in layers}
        )

    return change


DAMAGES = {
    "no layers": entry("layers", []),
    "layers are a text": entry("layers", "ab"),
    "one layer less": lambda header, tensors: header["layers"].pop(),
    "a layer twice": facts(layer=0),
    "unknown kind": facts(kind="x"),
    "kind is a list": facts(kind=[]),
    "seen is a text": facts(seen="many"),
    "seen is huge": facts(seen=10**400),
    "seen is less": facts(seen=3),
    "seen is negative": facts(seen=-1),
    "evicted is a list": facts(evicted=[]),
    "turn is a list": entry("turn", [1]),
    "turn has a text": entry("turn", {"prompts": ["a", "b"], "shrunk_at": 1}),
    "turn of one prompt": entry("turn", {"prompts": [9], "shrunk_at": 1}),
    "turn of later": entry("turn", {"prompts": [9, 9], "shrunk_at": 1000}),
    "turn of less than none": entry("turn", {"prompts": [-9, 9], "shrunk_at": 1}),
    "turn before the first": entry("turn", {"prompts": [9, 9], "shrunk_at": -1}),
    "window is a text": entry("window", "all"),
    "window is negative": entry("window", -7),
    "model is null": entry("model", None),
    "model is empty": entry("model", {}),
    "tensors is null": entry("tensors", None),
    "weights are empty": lambda header, tensors: header["model"].update(weights=""),
    "a line end": lambda header, tensors: header["model"].update(id="a\nb", dtype="\x1b\n"),
    "odd frequencies": lambda header, tensors: header["model"].update(frequencies=["a"]),
    "NaN": tensor("1.keys", lambda part: part * float("nan")),
    "infinite values": tensor("2.values", lambda part: part / 0),
    "positions are fractions": tensor("1.positions", lambda part: part.float()),
    "positions are negative": tensor("1.positions", lambda part: part - 1000),
    "keys are whole numbers": tensor("1.keys", lambda part: part.int()),
    "no rows": tensor("1.keys", lambda part: part[:0]),
    "one head": tensor("1.values", lambda part: part[..., :1]),
    "a number alone": tensor("0.keys", lambda part: part.flatten()[0].clone()),
    "positions after the newest": tensor("1.positions", lambda part: part + 100),
    "an empty slot": tensor("1.positions", lambda part: part.fill_(torch.iinfo(part.dtype).max)),
    "newest of none": tensor("0.newest", lambda part: part * 0 - 1),
    "newest of others": tensor("0.newest", lambda part: part[:1]),
    "no newest": lambda header, tensors: tensors.pop("0.newest"),
    "no keys": lambda header, tensors: tensors.pop("1.keys"),
    "another name": lambda header, tensors: tensors.update(a=torch.ones(1)),
    "ids of another layer": lambda header, tensors: tensors.update({
        "1.ids": torch.zeros(2, CONTEXT, dtype=torch.int64)
    }),
    "queries without a window": queries(1.0),
    "queries of one layer": queries(1.0, layers=[1], window=4),
    "queries that are infinite": queries(float("inf"), window=4),
    "queries that are whole": queries(1, window=4),
    "queries that are wide": queries(torch.ones((), dtype=torch.float64), window=4),
    "more queries than tokens": queries(1.0, window=-1, width=CONTEXT + 4),
    **{f"name {name}": lambda header, tensors, name=name: tensors.update({
        name: torch.zeros_like(tensors["1.keys"])
    }) for name in ("+1.keys", "01.keys", "\uff11.keys", "1.keys.keys", "1.", "1")},
    "another layer": lambda header, tensors: tensors.update({"7.keys": torch.ones(1)}),
}  # fmt: skip
"""What a header or tensors are behind a right seal."""


@pytest.mark.parametrize("kind", ["dense", "ragged"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_behind_a_right_seal_may_be_anything(damage, kind, qwen, made, tmp_path):
    path = tmp_path / "cache"
    save_cache(made(kind), path, model=qwen)
    header, tensors = parts(path)
    DAMAGES[damage](header, tensors)
    sealed(path, header, tensors)
    with pytest.raises(CacheError) as caught:
        load_cache(path, qwen)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).isprintable()


def test_lengths_of_heads_may_be_anything(qwen, made, tmp_path):
    path = tmp_path / "cache"
    for change in (
        lambda lengths: lengths + 1,
        lambda lengths: lengths.float(),
        lambda lengths: torch.stack([lengths[0] - 2**40, lengths[1] + 2**40]),
        lambda lengths: lengths[:1],
    ):
        save_cache(made("ragged"), path, model=qwen)
        header, tensors = parts(path)
        tensors["1.lengths"] = change(tensors["1.lengths"])
        sealed(path, header, tensors)
        with pytest.raises(CacheError, match="cache is damaged"):
            load_cache(path, qwen)


def test_another_model_is_refused(qwen, build, made, tmp_path):
    path = tmp_path / "context"
    qwen.config.name_or_path = "mine/qwen"
    save_cache(made("dense"), path, model=qwen)
    weights, copied, rope, wide = (build("qwen2") for _ in range(4))
    copied.config.name_or_path = "/elsewhere/qwen"
    assert load_cache(path, copied).get_seq_length() == CONTEXT + 3  # the same weights
    weights.config.name_or_path = "mine/qwen"
    weights.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
    rope.config.rope_parameters = {**rope.config.rope_parameters, "rope_theta": 5e5}
    for model, message in (
        (weights, "was made by mine/qwen, this model is mine/qwen with other weights"),
        (rope, r"was made by mine/qwen with another RoPE \(rope_parameters\) than this model has"),
        (wide.to(torch.bfloat16), r"with another dtype \(float32\) than this model has"),
        (build("qwen3"), "with another geometry than this model has"),
    ):
        with pytest.raises(CacheError, match=message) as caught:
            load_cache(path, model)
        assert "\n" not in str(caught.value)


def test_what_cannot_be_saved_is_refused(qwen, made, tmp_path):
    for cache, message in (
        (EvictingCache(), "this cache is empty"),
        (DynamicCache(), "writes an EvictingCache, got a DynamicCache"),
    ):
        with pytest.raises(UsageError, match=message):
            save_cache(cache, tmp_path / "context", model=qwen)
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name, why in (
        ("pipe", "no regular file"), ("link", "no regular file"), ("a" * 300, "File name too long")
    ):  # fmt: skip
        with pytest.raises(CacheError, match=f"cannot be written: .*{why}"):
            save_cache(made("dense"), tmp_path / name, model=qwen)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    for place in (".", "..", "/", tmp_path):
        with pytest.raises(CacheError, match=f"{place} is a folder: give save_cache the path of"):
            save_cache(made("dense"), place, model=qwen)
    with pytest.raises(CacheError, match="cannot be written: No such file"):
        save_cache(made("dense"), tmp_path / "no" / "folder", model=qwen)


class Hook:
    """What accelerate leaves at a module whose weights it brings when they are needed."""

    execution_device = "meta"  # any device but the CPU


def test_layers_are_placed_where_they_attend(qwen, made, tmp_path):
    save_cache(made("dense"), tmp_path / "context", model=qwen)
    qwen.model.layers[1].self_attn._hf_hook = Hook()
    assert [device.type for device in layer_devices(qwen)] == ["cpu", "meta", "cpu"]
    cache = load_cache(tmp_path / "context", qwen)
    for layer, place in zip(cache.layers, ("cpu", "meta", "cpu"), strict=True):
        assert {tensor.device.type for tensor in layer.state.tensors.values()} == {place}


def test_offloaded_weights_leave_the_name_to_decide(qwen, made, tmp_path):
    qwen.config.name_or_path = "mine/qwen"
    save_cache(made("dense"), tmp_path / "context", model=qwen)
    weight = qwen.model.layers[1].mlp.up_proj.weight
    qwen.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
    assert load_cache(tmp_path / "context", qwen).evicted
    qwen.config.name_or_path = "mine/other"
    with pytest.raises(CacheError, match="made by mine/qwen, this model is mine/other"):
        load_cache(tmp_path / "context", qwen)
