"""A results folder: what belongs in it, and whether a run may go on in it.

A folder has an identity: the settings that decide what a record means, and the digests of the
model, of every policy and of every file that prompts come from. A run of the same identity resumes
or extends it (more prompts, tasks, methods, budgets, protocols, policies); any other is refused.
`docs/formats.md` describes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.config import EvalConfig
from eval.tune.settings_file import TunedSettings, load_settings, tuned_files
from kvp.artifacts.addresses import Place, place
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.errors import ResultsError
from kvp.manifest import (
    digest_json,
    portable,
    read_sealed_json,
    run_manifest,
    sha256_input,
    write_sealed_json,
)

FORMAT = "kvp-results"
FORMAT_VERSION = 3

MANIFEST = "manifest.json"
ROWS = "rows.jsonl"
TIMING = "timing.jsonl"
CURVES = "curves.jsonl"
TOKENS = "tokens.json"
HEATMAP = "heatmap.csv"

INPUT_FLAGS = ("essays", "squad", "hotpotqa", "chat", "text", "data")
"""Settings that name files or folders which prompts come from."""


RECORD_FILES = (ROWS, TIMING, CURVES)
FILES = (*RECORD_FILES, TOKENS, HEATMAP, MANIFEST)
"""All files, in the order in which a finished folder is sent to an object store."""


def read_manifest(path: Place) -> dict[str, Any]:
    """A manifest of results; raises ResultsError where it is damaged or of another format."""
    manifest = read_sealed_json(path, ResultsError)
    if manifest.get("format") != FORMAT:
        raise ResultsError(f"{path} describes no results of kvp-eval")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ResultsError(
            f"{path} has format_version {manifest.get('format_version')!r}, this kvp reads and "
            f"writes {FORMAT_VERSION}; evaluate again, into a new folder"
        )
    identity = manifest.get("identity")
    if not identity or digest_json(identity) != manifest.get("identity_digest"):
        raise ResultsError(f"{path} is damaged: its identity has another digest")
    return manifest


def tuned_of(path: Path, manifest: Mapping[str, Any]) -> tuple[TunedSettings, ...]:
    """What kvp tune chose for the runs of a manifest; raises ResultsError where it is damaged."""
    content = manifest.get("tuned", {})
    if not isinstance(content, Mapping):
        raise ResultsError(f"{path} is damaged: 'tuned' has no valid value")
    return tuple(TunedSettings.from_json(each, str(path)) for each in content.values())


RESULTS = FolderKind(
    noun="results folder",
    marker=MANIFEST,
    error=ResultsError,
    format=FORMAT,
    read=read_manifest,
    optional=("model_digest",),
)


def open_folder(
    config: EvalConfig, policies: Mapping[str, str], *, shared: bool = False
) -> OutputFolder:
    """Claim `--out`, with `shared` for one of several workers; `policies` maps labels to digests.

    Raises ResultsError where the folder holds something else, results of another configuration, of
    other input files or of another policy of the same label, or where another process writes it.
    """
    identity = {**config.identity(), "input_files": input_digests(config)}
    folder = OutputFolder.claim(place(config.out), RESULTS, identity, shared=shared)
    try:
        _check_policies(folder, policies)
    except ResultsError:
        folder.release()
        raise
    return folder


def _check_policies(folder: OutputFolder, policies: Mapping[str, str]) -> None:
    """Raise ResultsError where the folder knows another policy of the same label."""
    recorded = (folder.existing_marker or {}).get("policies", {})
    for label, digest in policies.items():
        if recorded.get(label, digest) != digest:
            raise ResultsError(
                f"--out {folder.path} holds results of another policy or budget file called "
                f"{label!r}; use label=DIR or choose another --out"
            )


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
    layers: Sequence[int] = (),
    hub: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Write the manifest of a claimed folder before any record of this run; every worker does.

    Fetches what is there, where the folder lies in an object store.

    `model_digest` tells the model from another of the same name (`kvp.hf.model_access`), `layers`
    which layers of it are evicted from (`Geometry.layer_indices`), `hub` which repository and
    commit a policy came from, by label. Raises ResultsError where the records that are there
    are of another model.
    """
    folder.pull(*FILES)
    digest = {} if model_digest is None else {"model_digest": dict(model_digest)}
    identity = {**config.identity(), "input_files": input_digests(config), **digest}
    folder.refresh(identity)
    _check_policies(folder, policies)
    earlier = folder.existing_marker or {}
    settings = portable(config.recorded())
    runs = list(earlier.get("earlier_runs", []))
    if earlier and earlier["config"] != settings:
        runs.append({name: earlier[name] for name in ("config", "created", "command")})
    repositories = {**earlier.get("policy_repositories", {}), **(hub or {})}
    paths = tuned_files(config.method_list)
    tuned = dict(earlier.get("tuned", {}))
    tuned |= {Path(path).name: load_settings(Path(path)).to_json() for path in paths}
    write_sealed_json(
        folder.local / MANIFEST,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **run_manifest(settings, seed=config.seed),
            "identity": identity,
            "identity_digest": digest_json(identity),
            "policies": {**earlier.get("policies", {}), **policies},
            **({"policy_repositories": repositories} if repositories else {}),
            "notes": list(dict.fromkeys([*earlier.get("notes", []), *notes])),
            **({"tuned": tuned} if tuned else {}),
            **({"layers": list(layers)} if layers else {}),
            "earlier_runs": runs,
        },
    )
    folder.push(MANIFEST)
