"""The results folder that a run writes: whether the run may go on in it, and its manifest.

A folder has an identity: the settings that decide what a record means, and digests of the model,
the policies, a user's own code and the files that prompts come from. A run of the same identity
resumes or extends it (more prompts, tasks, methods, budgets, protocols, policies); no other may.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.config import EvalConfig
from eval.digests import input_digests
from eval.results.folder import FORMAT
from eval.results.record_names import MANIFEST
from eval.results.records import RECORDS
from eval.results.tuned_settings import TunedSettings
from kvp.artifacts.addresses import place
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import run_manifest, shown_text, write_sealed_json
from kvp.errors import ResultsError

RESULTS = FolderKind(
    noun="results folder", marker=MANIFEST, error=ResultsError, format=FORMAT,
    optional=("model_digest",),
)  # fmt: skip


def open_folder(
    config: EvalConfig, digests: Mapping[str, str], *, shared: bool = False
) -> OutputFolder:
    """Claim `--out`, with `shared` for one of several workers; `digests`: `file_digests`.

    Raises ResultsError where the folder holds something else, results of another configuration, or
    of another input file, policy or code of the same name, or where another process writes it.
    """
    identity = {**config.identity(), "input_files": input_digests(config)}
    folder = OutputFolder.claim(place(config.out), RESULTS, identity, shared=shared)
    try:
        _check_digests(folder, digests)
    except ResultsError:
        folder.release()
        raise
    return folder


def _check_digests(folder: OutputFolder, digests: Mapping[str, str]) -> None:
    recorded = (folder.existing_marker or {}).get("policies", {})
    for label, digest in digests.items():
        if recorded.get(label, digest) != digest:
            raise ResultsError(
                f"--out {folder.path} holds results of another policy or file called {label!r}; "
                "choose another --out, or for a policy label=DIR"
            )


def write_manifest(
    folder: OutputFolder, config: EvalConfig, digests: Mapping[str, str], notes: Sequence[str], *,
    model_digest: Mapping[str, Any] | None = None, layers: Sequence[int] = (),
    planned: Sequence[Mapping[str, Any]] = (), trained: Mapping[str, Sequence[str]] | None = None,
    tuned: Iterable[TunedSettings] = (),
) -> None:  # fmt: skip
    """Write the manifest of a claimed folder before any record of this run; every worker does.

    Fetches what is there, where the folder lies in an object store. `model_digest` tells the model
    from another of the same name (`kvp.hf.model_identity`), `layers` which layers of it are evicted
    from (`Geometry.layer_indices`), `planned` which rows the run will write (`planned_rows` in
    eval.run), `trained` the tasks that policies were trained on, by label, `tuned` the settings
    files that methods come from. Raises ResultsError where the folder has records of another model.
    """
    folder.pull(*RECORDS, MANIFEST)
    model = {} if model_digest is None else {"model_digest": dict(model_digest)}
    identity = {**config.identity(), "input_files": input_digests(config), **model}
    folder.refresh(identity)
    _check_digests(folder, digests)
    earlier = folder.existing_marker or {}
    run = run_manifest(config.recorded_settings(), seed=config.seed)
    runs = list(earlier.get("earlier_runs", []))
    if earlier and earlier.get("config") != run["config"]:
        runs.append({name: earlier.get(name) for name in ("config", "created", "command")})
    chosen = {digest_json(entry): entry for entry in [settings.to_json() for settings in tuned]}
    new: dict[str, Mapping[str, Any]] = {"policy_tasks": trained or {}, "tuned": chosen}
    facts = {name: {**earlier.get(name, {}), **fact} for name, fact in new.items()}
    content = {
        **FORMAT.head,
        **run,
        "identity": identity,
        "policies": {**earlier.get("policies", {}), **digests},
        "notes": list(dict.fromkeys([*earlier.get("notes", []), *map(shown_text, notes)])),
        **{name: fact for name, fact in facts.items() if fact},
        **({"layers": list(layers)} if layers else {}),
        "planned": _join_plans([*earlier.get("planned", []), *planned]),
        "earlier_runs": runs,
        "files": {},
    }
    if folder.existing_marker is None:
        folder.begin(content)
    write_sealed_json(folder.local / MANIFEST, content)
    folder.push(MANIFEST)


def _join_plans(plans: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One plan for each protocol and list of settings; of a task's numbers of prompts the last."""
    joined: dict[str, dict[str, Any]] = {}
    for part in plans:
        plan = joined.setdefault(digest_json([part["protocol"], part["settings"]]), dict(part))
        plan["prompts"] = {**plan["prompts"], **part["prompts"]}
    return list(joined.values())
