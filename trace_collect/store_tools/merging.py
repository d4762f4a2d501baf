"""`kvp store merge`: stores of one model and the same settings as one store.

Data, seeds, counts and lengths may differ. Sequences are renumbered, the first store's first; their
splits stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvp.artifacts.addresses import place
from kvp.errors import StoreError
from kvp.manifest import differences, digest_json
from trace_collect.store_tools.config import MergeStoresConfig
from trace_collect.store_tools.copying import NewStore, write_store
from trace_collect.store_tools.source_stores import (
    DERIVED,
    SourceStore,
    derived_identity,
    derived_manifest,
    open_source,
    ranges,
    split_counts,
)

_MAY_DIFFER = ("data", "seed", DERIVED)
"""Entries of identities that say which prompts were collected, not how."""


def run(config: MergeStoresConfig) -> None:
    """Write the joined store.

    Raises:
        StoreError: as `open_source` and `write_store`; two stores differ in more than their
            prompts, or hold the same sequence.
    """
    sources = [
        open_source(path, config.out, allow_incomplete=config.allow_incomplete)
        for path in config.stores
    ]
    for source in sources[1:]:
        check_same_settings(sources[0], source)
    check_no_repeats(sources)
    pairs = [(source.reader, record) for source in sources for record in source.records]
    identity = derived_identity("merge", merged_identity(sources), sources)
    first = sources[0].reader.plan
    longest = max(source.reader.plan.max_tokens for source in sources)
    write_store(
        NewStore(
            out=place(config.out),
            plan=replace(first, max_tokens=longest, sequences=len(pairs)),
            manifest=derived_manifest(asdict(config), identity, sources),
            sequences=dict(enumerate(pairs)),
            names=dict(enumerate(unique_ids(sources))),
        )
    )


def check_same_settings(first: SourceStore, other: SourceStore) -> None:
    """Raise StoreError, naming what differs, unless two stores differ in their prompts alone."""
    models = _model(first), _model(other)
    if set(models[0]) != set(models[1]):  # one has no digest of the weights: names must do
        models = _recorded(first), _recorded(other)
    theirs = {**_settings(first), "model": models[0]}
    ours = {**_settings(other), "model": models[1]}
    where = f"{other.reader.path} cannot be joined to {first.reader.path}"
    if different := differences(theirs, ours):
        raise StoreError(f"{where}: {'; '.join(different[:3])}")
    frequencies = (source.reader.manifest.get("rope_frequencies") for source in (first, other))
    if len({digest_json(values) for values in frequencies}) > 1:
        raise StoreError(f"{where}: the frequencies of their rotary embeddings differ")


def merged_identity(sources: Sequence[SourceStore]) -> dict[str, Any]:
    """What the stores share, and their data and seeds, each value once."""
    identities = [source.identity for source in sources]
    result = {key: value for key, value in identities[0].items() if key not in _MAY_DIFFER}
    data = [one["data"] for one in identities if isinstance(one.get("data"), Mapping)]
    if data:
        records = [record for source in sources for record in source.records]
        result["data"] = _merged_data(data) | {"sequences": split_counts(records)}
    seeds = _distinct(one["seed"] for one in identities if "seed" in one)
    if seeds:
        result["seed"] = seeds[0] if len(seeds) == 1 else seeds
    return result


def unique_ids(sources: Sequence[SourceStore]) -> list[str]:
    """Ids of all sequences in order; `~2` is added to one that is taken already."""
    taken: set[str] = set()
    names = []
    for source in sources:
        for record in source.records:
            name, copies = record.id, 1
            while name in taken:
                copies += 1
                name = f"{record.id}~{copies}"
            taken.add(name)
            names.append(name)
    return names


def check_no_repeats(sources: Sequence[SourceStore]) -> None:
    """Raise StoreError where two stores hold the same tokens: they would count twice."""
    first_in: dict[tuple[int, ...], SourceStore] = {}
    for source in sources:
        there = {
            record.index: first_in.setdefault(record.token_ids, source) for record in source.records
        }
        repeated = [index for index, owner in there.items() if owner is not source]
        if not repeated:
            continue
        path, earlier = source.reader.path, there[repeated[0]].reader.path
        rest = ranges([index for index in there if index not in repeated])
        remedy = f"join kvp store subset {path} --indices {rest}" if rest else "leave it out"
        raise StoreError(
            f"sequences {ranges(repeated)} of {path} are in {earlier} already: {remedy}"
        )


def _settings(source: SourceStore) -> dict[str, Any]:
    """How a store was collected: its plan but for its size, its identity but for its prompts."""
    plan = source.reader.plan.to_dict()
    plan = {key: value for key, value in plan.items() if key not in ("sequences", "max_tokens")}
    identity = source.identity
    rest = {key: value for key, value in identity.items() if key not in (*_MAY_DIFFER, "model")}
    return {**plan, **rest}


def _model(source: SourceStore) -> dict[str, Any]:
    """The digests of a model that has one of its weights, whatever its folder is called."""
    model = _recorded(source)
    if model.get("weights"):
        return {key: value for key, value in model.items() if key not in ("id", "revision")}
    return model


def _recorded(source: SourceStore) -> dict[str, Any]:
    return dict(source.identity.get("model") or {})


def _merged_data(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Descriptions of data as one: names and tasks side by side, the longest length."""
    keys = list(dict.fromkeys(key for part in parts for key in part))
    merged: dict[str, Any] = {}
    for key in keys:
        values = _distinct(part.get(key) for part in parts)
        merged[key] = values[0] if len(values) == 1 else values
    if isinstance(merged.get("name"), list):
        merged["name"] = ",".join(map(str, merged["name"]))
    if "tasks" in merged:
        merged["tasks"] = _distinct(task for part in parts for task in part.get("tasks") or ())
    if isinstance(merged.get("length"), list):
        merged["length"] = max(value for value in merged["length"] if value is not None)
    return merged


def _distinct(values: Any) -> list[Any]:  # noqa: ANN401 - JSON values, which may be no keys
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
