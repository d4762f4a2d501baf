"""Names of methods, allocators and tasks, which a command line checks before torch is imported.

What they mean is in `policies.registry` and `kvp.data.tasks`, which check again, and know the names
that a Python caller adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from kvp.errors import UsageError
from kvp.plugins import is_object_name, module_exists, name_meant

SCORERS = (
    "random", "random_pinned", "random_per_layer", "ring", "streaming_llm", "knorm", "keydiff",
    "lagkv", "snapkv", "tova", "h2o", "kvzip", "contrastkv", "expected_attention", "gvote",
    "windowkv", "oracle",
)  # fmt: skip
"""As `policies.registry.METHODS`."""
ALLOCATORS = ("uniform", "pyramid", "ada", "global", "windowkv", "self_sized", "evolved")
"""As `policies.registry.ALLOCATORS`."""
OTHER_METHODS = ("kvpress", "kvzap", "kvp", "full", "nulls", "tuned")
"""Names before a colon or alone that mean no scorer of `SCORERS`."""
GROUPS = ("ruler", "scbench", "longbench")
"""Names that mean several tasks, as `kvp.data.tasks.GROUPS`."""
TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
    *("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "vt_0shot", "cwe", "fwe"),
    *("qa_1", "qa_2", "longmemeval", "niah_heatmap", "niah_heatmap_numbers"),
    *("chat", "text", "data"),
    *(
        f"longbench_{name}"
        for name in (
            "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique",
            "gov_report", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lsht",
            "passage_count", "passage_retrieval_en", "passage_retrieval_zh", "lcc",
            "repobench-p", "multifieldqa_zh", "dureader", "vcsum",
        )
    ),
    *(
        f"scbench_{name}"
        for name in (
            "kv", "prefix_suffix", "vt", "hashhop", "mf", "many_shot", "choice_eng", "qa_eng",
            "qa_chn", "summary",
        )
    ),
)  # fmt: skip
"""As `kvp.data.tasks.TASKS`."""


def check_methods(specs: Iterable[str], flag: str) -> None:
    """Raise UsageError, naming the flag, on a scorer or allocator that cannot exist."""
    for spec in specs:
        scorer, allocator = split_method(spec)
        if message := _unknown("method", scorer, SCORERS, OTHER_METHODS):
            raise UsageError(f"--{flag}: {message}, kvp, full")
        if allocator is not None:
            check_allocators([allocator])


def check_allocators(specs: Iterable[str]) -> None:
    """Raise UsageError, naming the flags, on an allocator that cannot exist."""
    for spec in specs:
        if message := _unknown("allocator", spec, ALLOCATORS):
            raise UsageError(f"--methods, --allocators: {message}")


def check_tasks(names: Iterable[str]) -> None:
    """Raise UsageError on a task that cannot exist."""
    for name in names:
        if ":" not in name and name not in (*TASKS, *GROUPS):
            raise UsageError(unknown_task(name, TASKS, GROUPS))


def split_method(text: str) -> tuple[str, str | None]:
    """Scorer and allocator of `SCORER[+ALLOCATOR]`, unread; None without a plus sign.

    A plus sign inside parentheses belongs to an option.
    """
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            return text[:index].strip(), text[index + 1 :].strip()
    return text.strip(), None


def unknown_name(kind: str, name: str, argument: str | None, names: Iterable[str]) -> str:
    """What a message says of a method or allocator `name[:argument]` that is none."""
    names = tuple(names)
    module = is_object_name(f"{name}:{argument or ''}")
    near = get_close_matches(name, names, n=1, cutoff=0.75 if module else 0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if module and not near:
        hint = f" (no module {name} can be found, in the working folder neither)"
    choices = f"{', '.join(names)}, package.module:Name"
    return f"unknown {kind} {name!r}{hint}: choose from {choices}"


def unknown_task(name: str, tasks: Iterable[str], groups: Iterable[str]) -> str:
    """What a message says of a task that is none; those of a group are not listed."""
    tasks, groups = tuple(tasks), tuple(groups)
    unlisted = [task for task in tasks if task.startswith(tuple(f"{one}_" for one in groups))]
    listed = [task for task in tasks if task not in unlisted]
    return f"--tasks: unknown task {name!r}{name_meant(name, (*groups, *listed), unlisted)}"


def _unknown(kind: str, spec: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> str:
    """`unknown_name` of a specification whose name cannot exist; empty where it may."""
    name, colon, argument = (part.strip() for part in spec.partition("(")[0].partition(":"))
    if not name or name in (*names, *others):
        return ""
    if is_object_name(f"{name}:{argument}") and ("." in name or module_exists(name)):
        return ""
    return unknown_name(kind, name, argument if colon else None, names)
