"""Command line of kvp lm-eval: the harness's own, with the model class `kvp`.

The harness discovers no model classes, so this program imports ours and hands all arguments over.
Imports neither torch nor the harness before there is something to run.
"""

import sys
from collections.abc import Sequence

from kvp.errors import UsageError
from kvp.plugins import require
from kvp.program.exit_codes import call_program

DESCRIPTION = """usage: kvp lm-eval [run] [ARGUMENTS OF lm-eval ...]

lm-evaluation-harness with evicted caches: model class `kvp` (the default of --model), everything
else is the harness's own. docs/lm_eval.md lists what --model_args takes, and shows a task of files
of your own.

`kvp lm-eval run --help` prints the harness's arguments, `kvp lm-eval ls tasks` its tasks.

examples:"""
EXAMPLES = (
    "kvp lm-eval --model_args pretrained=nano,method=snapkv,budget=25% --tasks boolq --limit 20",
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
    return call_program(lambda: _run(arguments), "kvp lm-eval", again=again)


def _run(arguments: Sequence[str]) -> None:
    require("the harness", "lm-eval", "lm_eval", "accelerate")
    words = list(arguments)
    if words[0] not in _SUBCOMMANDS:
        words = ["run", *words]
    named = any(word.split("=")[0] in ("--model", "-M", "--config", "-C") for word in words)
    if words[0] == "run" and not named:
        words += ["--model", "kvp"]

    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import eval.lm_harness.model  # noqa: F401 - registers the class

    setup_logging()
    before, sys.argv = sys.argv, ["kvp lm-eval", *words]  # what the harness's parser reads
    try:
        harness = HarnessCLI()
        harness.execute(harness.parse_args())
    except ValueError as error:
        if str(error).startswith("Tasks not found"):
            raise UsageError(f"--tasks: {error}; kvp lm-eval ls tasks lists them") from None
        raise
    finally:
        sys.argv = before
