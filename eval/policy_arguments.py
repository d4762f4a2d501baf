"""Policies of `--policies`: what each argument names, and which tasks a policy was trained on."""

from collections.abc import Mapping, Sequence

from kvp.errors import PolicyError, UsageError
from kvp.specification import split_label
from policies.learned import LearnedScorer
from policies.sources import INDEX, PolicySource, check_index, find_policy


def policy_sources(arguments: Sequence[str]) -> dict[str, PolicySource]:
    """Policies by label, folders of policy directories expanded.

    Each argument is `POLICY` or `label=POLICY`, with policies named as for `find_policy`. Raises
    UsageError where two share a label, PolicyError where none is of the name.
    """
    sources: dict[str, PolicySource] = {}
    for argument in arguments:
        label, name = split_label(argument)
        try:
            source = find_policy(name)
            inner = sorted(path.parent for path in source.folder.glob(f"*/{INDEX}"))
            if not inner:
                check_index(source.folder)
        except PolicyError as error:
            raise PolicyError(f"--policies: {error}") from error
        policies = {label or source.label: source}
        if not (source.folder / INDEX).exists():
            prefix = f"{label}." if label else ""
            policies = {f"{prefix}{folder.name}": find_policy(folder) for folder in inner}
        for key, policy in policies.items():
            if key in sources:
                raise UsageError(f"--policies: two policies are called {key!r}; use label=POLICY")
            sources[key] = policy
    return sources


def find_trained_tasks(
    policies: Mapping[str, LearnedScorer], files: Mapping[str, str]
) -> dict[str, list[str]]:
    """Tasks that policies were trained on, by label, where their records say so.

    `files` are digests of files whose training rows are measured, by task.
    """
    by_label = {}
    for label, scorer in policies.items():
        data = scorer.metadata.get("training", {}).get("text", {}).get("data") or {}
        digests = data.get("files", [data.get("digest")])
        rows = [task for task, digest in files.items() if digest in digests]
        by_label[label] = [*data.get("tasks", ()), *rows]
    return {label: tasks for label, tasks in by_label.items() if tasks}
