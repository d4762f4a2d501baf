"""Context files: a compressed context that an engine goes on from as from an ordinary prefix.

A context of N tokens keeps k entries per KV head, every head its own, or (format version 2) other
counts in every layer and head, which fill as many blocks of `BLOCK` rows. They are packed as
rows of each layer, and every key is turned by k - N positions. The next token, which an engine
places at position k, then meets every key at its true distance, because rotary embeddings see
differences of positions alone and attention does not see the order of rows. So vLLM, llama.cpp and
transformers take the file for a prompt of k tokens that they have read before.

In a prompt `kvp.placeholders` stand for these k tokens. Imports no transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.allocation import Allocator, WholeBlocks
from kvp.artifacts.files import digest_json, raising_as
from kvp.artifacts.manifest import Format, portable, recorded_name
from kvp.artifacts.tensors import open_sealed_safetensors, tensors_digest, write_sealed_safetensors
from kvp.budgets import Budget
from kvp.errors import ContextError, UsageError
from kvp.geometry import Geometry
from kvp.model_fingerprint import same_buffers
from kvp.names import UNIFORM
from kvp.placeholders import DIGEST_BITS, placeholder_ids
from kvp.protection import Protection
from kvp.ranking import Choice
from kvp.rope import Rope
from kvp.scoring import Scorer, ScorerParts, label_of

FORMAT = Format("kvp-context", 2, older=1)
"""Version 2 where heads keep different numbers of tokens, else the older one."""
SUFFIX = ".context"
"""How names of context files end; the rest of the name is the start of their digest."""
BLOCK = 32
"""Tokens of a block: what a head keeps fills whole blocks of vLLM, also on CPUs."""


@dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """What a context file says of its tensors."""

    model: Mapping[str, Any]
    """`id`, digests of `weights`, `norms` and `buffers`, `dtype`, RoPE's scaling, `frequencies`."""
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
    policy_digest: str | None = None
    """SHA-256 of the file that it was made of; None where there is none."""
    allocator: str | None = None
    """What split the budget over layers and heads, `uniform` for equal counts; None: not known."""
    protection: Mapping[str, int] | None = None
    """First (`sinks`) and last tokens (`recents`) that were kept anyway; None: not known."""
    budget: str
    """What was asked for, such as `12.5%`."""
    tokens: int
    """N, tokens of the context."""
    kept: int
    """k, tokens that every KV head keeps, or the rows of the blocks that `counts` fill."""
    counts: Sequence[Sequence[int]] | None = None
    """Tokens of every layer and KV head, multiples of `BLOCK`; None where all keep k."""

    def check(self, known: Mapping[str, Any]) -> None:
        """Raise ContextError, in one line, where another model made the context than the one here.

        `known` are the fields `model`, `geometry`, `vocabulary` and `rope` of the model here.
        Engines know no digest of `weights`, so it is compared only where both sides have it.
        `norms` are compared where those of the model here are known.
        """
        model = known["model"]
        maker = f"this context was made by {self.model['id']}"
        size, here = map(Geometry.from_dict, (self.geometry, known["geometry"]))
        if (size, self.vocabulary) != (here, known["vocabulary"]):
            raise ContextError(f"{maker}, {size}; this model has {here}")
        if (dtype := self.model["dtype"]) != model["dtype"]:
            raise ContextError(f"{maker} in {dtype}; this model computes in {model['dtype']}")
        if dict(self.rope) != dict(known["rope"]) or not same_buffers(self.model, model):
            raise ContextError(f"{maker} with another RoPE than this model has")
        names = ("norms",) if self.model["weights"] is None else ("weights", "norms")
        if any(model[name] not in (None, self.model[name]) for name in names):
            other = f"{model['id']} with other weights or adapters"
            raise ContextError(f"{maker}; this model is {other}")

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        size = Geometry.from_dict(self.geometry)
        width = torch.finfo(getattr(torch, self.model["dtype"])).bits // 8
        return 2 * size.head_dim * sum(self.rows) * width

    @property
    def rows(self) -> list[int]:
        """Tokens that all heads of a layer keep together, of every layer."""
        size = Geometry.from_dict(self.geometry)
        if self.counts is None:
            return [self.kept * size.kv_heads] * size.layers
        return [sum(layer) for layer in self.counts]

    def to_dict(self) -> dict[str, Any]:
        """What a file says: all fields, of optional ones those that have a value."""
        optional = {item.name for item in fields(self) if item.default is None}
        values = asdict(self).items()
        return {name: value for name, value in values if value is not None or name not in optional}


@dataclass(frozen=True, kw_only=True)
class Context:
    """A compressed context, in memory."""

    facts: ContextFacts
    keys: Sequence[Tensor]
    """Per layer [k, H, D] in the model's dtype, turned by k - N; where counts differ [R, D], the
    rows of one head after those of another."""
    values: Sequence[Tensor]
    """Per layer, likewise."""
    token_ids: Tensor
    """[N] int64 tokens of the context as it was read."""

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"context of {facts.model['id']}: {facts.tokens} tokens, {facts.kept} kept by "
            f"{facts.policy}\nmore: facts, placeholders, write(folder), keys, values"
        )

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
        return self.digest[: DIGEST_BITS // 4]

    def write(self, folder: Path | str) -> Path:
        """Write the file into `folder`, under its name; the path. ContextError where that fails."""
        with raising_as(folder, ContextError, "gets no file of this context", "written"):
            path = Path(folder) / f"{self.name}{SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            checksums = {"tensors": self.checksum, "digest": self.digest}
            version = FORMAT.older if self.facts.counts is None else FORMAT.version
            header = {**FORMAT.head, "format_version": version, **self.facts.to_dict(), **checksums}
            write_sealed_safetensors(path, self.tensors, header)
        return path


def pack_context(
    layers: Iterable[Sequence[Tensor]],
    token_ids: Tensor,
    embedding: Rope,
    *,
    policy: str,
    **facts: Any,  # noqa: ANN401
) -> Context:
    """Pack what every layer keeps: of keys and values [H, S, D] those where `held` [H, S] is True.

    `embedding` is that of the keys, `facts` are the others of `ContextFacts`. Of a
    `policy` that is a path only the last part is recorded: its folder may be moved. UsageError
    where heads keep different numbers, no multiples of `BLOCK`; ContextError for infinite values.
    """
    keys, values, counts = [], [], []
    for all_keys, all_values, held in layers:
        keys.append(all_keys[held].cpu())  # [R, D], head after head
        values.append(all_values[held].cpu())
        counts.append(held.sum(dim=1).tolist())
    every = [count for layer in counts for count in layer]
    even = len({*every}) == 1
    if not even and any(count % BLOCK for count in every):
        raise UsageError(f"heads keep other multiples of {BLOCK}: give compress the allocator")
    blocks = -(-sum(every) // (len(every) * BLOCK))  # of the mean head, whole ones
    kept = every[0] if even else blocks * BLOCK
    keys = [embedding.shift(rows, kept - len(token_ids)) for rows in keys]
    if even:
        heads = len(counts[0])
        keys, values = (
            [rows.view(heads, kept, -1).transpose(0, 1).contiguous() for rows in side]
            for side in (keys, values)
        )
    facts |= {"counts": None if even else counts, "tokens": len(token_ids), "kept": kept}
    facts |= {"policy": portable(recorded_name(policy))}  # also of `kvzap:FOLDER`
    context = Context(facts=ContextFacts(**facts), keys=keys, values=values, token_ids=token_ids)
    for name, part in context.tensors.items():
        if not bool(part.isfinite().all()):
            raise ContextError(
                f"this context is not what engines go on from: {name} has NaN or infinity"
            )
    return context


def kept_rows(budget: Budget, tokens: int, least: int = 0) -> int:
    """Tokens that every head keeps of a context: `budget`, at least `least`, in whole multiples.

    All `tokens` of it where that is no fewer.
    """
    return min(-(-max(budget.tokens(tokens), least) // BLOCK) * BLOCK, tokens)


def plan_context(
    scorer: Scorer, budget: Budget, tokens: int, protection: Protection, allocator: Allocator | None
) -> tuple[Choice, dict[str, Any]]:
    """What stays of a context of `tokens`, and what `ContextFacts` say of this choice.

    It is `kept_rows`, which the allocator splits in whole blocks unless every token stays.
    """
    kept, name, split = kept_rows(budget, tokens, least=protection.tokens), UNIFORM, None
    if allocator is not None:
        name = portable(allocator.name)
        split = WholeBlocks(allocator, BLOCK) if kept < tokens else None
    digest = ScorerParts(scorer).digest
    facts: dict[str, Any] = {"policy": label_of(scorer), "policy_digest": digest}
    facts |= {"allocator": name, "protection": asdict(protection), "budget": str(budget)}
    return Choice(kept, protection, split), facts


def read_facts(path: Path) -> ContextFacts:
    """Facts of a context file, from its header alone.

    Raises ContextError, in one line that names the file, where it is missing, damaged or another.
    """
    with _open(path) as (header, *_):
        return _facts(path, header)


def read_context(path: Path, most: float = float("inf")) -> Context:
    """A context file of at most `most` bytes of tensors.

    Raises ContextError where it is missing, damaged, another or larger. Shapes are the writer's.
    """
    with _open(path) as (header, size, read_tensors):
        facts = _facts(path, header)
        if size > (most := min(most, facts.nbytes + 8 * facts.tokens)):
            more = f"more than the {most:,.0f} of its facts or of memory_gb: raise memory_gb"
            raise ContextError(f"{path} takes {size:,} bytes, {more}")
        if tensors_digest(tensors := read_tensors()) != header["tensors"]:
            raise ContextError(f"{path} is damaged: its checksum does not match its tensors")
        layers = range(Geometry.from_dict(facts.geometry).layers)
        keys = [tensors.pop(f"{layer}.keys") for layer in layers]
        values = [tensors.pop(f"{layer}.values") for layer in layers]
        return Context(facts=facts, keys=keys, values=values, **tensors)  # with token_ids


_open = partial(open_sealed_safetensors, error=ContextError, format=FORMAT, writer="kvp compress")


def _facts(path: Path, header: Mapping[str, Any]) -> ContextFacts:
    """What the header of a context file says, checked."""
    names = {field.name for field in fields(ContextFacts)}
    facts = ContextFacts(**{name: header[name] for name in names & header.keys()})
    digest = _digest(facts, header["tensors"])
    if digest != header["digest"] or not digest.startswith(path.name.removesuffix(SUFFIX)):
        raise ContextError(f"{path} is damaged or renamed: its name is the start of its digest")
    return facts


def _digest(facts: ContextFacts, tensors: str) -> str:
    return digest_json({**facts.to_dict(), "tensors": tensors})
