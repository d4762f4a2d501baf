"""Policy directories: `policy.json` and one safetensors file per KV head (docs/formats.md).

Every file is written aside and renamed. `policy.json` has the checksums of all and is written last:
a directory without it is no policy. Nothing here executes anything that a file contains.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.artifacts.claim import FolderKind
from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import Format, sha256_file, write_sealed_json
from kvp.artifacts.tensors import read_safetensors, write_safetensors
from kvp.errors import PolicyError
from kvp.geometry import Geometry
from policies.learned import Calibration, LearnedScorer
from policies.ranker import STATISTICS, HeadRankers, RankerSpec, head_shapes
from policies.sources import INDEX, PolicySource, check_index, find_policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Number formats of weights, as `policy.json` names them."""
HEAD_FILES = r"layer_\d+_head_\d+\.safetensors"
"""Regular expression of the files of a policy but its index."""

FORMAT = Format("kvp-policy", 1)
POLICY = FolderKind(noun="policy", marker=INDEX, error=PolicyError, format=FORMAT, begun=HEAD_FILES)


@dataclass(frozen=True, kw_only=True)
class PolicyMeta:
    """Metadata of a policy directory (docs/formats.md)."""

    geometry: Geometry
    model: Mapping[str, str | None]
    training: Mapping[str, Any] = field(default_factory=dict)
    held_out: Sequence[Mapping[str, Any]] = ()
    """Validation metrics, one mapping per head, layer-major."""
    heads: range | None = None
    """KV heads of a shard, which is a policy of some heads only; None for all."""

    @property
    def head_range(self) -> range:
        """KV heads that have rankers here."""
        return range(self.geometry.total_kv_heads) if self.heads is None else self.heads


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A policy of some heads, or of all, as it lies in its directory."""

    rankers: HeadRankers
    """One ranker per head of `meta.head_range`."""
    meta: PolicyMeta
    calibration: Calibration | None
    source: PolicySource


def head_file(layer: int, head: int) -> str:
    """File name of the ranker of a KV head of a layer: `layer_03_head_01.safetensors`."""
    return f"layer_{layer:02d}_head_{head:02d}.safetensors"


def _head_files(geometry: Geometry, heads: range) -> list[str]:
    """File names of heads, which are counted over the layers that tokens are evicted from."""
    numbered = (divmod(head, geometry.kv_heads) for head in heads)
    return [head_file(geometry.model_layers[layer], head) for layer, head in numbered]


def save_policy(
    directory: str | Path,
    rankers: HeadRankers,
    meta: PolicyMeta,
    *,
    calibration: Calibration | None = None,
) -> None:
    """Write a policy; files that are not a policy's stay.

    With `meta.heads` the directory is a shard. Programs claim the directory first (`POLICY`).
    Weights are written as they are. Raises ValueError unless `rankers` are one ranker per head of
    `meta`, of float32 or bfloat16, PolicyError where the directory holds a policy.
    """
    geometry, spec, heads = meta.geometry, rankers.spec, meta.head_range
    if (rankers.head_count, spec.head_dim) != (len(heads), geometry.head_dim):
        raise ValueError(f"{rankers.head_count} rankers of head_dim {spec.head_dim} for {geometry}")
    weights = {dtype: name for name, dtype in DTYPES.items()}.get(rankers.dtype)
    if weights is None:
        raise ValueError(f"weights of a policy are {' or '.join(DTYPES)}, not {rankers.dtype}")
    _check_heads(calibration, len(heads))
    target = Path(directory)
    if (target / INDEX).exists():
        raise PolicyError(f"{target} holds a policy: name another directory")
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():  # of an export that did not finish
        if re.fullmatch(HEAD_FILES, path.name):
            path.unlink()
    files = {}
    names = _head_files(geometry, heads)
    for name, state in zip(names, rankers.head_states(), strict=True):
        write_safetensors(target / name, state)
        digest, size = sha256_file(target / name), (target / name).stat().st_size
        files[name] = {"sha256": digest, "bytes": size}
    hyperparameters = spec.to_dict()
    content: dict[str, Any] = {
        **FORMAT.head, "architecture": hyperparameters.pop("architecture"),
        "hyperparameters": hyperparameters, "geometry": geometry.to_dict(),
        "heads": None if meta.heads is None else [heads.start, heads.stop],
        "model": dict(meta.model), "rope": "post", "weights": weights, "files": files,
        "calibration": None if calibration is None else calibration.to_dict(),
        "training": dict(meta.training), "held_out": [dict(metrics) for metrics in meta.held_out],
    }  # fmt: skip
    write_sealed_json(target / INDEX, content)


def load_policy(name: str | Path | PolicySource) -> LearnedScorer:
    """Load a policy, named as in `policies.sources.find_policy`; PolicyError names a wrong file."""
    whole = load_shard(name)
    meta = whole.meta
    if meta.heads is not None:
        raise PolicyError(
            f"{whole.source.name} is a shard, KV heads {meta.heads.start}:{meta.heads.stop} of "
            f"{meta.geometry.total_kv_heads}: join all shards of the policy with kvp merge"
        )
    return LearnedScorer(
        rankers=whole.rankers.eval().requires_grad_(False), geometry=meta.geometry,
        calibration=whole.calibration, label=whole.source.name,
        metadata={key: getattr(meta, key) for key in ("model", "training", "held_out")},
        source=whole.source, digest=sha256_file(whole.source.folder / INDEX),
    )  # fmt: skip


def load_shard(name: str | Path | PolicySource) -> Shard:
    """Load all heads, or some, that a policy directory holds; PolicyError names a wrong file."""
    source = name if isinstance(name, PolicySource) else find_policy(name)
    target = source.folder
    check_index(target)
    content = FORMAT.read(target / INDEX, PolicyError)
    with raising_as(target / INDEX, PolicyError):
        spec = RankerSpec(architecture=content["architecture"], **content["hyperparameters"])
        geometry = Geometry.from_dict(content["geometry"])
        heads = content["heads"]
        meta = PolicyMeta(
            geometry=geometry,
            heads=None if heads is None else range(*heads),
            **{key: content[key] for key in ("model", "training", "held_out")},
        )
        record = content["calibration"]
        calibration = None if record is None else Calibration.from_dict(record)
        _check_heads(calibration, len(meta.head_range))
        # Files of before there was a reach have none.
        if not spec.to_dict().keys() <= {"architecture", "reach", *content["hyperparameters"]}:
            raise ValueError("hyperparameters are missing")
        if content["rope"] != "post":
            raise ValueError("keys are not those after RoPE")
        names = _head_files(geometry, meta.head_range)
        if set(content["files"]) != set(names) or spec.head_dim != geometry.head_dim:
            raise ValueError(f"its files do not cover {geometry}")
        digests = [content["files"][name]["sha256"] for name in names]
        dtype = DTYPES[content["weights"]]
    if missing := [target / name for name in names if not (target / name).exists()]:
        raise PolicyError(f"{missing[0]} is missing: copy or train this incomplete policy again")
    files = zip(names, digests, strict=True)
    states = [_read_head(target / name, digest, spec, dtype) for name, digest in files]
    rankers = HeadRankers.from_head_states(spec, states)
    return Shard(rankers=rankers, meta=meta, calibration=calibration, source=source)


def _check_heads(calibration: Calibration | None, heads: int) -> None:
    """Raise ValueError for a calibration of another number of heads."""
    if calibration is not None and calibration.scores.shape[0] != heads:
        raise ValueError(f"a calibration of {calibration.scores.shape[0]} heads is not of {heads}")


def _read_head(path: Path, digest: str, spec: RankerSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    state = read_safetensors(path, PolicyError, digest)
    expected = {
        name: (shape, torch.float32 if name in STATISTICS else dtype)
        for name, shape in head_shapes(spec).items()
    }
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} != expected:
        raise PolicyError(f"{path} holds a ranker of another architecture, geometry or dtype")
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise PolicyError(f"{path}: {name} holds numbers that are not finite")
    return state
