"""Slot files: their bytes, and refusals; `recipes/engines/llama_server.py` tries a server."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from kvp import load_model
from kvp.errors import ContextError
from kvp.hf.contexts import compress
from kvp.llamacpp.slots import VERSION, write_slot
from kvp.program.table import main
from policies import make_scorer

TEXT = "One of the special magic numbers for lazy-cat is: 4821973. The grass is green. " * 5


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, model_folder):
    small = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if request.param == "llama":
        names = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        )  # fmt: skip
        given = {name: getattr(small.config, name) for name in names}
        torch.manual_seed(4)
        small = LlamaForCausalLM(LlamaConfig(**given, eos_token_id=2, initializer_range=0.06))
    return small.eval()


@pytest.fixture(scope="module")
def file(model, model_folder, write_gguf, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, model, model_folder / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def context(model, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return compress(model, tokenizer, TEXT, make_scorer("keydiff"), "30%")


def test_a_file_holds_rows_under_placeholders(context, file, tmp_path):
    path = write_slot(context, file, tmp_path / "slots")
    assert path == tmp_path / "slots" / f"{context.name}.slot"
    data, kept = path.read_bytes(), context.facts.kept
    assert struct.unpack("<4sII", data[:12]) == (b"qsgg", VERSION, kept + 4)
    at = 12 + 4 * (kept + 4)
    assert [*struct.unpack(f"<{kept + 4}i", data[12:at])] == [-1, 1, kept, *context.placeholders, 0]
    assert struct.unpack("<II", data[at : at + 8]) == (1, kept)
    cells = np.frombuffer(data, "<i4", 3 * kept, at + 8).reshape(kept, 3)
    assert cells.tolist() == [[place, 1, 0] for place in range(kept)]
    at += 8 + 12 * kept
    layers = context.facts.geometry["layers"]
    assert struct.unpack("<4I", data[at : at + 16]) == (0, layers, 0, 0)
    at += 16
    interleaved = gguf.GGUFReader(file).fields["general.architecture"].contents() == "llama"
    for number, part in enumerate([*context.keys, *context.values]):
        size = 2 * part[0].numel()
        assert struct.unpack("<iQ", data[at : at + 12]) == (1, size)
        rows = np.frombuffer(data, np.float16, kept * size // 2, at + 12).reshape(part.shape)
        if number < layers and interleaved:
            rows = np.concatenate([rows[..., 0::2], rows[..., 1::2]], -1)
        np.testing.assert_array_equal(rows, part.to(torch.float16))
        at += 12 + kept * size
    assert at == len(data)


def test_another_model_is_refused_in_one_line(context, file, tmp_path, one_line):
    def changed(**facts):
        return replace(context, facts=replace(context.facts, **facts))

    rope, size, who = context.facts.rope, context.facts.geometry, context.facts.model
    cases = {
        "geometry": changed(geometry={**size, "layers": size["layers"] + 1}),
        "vocabulary 600, not 601": changed(vocabulary=601),
        "RoPE": changed(rope={**rope, "rope_theta": 500_000.0}),
        "RoPE .*not .*'linear'": changed(rope={**rope, "rope_type": "linear", "factor": 2.0}),
        "norms": changed(model={**who, "norms": "0"}),
        "numbers that float16 cannot": replace(
            context, values=[1e6 + one for one in context.values]
        ),
    }
    for expected, one in cases.items():
        with one_line(ContextError, match=expected):
            write_slot(one, file, tmp_path)
    with pytest.raises(ContextError, match=r"none.gguf is missing"):
        write_slot(context, tmp_path / "none.gguf", tmp_path)
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ContextError, match=r"text.gguf is damaged"):
        write_slot(context, tmp_path / "text.gguf", tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma2")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
    with pytest.raises(ContextError, match="architecture gemma2: kvp writes slots for llama"):
        write_slot(context, tmp_path / "other.gguf", tmp_path)
    assert not [*tmp_path.glob("*.slot")]


def test_the_program_asks_the_engine_of_a_file(file, tmp_path, capsys):
    """The file computes the context, and a slot file for its server stands beside that."""
    (tmp_path / "a.txt").write_text(TEXT)
    given = ["compress", str(tmp_path / "a.txt"), "--method", "keydiff", "--gguf", str(file)]
    assert main([*given, "--method", "keydiff+uniform", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {told["slot"], Path(told["file"]).name} <= {*names}
    other = tmp_path / "other.gguf"
    for flags, message in (
        (["--gguf", str(other)], "other.gguf"),
        (["--method", "keydiff+global"], "--gguf: llama.cpp holds equal counts in every head"),
    ):
        assert main([*given, *flags, "--out", str(tmp_path / "none")]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        assert message in said[0]
        assert not (tmp_path / "none").exists()


def llama3(factor, limit):
    """Llama 3's scaling as transformers calls it, and as llama.cpp's converter writes it."""
    told = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": limit}
    slow = 2 * np.pi * 1e4 ** (np.arange(0, 32, 2) / 32)  # tokens of a turn
    fast = np.clip((limit / slow - 1) / 3, 0, 1)
    divided = (1 / (fast + (1 - fast) / factor)).astype(np.float32)
    return {**told, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}, {FREQS: divided}


FREQS = "rope_freqs.weight"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
FACTOR = {"rope.scaling.factor": 4.0}
LIMIT = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 512}
HALF = {"rope.scaling.attn_factor": 0.5}


@pytest.mark.parametrize(
    ("rope", "fields", "tensors", "others"),
    [
        (LINEAR, FACTOR, {}, ({}, {"rope.scaling.factor": 2.0}, LIMIT | FACTOR)),
        (YARN, FACTOR | LIMIT, {}, ({}, FACTOR, FACTOR | LIMIT | HALF)),
        (
            {**YARN, "attention_factor": 0.5 * (1 + 0.1 * np.log(4))}, FACTOR | LIMIT | HALF, {},
            (FACTOR | LIMIT, FACTOR | LIMIT | {"rope.scaling.original_context_length": 256}),
        ),
        (*llama3(8.0, 8192), ({},)),
        (*llama3(32.0, 8192), ({FREQS: llama3(8.0, 8192)[2][FREQS]},)),
    ],
    ids=["linear", "yarn", "yarn-attention", "llama-3.1", "llama-3.2"],
)  # fmt: skip
def test_a_slot_is_of_the_same_rope(
    rope, fields, tensors, others, model_folder, write_gguf, tmp_path
):
    """Whether the file itself, or the folder it was converted from, was the context's model."""
    words = model_folder / "tokenizer.json"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    config = LlamaConfig(
        vocab_size=600, hidden_size=64, intermediate_size=64, num_hidden_layers=2, eos_token_id=2,
        num_attention_heads=2, num_key_value_heads=1, rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip
    model, file = LlamaForCausalLM(config).eval(), tmp_path / "own.gguf"
    write_gguf(file, model, words, fields=fields, tensors=tensors)
    for which in (model, load_model(str(file))[0]):
        context = compress(which, tokenizer, TEXT, make_scorer("keydiff"), "30%")
        assert write_slot(context, file, tmp_path).exists()
        for number, other in enumerate(others):
            path = tmp_path / f"{number}.gguf"
            changed = {"tensors": other} if FREQS in other else {"fields": other}
            write_gguf(path, model, words, **changed)
            with pytest.raises(ContextError, match="of another model than this context: RoPE"):
                write_slot(context, path, tmp_path)
