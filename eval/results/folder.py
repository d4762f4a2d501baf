"""A results folder: what belongs in it, and whether a run may go on in it.

A folder has an identity: the settings that decide what a row means, and the digest of every policy.
A run of the same identity resumes or extends it (more prompts, tasks, methods, budgets, protocols,
policies); any other is refused. `docs/formats.md` describes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.config import EvalConfig
from kvp.errors import ResultsError
from kvp.manifest import atomic_write_json, digest_json, read_json, run_manifest

FORMAT = "kvp-results"
FORMAT_VERSION = 2
"""2 added `allocator` (1 knew `uniform` alone), `cache_bytes` in rows, kept.jsonl."""

MANIFEST = "manifest.json"
ROWS = "rows.jsonl"
TIMING = "timing.jsonl"
CURVES = "curves.jsonl"
KEPT = "kept.jsonl"
TOKENS = "tokens.json"


def open_folder(config: EvalConfig, policies: Mapping[str, str]) -> dict[str, Any]:
    """What the folder's manifest must keep from earlier runs (empty for a new folder).

    `policies` maps labels to digests. Raises ResultsError where the folder holds something else, or
    results of another configuration.
    """
    folder = Path(config.out)
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise ResultsError(f"--out {folder} is a file; choose a folder")
    if not (folder / MANIFEST).exists():
        if any(folder.iterdir()):
            raise ResultsError(f"--out {folder} is not empty and holds no results; choose another")
        return {}
    manifest = _read_manifest(folder)
    _refuse_others(config, policies, manifest)
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    """A manifest of results that this version can extend."""
    manifest = read_json(folder / MANIFEST, ResultsError)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ResultsError(f"{folder / MANIFEST} describes no results; choose another --out")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ResultsError(
            f"--out {folder} has format_version {manifest.get('format_version')!r}, this kvp-eval "
            f"writes {FORMAT_VERSION}; choose another --out"
        )
    if digest_json(manifest.get("identity")) != manifest.get("identity_digest"):
        raise ResultsError(f"{folder / MANIFEST} is damaged; choose another --out")
    return manifest


def _refuse_others(
    config: EvalConfig, policies: Mapping[str, str], manifest: Mapping[str, Any]
) -> None:
    """Raise ResultsError where settings or a policy differ from those of the folder."""
    there, asked = manifest["identity"], config.identity()
    for name in asked:
        if there.get(name) != asked[name]:
            raise ResultsError(
                f"--out {config.out} holds results of another configuration (--{name} is "
                f"{there.get(name)!r} there, {asked[name]!r} asked for); choose another"
            )
    known = manifest.get("policies", {})
    for label, digest in policies.items():
        if known.get(label, digest) != digest:
            raise ResultsError(
                f"--out {config.out} holds results of another policy or budget file called "
                f"{label!r}; use label=DIR or choose another --out"
            )


def write_manifest(
    config: EvalConfig,
    earlier: Mapping[str, Any],
    policies: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Write the manifest of a folder before any row of this run."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    settings = asdict(config)
    runs = list(earlier.get("earlier_runs", []))
    if earlier and earlier["config"] != settings:
        runs.append({name: earlier[name] for name in ("config", "created", "command")})
    identity = config.identity()
    atomic_write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **run_manifest(settings, seed=config.seed),
            "identity": identity,
            "identity_digest": digest_json(identity),
            "policies": {**earlier.get("policies", {}), **policies},
            "notes": list(dict.fromkeys([*earlier.get("notes", []), *notes])),
            "earlier_runs": runs,
        },
    )
