"""Tasks by name, for collecting and evaluating: each a file of this folder and a line in `TASKS`.

A user's own task is an object with `build` and `score` (`kvp.data.task.Task`), found by its module,
`--tasks my_package.tasks:Mine`, or given to `kvp.evaluate(tasks=[Mine()], ...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvp.data.encode import count_prompt_tokens
from kvp.data.metrics import BENCHMARK_METRICS, CLASSIFICATION, METRIC_NAMES
from kvp.data.splits import SHARES
from kvp.data.task import Sample, Source, Task, TaskSettings
from kvp.data.tasks.longbench import DATA_SETS, LongBenchTask
from kvp.data.tasks.niah_heatmap import NiahHeatmapTask
from kvp.data.tasks.rows import CHAT, DATA, TEXT, DialogueTask, RowsTask, TextTask
from kvp.data.tasks.ruler import RULER_13, RULER_TASKS, RulerTask
from kvp.data.tasks.ruler_qa import FLAGS, RulerQaTask
from kvp.data.tasks.scbench import CONTEXTS, PUBLISHED, ScbenchTask
from kvp.errors import UsageError, name_meant
from kvp.plugins import import_object, instance_of, is_object_name, user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RULER = "ruler"

TASKS: dict[str, Task] = {
    **{name: RulerTask(name) for name in RULER_TASKS},
    **{name: RulerQaTask(name) for name in FLAGS},
    **{(task := LongBenchTask(name)).name: task for name in DATA_SETS},
    **{name: ScbenchTask(name) for name in PUBLISHED},
    "niah_heatmap": NiahHeatmapTask(),
    CHAT: DialogueTask(),
    TEXT: TextTask(),
    DATA: RowsTask(),
}
GROUPS: dict[str, tuple[str, ...]] = {
    RULER: RULER_13,
    "scbench": tuple(CONTEXTS),
    "longbench": tuple(LongBenchTask(name).name for name in DATA_SETS),
}
"""Names that mean several tasks: those that are left out where they do not fit."""
ROWS_ONLY = frozenset({TEXT, DATA, "longbench", *GROUPS["longbench"], *PUBLISHED} - {*CONTEXTS})
"""Tasks that read files and generate nothing: kvp eval's, not kvp collect's."""
_OWN: ContextVar[Mapping[str, Task]] = ContextVar("_OWN", default={})  # noqa: B039 - only replaced
"""Tasks that were given as objects to the call at hand, by name."""
_make_task = cache(instance_of)
_FLAGS = {name: getattr(task, "flags", ()) for name, task in TASKS.items()}
TASKS_BY_FLAG = {
    flag: [name for name, flags in _FLAGS.items() if flag in flags]
    for flag in dict.fromkeys(chain.from_iterable(_FLAGS.values()))
}
"""Built-in tasks that read a flag which few tasks read; the last is the one to name."""


def is_built_in(task: Task) -> bool:
    """Whether it is one that kvp brings; any other is a user's own."""
    return TASKS.get(task.name) is task


@contextmanager
def naming_tasks(tasks: Iterable[str | Task]) -> Iterator[str]:
    """What `--tasks` would say for names and task objects; inside, `find_task` knows the objects.

    Raises UsageError for an object that is no task, or has the name of another one.
    """
    checked = [one if isinstance(one, str) else _check_task(one, f"task {one!r}") for one in tasks]
    objects = {task.name: task for task in checked if not isinstance(task, str)}
    for task in checked:
        if not isinstance(task, str) and objects[task.name] is not task:
            raise UsageError(f"two tasks are called {task.name!r}: rename one")
    before = _OWN.set(objects)
    try:
        yield ",".join(task if isinstance(task, str) else task.name for task in checked)
    finally:
        _OWN.reset(before)


def find_task(name: str) -> Task:
    """The task of a name or of `package.module:Name`; UsageError for an unknown or unusable one."""
    if (known := TASKS.get(name, _OWN.get().get(name))) is not None:
        return known
    if is_object_name(name):
        return _check_task(import_object(name, "--tasks"), f"--tasks {name}")
    unlisted = [task for task in TASKS if task.startswith(tuple(f"{group}_" for group in GROUPS))]
    listed = [task for task in TASKS if task not in unlisted]  # a group stands for the others
    raise UsageError(
        f"--tasks: unknown task {name!r}{name_meant(name, (*GROUPS, *listed), unlisted)}"
    )


def build_samples(
    name: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sample]:
    """The first `settings.count` samples of a task, whose own `build` may also be a generator.

    Raises UsageError for an unknown task, and for a user's own that fails or makes no samples.
    """
    task = find_task(name)
    if is_built_in(task):
        return task.build(settings, tokenizer)
    with user_errors(task, f"--tasks {name}: its build"):
        built = task.build(settings, tokenizer)
        samples = list(islice(iter(built), settings.count))
        for sample in samples:
            _check_sample(sample, task, f"--tasks {name}: build made", len(tokenizer))
            if (tokens := count_prompt_tokens(sample, tokenizer)) > settings.length:
                long = f"{sample.id} has {tokens} tokens, more than --length {settings.length}"
                raise UsageError(f"--tasks {name}: build made too long a prompt: {long}")
        return Source.of(samples, getattr(built, "notes", ()))


def _check_sample(sample: object, task: Task, made: str, vocabulary: int) -> None:
    """Raise UsageError, which begins with `made`, where a user's task made what cannot be used."""
    if not isinstance(sample, Sample):
        raise UsageError(f"{made} {sample!r:.60}, not a kvp.data Sample")
    metrics = [*METRIC_NAMES, *BENCHMARK_METRICS, CLASSIFICATION]
    choices = {"task": [task.name], "metric": metrics, "split": [*SHARES]}
    for name, known in choices.items():
        if (value := getattr(sample, name)) not in known:
            raise UsageError(f"{made} a sample whose {name} is {value!r}, not {' or '.join(known)}")
    for token in (*sample.token_ids, *sample.reply_token_ids):
        if not 0 <= token < vocabulary:
            raise UsageError(f"{made} a sample with token {token}, not of 0 to {vocabulary - 1}")


def expand_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Task names with groups expanded, without repeats; raises UsageError on an unknown one."""
    chosen = dict.fromkeys(chain.from_iterable(GROUPS.get(name, (name,)) for name in names))
    found = [find_task(name).name for name in chosen]
    if twice := [name for name in found if found.count(name) > 1]:
        raise UsageError(f"--tasks: two tasks are called {twice[0]!r}: rename one")
    return tuple(chosen)


def _check_task(candidate: object, where: str) -> Task:
    """A user's own task, made from its class once: what it noted in `build` is there to score."""
    task = _make_task(candidate, where) if isinstance(candidate, type) else candidate
    if not isinstance(task, Task):
        raise UsageError(f"{where}: a task has a name, build(settings, tokenizer) and score")
    if task.name in (*TASKS, *GROUPS):
        raise UsageError(f"task {task.name!r}: kvp has its own of this name; rename it")
    return task
