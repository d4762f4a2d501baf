"""Context files: a compressed context that an engine goes on from as from an ordinary prefix.

A context of N tokens keeps k entries per KV head, every head its own. They are packed as rows
0..k-1 of each layer, and every key is turned by k - N positions. The next token, which an engine
places at position k, then meets every key at its true distance, because rotary embeddings see
differences of positions alone and attention does not see the order of rows. So vLLM, llama.cpp and
transformers take the file for a prompt of k tokens that they have read before.

What stands in a prompt for these k tokens are *placeholders*: token ids that spell the digest of
the file and a checksum (`placeholder_ids`). They name one context, an engine's own prefix cache
keeps contexts apart by them, and ordinary text does not contain them. Imports no transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.artifacts.files import foreign
from kvp.artifacts.manifest import Format, digest_json
from kvp.artifacts.tensors import (
    read_safetensors,
    read_sealed_header,
    tensors_digest,
    write_sealed_safetensors,
)
from kvp.budgets import Budget
from kvp.errors import CacheError
from kvp.geometry import Geometry
from kvp.rope import Rope

FORMAT = Format("kvp-context", 1)
SUFFIX = ".context"
"""How names of context files end; the rest of the name is the start of their digest."""
MULTIPLE = 32
"""Kept tokens are a multiple of it, so that they fill whole blocks of vLLM, also on CPUs."""
_DIGEST_BITS = 128
_CHECKED = 8
"""Placeholders that must fit the checksum before a prompt is taken for one of a context."""


@dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """What a context file says of its tensors."""

    model: Mapping[str, Any]
    """`id`, digest of `weights`, `norms` (`norms_digest`), `dtype` and `adapters`."""
    geometry: Mapping[str, Any]
    """`kvp.geometry.Geometry.to_dict`."""
    vocabulary: int
    """Size of the model's vocabulary: placeholders lie in it."""
    rope: Mapping[str, Any]
    """`rope_facts` of the rotary embedding that the keys have."""
    tokenizer: str | None
    """Digest of vocabulary and chat template; None of a context that an engine made."""
    policy: str
    """What ranked the tokens, as --methods or --policies name it."""
    budget: str
    """What was asked for, such as `12.5%`."""
    tokens: int
    """N, tokens of the context."""
    kept: int
    """k, tokens that every KV head keeps."""

    def check(
        self, model: Mapping[str, Any], geometry: Geometry, vocabulary: int, rope: Mapping[str, Any]
    ) -> None:
        """Raise CacheError, in one line, where another model than this one made the context.

        Engines know no digest of `weights`: only those that both sides know are compared. `norms`
        are wherever this model's are known.
        """
        made = f"this context was made by {self.model['id']}"
        size, dtype = Geometry.from_dict(self.geometry), self.model["dtype"]
        if (size, self.vocabulary) != (geometry, vocabulary):
            raise CacheError(f"{made}, {size}; this model has {geometry}")
        if dtype != model["dtype"]:
            raise CacheError(f"{made} in {dtype}; this model computes in {model['dtype']}")
        if dict(self.rope) != dict(rope):
            raise CacheError(f"{made} with another RoPE than this model has")
        names = ("norms",) if self.model["weights"] is None else ("weights", "norms")
        if any(model[name] not in (None, self.model[name]) for name in names):
            raise CacheError(f"{made}; this model is {model['id']} with other weights or adapters")

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        size = Geometry.from_dict(self.geometry)
        width = torch.finfo(getattr(torch, self.model["dtype"])).bits // 8
        return 2 * size.layers * size.kv_heads * size.head_dim * self.kept * width


@dataclass(frozen=True, kw_only=True)
class Context:
    """A compressed context, in memory."""

    facts: ContextFacts
    keys: Sequence[Tensor]
    """Per layer [k, H, D] in the model's dtype, turned by k - N."""
    values: Sequence[Tensor]
    """Per layer [k, H, D]."""
    token_ids: Tensor
    """[N] int64 tokens of the context as it was read."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file (docs/engines.md)."""
        named = {"token_ids": self.token_ids}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            named |= {f"{layer}.keys": keys, f"{layer}.values": values}
        return named

    @cached_property
    def checksum(self) -> str:
        """SHA-256 (hex) of the tensors."""
        return tensors_digest(self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of facts and tensors."""
        return _digest(self.facts, self.checksum)

    @property
    def placeholders(self) -> list[int]:
        """The k token ids that stand for this context in a prompt."""
        return placeholder_ids(self.digest, self.facts.kept, self.facts.vocabulary)

    @property
    def name(self) -> str:
        """Name of its file without the suffix: the start of the digest, 32 hexadecimal digits."""
        return self.digest[: _DIGEST_BITS // 4]

    def write(self, folder: Path | str) -> Path:
        """Write the file into `folder`, under its name; the path. CacheError where that fails."""
        checksums = {"tensors": self.checksum, "digest": self.digest}
        path = Path(folder) / f"{self.name}{SUFFIX}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            header = {**FORMAT.head, **asdict(self.facts), **checksums}
            write_sealed_safetensors(path, self.tensors, header)
        except OSError as problem:
            raise CacheError(f"{path} cannot be written: {problem.strerror}") from None
        return path


def kept_rows(budget: Budget, tokens: int, least: int = 0) -> int:
    """Tokens that every head keeps of a context: `budget`, at least `least`, in whole multiples.

    All `tokens` of it where that is no fewer.
    """
    wanted = -(-max(budget.tokens(tokens), least) // MULTIPLE) * MULTIPLE
    return min(wanted, tokens)


def read_facts(path: Path) -> tuple[ContextFacts, str]:
    """Facts and digest of a context file, from its header alone.

    Raises CacheError, in one line that names the file, where it is missing, damaged or another one.
    """
    if path.is_symlink():
        raise CacheError(f"{path} is no regular file")
    header = read_sealed_header(path, CacheError, FORMAT, "kvp compress")
    with foreign(path, CacheError):
        facts = ContextFacts(**{field.name: header[field.name] for field in fields(ContextFacts)})
        digest = _digest(facts, header["tensors"])
        if digest != header["digest"] or not digest.startswith(path.name.removesuffix(SUFFIX)):
            raise CacheError(f"{path} is damaged or renamed: its name is the start of its digest")
        return facts, digest


def read_context(path: Path, most: float = float("inf")) -> Context:
    """A context file of at most `most` bytes of keys and values.

    Raises CacheError as `read_facts`, for a larger one, and where a tensor does not fit.
    """
    facts, digest = read_facts(path)
    if facts.nbytes > most:
        raise CacheError(f"{path} takes {facts.nbytes:,} bytes, memory_gb allows {most:,.0f}")
    tensors = read_safetensors(path, CacheError)
    with foreign(path, CacheError):
        size = Geometry.from_dict(facts.geometry)
        layers = range(size.layers)
        context = Context(
            facts=facts,
            keys=[tensors[f"{layer}.keys"] for layer in layers],
            values=[tensors[f"{layer}.values"] for layer in layers],
            token_ids=tensors["token_ids"],
        )
        shape = (facts.kept, size.kv_heads, size.head_dim)
        kind = (shape, facts.model["dtype"])
        held = {
            (tuple(part.shape), str(part.dtype).removeprefix("torch."))
            for part in (*context.keys, *context.values)
        }
        if held != {kind} or context.token_ids.shape != (facts.tokens,):
            raise ValueError("its tensors do not fit its header")
        if context.digest != digest:
            raise CacheError(f"{path} is damaged: its checksum does not match its tensors")
    return context


def _digest(facts: ContextFacts, tensors: str) -> str:
    return digest_json({**asdict(facts), "tensors": tensors})


TURNED = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length of the input."""


def can_turn(config: Any) -> bool:  # noqa: ANN401 (transformers' of any model, also in engines)
    """Whether RoPE turns all keys of a text model by one position, the same way at any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = rope.get("rope_type", "default" if rope else "none") in TURNED
    scaled = getattr(config, "attn_temperature_tuning", None)  # by the position, Llama 4
    rotated = all(getattr(config, "no_rope_layers", None) or ())  # 0 of layers without, SmolLM3
    return known and rotated and not scaled and "mrope_section" not in rope


def rope_facts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model's `rope_parameters` decides about keys, without what is not set."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"rope_type": "default", **given}


def rotate_keys(keys: Tensor, rope: Rope, by: int) -> Tensor:
    """Keys [..., D] after RoPE, moved by `by` positions: same dtype, computed in float32.

    `rope.scaling` is part of them already, so they are rotated without it.
    """
    plain = Rope(frequencies=rope.frequencies)
    cosine, sine = plain.rotation(torch.tensor(by, device=keys.device))
    return plain.rotate(keys.float(), cosine, sine).to(keys.dtype)


def norms_digest(weights: Mapping[str, Tensor]) -> str:
    """Digest of the weights of the layers' norms, by name, rounded to bfloat16.

    Engines merge and cut projections and leave norms as the checkpoint has them, so that a
    checkpoint's files, transformers' modules and an engine's can be compared.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def is_norm(name: str) -> bool:
    """True of the names that `norms_digest` takes from a model's weights."""
    return name.endswith("norm.weight")


def placeholder_ids(digest: str, count: int, vocabulary: int) -> list[int]:
    """`count` token ids that name a context: its digest first, then a checksum of it.

    They lie in the middle half of the vocabulary, where no family has special tokens. Raises
    CacheError for so few that nobody could tell them from ordinary text.
    """
    bits, base, span = _alphabet(vocabulary)
    number = int(digest[: _DIGEST_BITS // 4], 16)
    head = -(-_DIGEST_BITS // bits)
    if count < head + _CHECKED:
        raise CacheError(f"{count} tokens cannot name a context: keep {head + _CHECKED} or more")
    ids = [base + (number >> (bits * place)) % (1 << bits) for place in range(head)]
    checks = _checks(digest, base, span)
    return [*ids, *(next(checks) for _ in range(count - head))][:count]


def read_placeholders(ids: Sequence[int], vocabulary: int) -> tuple[str, int] | None:
    """The context that a prompt begins with: start of its digest (hex), and its placeholders.

    None where the prompt begins with none. What follows the placeholders may continue the checksum
    by chance, so a context's own `kept` decides where they end.
    """
    bits, base, span = _alphabet(vocabulary)
    head = -(-_DIGEST_BITS // bits)
    digits = [token - base for token in ids[:head]]
    if len(ids) < head + _CHECKED or not all(0 <= digit < 1 << bits for digit in digits):
        return None
    number = sum(digit << (bits * place) for place, digit in enumerate(digits))
    if number >> _DIGEST_BITS:
        return None
    digest = f"{number:0{_DIGEST_BITS // 4}x}"
    count = head
    for token, check in zip(ids[head:], _checks(digest, base, span), strict=False):
        if token != check:
            break
        count += 1
    return (digest, count) if count >= head + _CHECKED else None


def _alphabet(vocabulary: int) -> tuple[int, int, int]:
    """Bits of the digest per id, the first id and how many ids there are."""
    span = vocabulary // 2
    return span.bit_length() - 1, vocabulary // 4, span


def _checks(digest: str, base: int, span: int) -> Iterator[int]:
    """Ids that follow those of the digest, without end."""
    start, block = digest[: _DIGEST_BITS // 4], 0
    while True:
        drawn = hashlib.sha256(f"{start}/{block}".encode()).digest()
        yield from (
            base + int.from_bytes(drawn[at : at + 4], "big") % span for at in range(0, 32, 4)
        )
        block += 1
