"""The harness's own tasks on files of this machine instead of data sets of the hub.

A task keeps its name, its prompts and its metrics: what is written is a YAML file that includes the
harness's and replaces where documents come from. Rows have the columns of the hub's data set, or a
form of the same data that is converted (`hub_row`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from kvp.data import metrics
from kvp.data.rows.files import RowError, read_rows, reader_of
from kvp.errors import UsageError
from kvp.progress import say

_ALSO = {"validation": ("val", "dev")}
"""Other names of a split in the names of files."""
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_ROUGE = "get_rouge_with_score"
"""The harness's scorer of summaries, whose module needs packages for Chinese."""
Files = dict[str, str]
"""Split of a task -> its file."""


def write_tasks(
    local: Mapping[str, str], folder: Path, *, num_fewshot: int | None = None
) -> list[str]:
    """Write a task file into `folder` for every task that `local` gives documents to; their names.

    `local` is task or group -> file of the split that is evaluated, or folder with a file per
    split: `test.jsonl`, `train.jsonl`, and `anatomy_test.csv` for a task with several data sets.
    `TaskManager(include_path=folder)` finds them. `num_fewshot` is the number of examples in each
    prompt, None for the task's own. Raises UsageError where a task or a file is missing, that of
    the examples included.
    """
    index = _stock_index()
    written: list[str] = []
    for name, source in local.items():
        if name not in index:
            raise UsageError(f"--local {name}={source}: the harness has no task {name!r}")
        if not Path(source).exists():
            raise UsageError(f"--local {name}={source}: no such file or folder")
        tasks = sorted(_members(index, name))
        if len(tasks) > 1 and not Path(source).is_dir():
            raise UsageError(f"--local {name}={source}: {name} is {len(tasks)} tasks: name a "
                             "folder with a file for each, SUBJECT_test.csv")  # fmt: skip
        missing = []
        for task in tasks:
            stock = Path(index[task].yaml_path)
            config = _config(stock)
            if files := _files(config, Path(source), alone=len(tasks) == 1):
                _check_examples(f"--local {name}={source}", config, files, num_fewshot)
                (folder / f"{task}.yaml").write_text(_yaml(task, stock, files), encoding="utf-8")
                written.append(task)
            else:
                missing.append(task)
        if len(missing) == len(tasks):
            raise UsageError(f"--local {name}={source}: no file there is named after a split of "
                             f"{missing[0]}, such as test.jsonl")  # fmt: skip
        if missing:
            say(f"note: --local {name}: no file for {len(missing)} tasks ({missing[0]}, ...)")
    return written


@functools.cache
def _stock_index() -> Mapping[str, Any]:
    """The harness's own tasks, which take it seconds to read."""
    from lm_eval.tasks import TaskManager

    return dict(TaskManager().task_index)


def _members(index: Mapping[str, Any], name: str) -> Iterator[str]:
    """Names of the tasks that a task, group or tag means."""
    entry = index[name]
    members = [*(entry.tags or ())] if entry.yaml_path is None else []
    if entry.kind.name == "GROUP":
        members = [each if isinstance(each, str) else each["task"] for each in entry.cfg["task"]]
    elif entry.yaml_path is not None:
        yield name
    for member in members:
        yield from _members(index, member)


def _config(stock: Path) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(stock, resolve_func=False))


def _files(config: Mapping[str, Any], source: Path, *, alone: bool) -> Files:
    """The files of a task's splits; empty where there is none for the one that is evaluated."""
    splits = [str(config[key]) for key in _SPLITS if config.get(key)]
    if not source.is_dir():
        return {splits[0]: str(source.resolve())}
    found: Files = {}
    for split in dict.fromkeys(splits):
        for name in (split, *_ALSO.get(split, ())):
            stems = [f"{config.get('dataset_name')}_{name}", *([name] if alone else [])]
            paths = [
                path for path in sorted(source.rglob("*"))
                if path.is_file() and reader_of(path) and path.name.split(".")[0] in stems
            ]  # fmt: skip
            if len(paths) > 1:
                raise UsageError(f"--local: {paths[0]} and {paths[1]} are both named after the "
                                 f"split {split!r}: keep one of them there")  # fmt: skip
            if paths and split not in found:
                found[split] = str(paths[0].resolve())
    return found if splits[0] in found else {}


def _check_examples(
    what: str, config: Mapping[str, Any], files: Files, num_fewshot: int | None
) -> None:
    """Refuse examples that would come from a split without a file."""
    shots = config.get("num_fewshot") if num_fewshot is None else num_fewshot
    split = config.get("fewshot_split") or config.get("training_split")
    if shots and split and split not in files:
        raise UsageError(
            f"{what}: {shots} examples of each prompt come from the split {split!r}: name a folder "
            f"that also holds {split}.jsonl, or use --num_fewshot 0"
        )


def _yaml(task: str, stock: Path, files: Files) -> str:
    """A task file that is the harness's but for its documents; JSON is YAML."""
    config: dict[str, Any] = {"include": str(stock)}
    lines = ["custom_dataset: !function eval.lm_harness.local_files.documents"]
    whole = _config(stock)
    if str(whole.get("process_results", "")).endswith(_ROUGE):
        config = {key: value for key, value in whole.items() if key != "process_results"}
        lines.append("process_results: !function eval.lm_harness.local_files.rouge_l")
    config |= {"task": task, "tag": None, "dataset_kwargs": {"kvp_task": task, "kvp_files": files}}
    return "\n".join(
        [*(f"{key}: {json.dumps(value)}" for key, value in config.items()), *lines, ""]
    )


def rouge_l(doc: Mapping[str, Any], results: Sequence[str], **_: object) -> dict[str, float]:
    """ROUGE-L F1 of an answer with the best of `doc["answers"]`, as the harness calls it.

    The harness's own number, except where a sentence is so long (about a thousand words) that the
    harness gives up and says 0.
    """
    score = metrics.rouge_l(results[0].strip(), doc["answers"])
    return {"score": score, "rouge_score": score}


class _Splits(dict[str, Dataset]):
    """Documents by split; one without a file is empty: the harness also reads unused ones."""

    def __missing__(self, split: str) -> Dataset:
        return Dataset.from_list([])


def documents(kvp_task: str, kvp_files: Files, **_: object) -> dict[str, Dataset]:
    """Documents of a task by split, as the harness calls it; UsageError on a row it cannot use."""
    return _Splits({split: _dataset(kvp_task, file) for split, file in kvp_files.items()})


def _dataset(task: str, file: str) -> Dataset:
    rows = []
    for location, row in read_rows(file, "local"):
        if isinstance(row, RowError):
            raise UsageError(f"--local {task}: {file}, {location} {row}")
        try:
            rows.append(hub_row(task, row))
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UsageError(
                f"--local {task}: {file}, {location}: {error} is missing or not as in the hub's "
                f"data set; the row has {', '.join(map(str, row))}"
            ) from None
    if not rows:
        raise UsageError(f"--local {task}: {file} holds no row")
    return Dataset.from_list(rows)


def hub_row(task: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the columns of the hub's data set of a task; other tasks' rows are left alone.

    Raises KeyError, ValueError, IndexError or TypeError on a row of an unknown form.
    """
    for prefix, convert in _FORMS.items():
        if task.startswith(prefix):
            return convert(row)
    return dict(row)


def _boolq(row: Mapping[str, Any]) -> dict[str, Any]:
    """SuperGLUE's columns, BoolQ's own, whose `answer` is true or false, or `query` and `gold`."""
    if "query" in row:
        passage, mark, question = str(row["query"]).rpartition("\nQuestion: ")
        if not mark:
            raise KeyError("the line `Question: ` of `query`")
        gold = row["choices"][row["gold"]] == "yes"
        row = {"passage": passage.removeprefix("Passage: "), "question": question, "label": gold}
    label = row["label"] if "label" in row else row["answer"]
    question = str(row["question"]).removesuffix("?")
    return {"passage": row["passage"], "question": question, "label": int(label)}


def _arc(row: Mapping[str, Any]) -> dict[str, Any]:
    """The hub's columns, or `query`, `choices`, `gold`."""
    choices = row["choices"]
    if "query" in row:
        letters = "ABCDEFGH"[: len(choices)]
        question = str(row["query"]).removeprefix("Question: ")
        return {"question": question, "choices": {"text": choices, "label": [*letters]},
                "answerKey": letters[row["gold"]]}  # fmt: skip
    return {"question": row["question"], "choices": dict(choices), "answerKey": row["answerKey"]}


def _hellaswag(row: Mapping[str, Any]) -> dict[str, Any]:
    """The hub's columns, or `query` (activity and context), `choices`, `gold`."""
    if "query" in row:
        activity, _, context = str(row["query"]).partition(": ")
        return {"activity_label": activity, "ctx_a": context, "ctx_b": "",
                "endings": row["choices"], "label": str(row["gold"])}  # fmt: skip
    columns = ("activity_label", "ctx_a", "ctx_b", "endings")
    return {**{name: row[name] for name in columns}, "label": str(row["label"])}


def _mmlu(row: Mapping[str, Any]) -> dict[str, Any]:
    """Hub, or a table with columns A to D or choice0 to choice3; the answer by number or letter."""
    choices: Sequence[Any] | None = row.get("choices")
    if choices is None:
        names = [*"ABCD"] if "A" in row else [f"choice{number}" for number in range(4)]
        choices = [row[name] for name in names]
    answer = str(row["answer"]).strip()
    number = "ABCD".index(answer) if answer in "ABCD" else int(answer)
    return {"question": row["question"], "choices": list(choices), "answer": number}


_FORMS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "boolq": _boolq, "arc_easy": _arc, "arc_challenge": _arc, "hellaswag": _hellaswag,
    "mmlu_": _mmlu,
}  # fmt: skip
"""Beginning of a task's name -> what makes its rows those of the hub."""
