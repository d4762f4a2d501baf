"""Command line of kvp lm-eval: the harness's own, with the model class `kvp` and local files.

The harness discovers no model classes, so this program imports ours and hands all arguments but its
own over. Imports neither torch nor the harness before there is something to run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvp.errors import UsageError, guarded

DESCRIPTION = """usage: kvp lm-eval [run] [--local TASK=PATH ...] [ARGUMENTS OF lm-eval ...]

lm-evaluation-harness with evicted caches: model class `kvp` (the default of --model), everything
else is the harness's own. docs/lm_eval.md lists what --model_args takes.

  --local TASK=PATH   documents of a task from a file, or from a folder with a file for each split,
                      instead of the hub; may be repeated. The task stays as it is otherwise.

`kvp lm-eval run --help` prints the harness's arguments, `kvp lm-eval ls tasks` its tasks.

examples:"""
EXAMPLES = (
    "kvp lm-eval --model_args pretrained=nano,method=snapkv,budget=25% --tasks boolq "
    "--local boolq=boolq.jsonl --limit 20",
    "kvp lm-eval --model_args pretrained=Qwen/Qwen2.5-7B-Instruct,method=kvp+global,"
    "policies=policies/qwen,budget=12.5% --tasks arc_challenge,hellaswag --batch_size 16",
)
_SUBCOMMANDS = ("run", "ls", "validate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(DESCRIPTION, *(f"  {example}" for example in EXAMPLES), sep="\n")
        return 0
    cached = any(word.split("=")[0] in ("--use_cache", "-c") for word in arguments)
    again = "the same command continues" if cached else "nothing was kept: --use_cache FILE does"
    return guarded(lambda: _run(arguments), "kvp lm-eval", again=again)


def _run(arguments: Sequence[str]) -> None:
    for package in ("lm_eval", "accelerate"):
        if find_spec(package) is None:
            raise UsageError(f"{package} is not installed: pip install 'kvp-toolkit[lm-eval]'")
    words, local = split_local(arguments)
    if words[:1] and words[0] not in _SUBCOMMANDS:
        words = ["run", *words]
    named = any(word.split("=")[0] in ("--model", "-M", "--config", "-C") for word in words)
    if words[:1] == ["run"] and not named:
        words += ["--model", "kvp"]

    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import eval.lm_harness.model  # noqa: F401 - registers the class

    setup_logging()
    with TemporaryDirectory(prefix="kvp-tasks-") as folder, _program_arguments(words):
        harness = HarnessCLI()
        parsed = harness.parse_args()
        if local:
            from eval.lm_harness.local_files import write_tasks

            logging.getLogger("lm_eval.tasks._index").setLevel(logging.ERROR)  # each is replaced
            write_tasks(local, Path(folder), num_fewshot=getattr(parsed, "num_fewshot", None))
            given = getattr(parsed, "include_path", None)
            parsed.include_path = [*([given] if given else []), folder]
        try:
            harness.execute(parsed)
        except ValueError as error:
            if str(error).startswith("Tasks not found"):
                raise UsageError(f"--tasks: {error}; kvp lm-eval ls tasks lists them") from None
            raise


def split_local(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The harness's arguments, and task -> path of `--local`; UsageError where it is no pair."""
    words: list[str] = []
    local: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != "--local":
            words.append(word)
            continue
        pair = value if equals else next(rest, "")
        task, equals, path = pair.partition("=")
        if not (task and path):
            raise UsageError(f"--local {pair}: write TASK=PATH")
        if task in local:
            raise UsageError(f"--local {task} is given twice")
        local[task] = path
    return words, local


@contextmanager
def _program_arguments(words: Sequence[str]) -> Iterator[None]:
    """What the harness's parser reads."""
    before = sys.argv
    sys.argv = ["kvp lm-eval", *words]
    try:
        yield
    finally:
        sys.argv = before
