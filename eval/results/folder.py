"""A results folder: what belongs in it, and whether a run may go on in it.

A folder has an identity: the settings that decide what a row means, and the digests of the model,
of every policy and of every file that prompts come from. A run of the same identity resumes or
extends it (more prompts, tasks, methods, budgets, protocols, policies); any other is refused.
`docs/formats.md` describes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.config import EvalConfig
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.errors import ResultsError
from kvp.manifest import (
    SEAL,
    digest_json,
    read_json,
    read_sealed_json,
    run_manifest,
    sha256_input,
    write_sealed_json,
)

FORMAT = "kvp-results"
FORMAT_VERSION = 2
"""2 added `allocator` (1 knew `uniform` alone), `cache_bytes` in rows, kept.jsonl."""

MANIFEST = "manifest.json"
ROWS = "rows.jsonl"
TIMING = "timing.jsonl"
CURVES = "curves.jsonl"
KEPT = "kept.jsonl"
TOKENS = "tokens.json"

INPUT_FLAGS = ("essays", "chat", "text", "data")
"""Settings that name files or folders which prompts come from."""


def _read_manifest(path: Path) -> dict[str, Any]:
    """A manifest of results that this version can extend."""
    manifest = read_json(path, ResultsError)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ResultsError(
            f"{path} has format_version {manifest.get('format_version')!r}, this kvp-eval writes "
            f"{FORMAT_VERSION}; choose another --out"
        )
    identity = manifest.get("identity")
    sealed = SEAL not in manifest or read_sealed_json(path, ResultsError)  # earlier ones are not
    if digest_json(identity) != manifest.get("identity_digest") or not sealed or not identity:
        raise ResultsError(f"{path} is damaged; choose another --out")
    manifest.pop(SEAL, None)
    return manifest


RESULTS = FolderKind(
    noun="results folder",
    marker=MANIFEST,
    error=ResultsError,
    format=FORMAT,
    files="|".join((ROWS, TIMING, CURVES, KEPT, TOKENS)),
    read=_read_manifest,
    optional=("input_files", "model_digest"),
)


def open_folder(config: EvalConfig, policies: Mapping[str, str]) -> OutputFolder:
    """Claim `--out`; `policies` maps labels to digests.

    Raises ResultsError where the folder holds something else, results of another configuration, of
    other input files or of another policy of the same label, or where another process writes it.
    """
    identity = {**config.identity(), "input_files": input_digests(config)}
    folder = OutputFolder.claim(Path(config.out), RESULTS, identity)
    known = (folder.found or {}).get("policies", {})
    for label, digest in policies.items():
        if known.get(label, digest) != digest:
            folder.release()
            raise ResultsError(
                f"--out {config.out} holds results of another policy or budget file called "
                f"{label!r}; use label=DIR or choose another --out"
            )
    return folder


def input_digests(config: object) -> dict[str, str]:
    """SHA-256 of every file or folder that a configuration reads prompts from, by flag."""
    named = {flag: getattr(config, flag, None) for flag in INPUT_FLAGS}
    return {
        flag: sha256_input(Path(value))
        for flag, value in named.items()
        if value is not None and Path(value).exists()
    }


def write_manifest(
    folder: OutputFolder,
    config: EvalConfig,
    policies: Mapping[str, str],
    notes: Sequence[str],
    model_digest: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest of a claimed folder before any row of this run.

    `model_digest` tells the model from another of the same name (`kvp.hf.identity`). Raises
    ResultsError where the rows that are there are of another one.
    """
    digest = {} if model_digest is None else {"model_digest": dict(model_digest)}
    folder.require(digest)
    earlier = folder.found or {}
    settings = asdict(config)
    runs = list(earlier.get("earlier_runs", []))
    if earlier and earlier["config"] != settings:
        runs.append({name: earlier[name] for name in ("config", "created", "command")})
    identity = {**config.identity(), "input_files": input_digests(config), **digest}
    write_sealed_json(
        folder.path / MANIFEST,
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
