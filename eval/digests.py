"""Digests of what a run's records come from: policies, code and files of components, and inputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods import Method, policies_of
from eval.policy_arguments import policy_sources
from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import own_code, sha256_file, sha256_input
from kvp.data.task import INPUT_FLAGS
from kvp.data.tasks import expand_tasks, find_task
from kvp.own_packages import NAMES
from kvp.plugins import OptionalParts, options_of
from policies.base import Component
from policies.learned import LearnedScorer
from policies.sources import INDEX


def input_digests(config: object) -> dict[str, str]:
    """SHA-256 of every file or folder that a configuration reads prompts from, by flag."""
    values = {flag: getattr(config, flag, None) for flag in INPUT_FLAGS}
    paths = {flag: Path(value) for flag, value in values.items() if value}
    return {flag: sha256_input(path) for flag, path in paths.items() if path.exists()}


def file_digests(
    policies: Sequence[str], methods: Sequence[Method], tasks: Sequence[str] = ()
) -> dict[str, str]:
    """Digests of the files that results come from: policies by label, else by scorer or allocator.

    A scorer or an allocator that is made from a file has the file's digest as `digest`. The code of
    a user's own scorers, allocators and tasks goes by the name of its module, what their objects
    were made with by `options of NAME`.
    """
    sources, loaded = policy_sources(policies).items(), policies_of(methods).items()
    digests = {label: sha256_file(source.folder / INDEX) for label, source in sources}
    digests |= {label: scorer.digest for label, scorer in loaded if scorer.digest}
    sides = [side for it in methods for side in (it.scorer, it.allocator) if side is not None]
    components: list[Any] = [*sides, *map(find_task, expand_tasks(tasks))]
    for component in components:
        if not isinstance(component, LearnedScorer) and (digest := OptionalParts(component).digest):
            digests[component.name] = digest
        module = type(component).__module__
        digests |= own_code([module])
        named = isinstance(component, Component) or module.split(".")[0] in ("kvp", *NAMES)
        if not named and (options := options_of(component)):
            digests[f"options of {component.name}"] = digest_json(options)
    return digests
