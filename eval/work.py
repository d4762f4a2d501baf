"""The machinery of every program that evaluates: a model loaded, and prompts in pieces.

Work is done in pieces: prompts that share a prefill, together or not at all. Questions about one
context that the compression does not see share a prefill: it is run and compressed once. Every
question is then fed to caches of its own: records are those of each prompt alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from eval.config import EvalConfig
from eval.methods import Method
from eval.prepared_run import Evaluation, LoadedModel, PreparedRun
from eval.record_fields import identify
from eval.results.records import RecordFile, key_of
from eval.runner import Runner, evaluate_together
from kvp.devices import device_of_rank
from kvp.errors import ResultsError
from kvp.grouping import group_by
from kvp.hf.loading import load_configured_model, load_configured_tokenizer
from kvp.hf.scorer_inputs import check_inputs
from kvp.processes import Rank
from kvp.progress import Progress, phase

ALONE = Rank()


def load_runner(
    config: EvalConfig, methods: Iterable[Method], loaded: LoadedModel | None = None
) -> Runner:
    """Load the model; ModelError, naming the method, where it lacks what one of them reads."""
    torch.manual_seed(config.seed)
    if loaded is None:
        phase("loading the model")
        device = device_of_rank(config.device, config.worker)
        model, tokenizer = load_configured_model(config, device)
    else:
        model, tokenizer = loaded.model, load_configured_tokenizer(config, loaded.tokenizer)
    check_inputs(model, [method.scorer for method in methods if method.scorer])
    return Runner(model=model, tokenizer=tokenizer, config=config)


def evaluate_missing(
    runner: Runner,
    prepared: PreparedRun,
    file: RecordFile,
    rank: Rank = ALONE,
    text: str = "evaluating",
) -> None:
    """Append the records that the share of one process lacks.

    Raises ResultsError where the file answers other prompts of the same names.
    """
    work = WorkPieces(runner.config, prepared, file, rank)
    left, total = work.undone(), sum(map(len, work.pieces))
    there = total - sum(len(work.missing(piece)) for piece in left)
    with evaluation_progress(total, there, text) as progress:
        for piece in left:
            for prompt in work.do(runner, piece):
                progress.advance(note=prompt)


@contextmanager
def evaluation_progress(total: int, there: int, text: str = "evaluating") -> Iterator[Progress]:
    """Progress of the evaluations; an error that ends them early notes how many are done."""
    progress = Progress(text, total, completed=there)
    try:
        with progress:
            yield progress
    except BaseException as error:
        error.add_note(f"{progress.completed} of {total} evaluations done, unfinished")
        raise


def by_prefill(work: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Groups of equal prefill, protocol, task and methods, in the order of their first members."""

    def key(evaluation: Evaluation) -> tuple[object, ...]:
        prompt, protocol, methods = evaluation
        again, question = prompt.fed_again(protocol), prompt.question_tokens(protocol)
        read = prompt.encoded.ids[: prompt.cached_tokens(protocol) + again]
        return prompt.task, protocol, read, again, question, tuple(map(id, methods))

    return list(group_by(work, key).values())


class WorkPieces:
    """The pieces of a run that are the share of one process, and which of them are done."""

    def __init__(
        self, config: EvalConfig, prepared: PreparedRun, file: RecordFile, rank: Rank = ALONE
    ) -> None:
        """Append to `file`; ResultsError where it answers other prompts of the same names."""
        for prompt in prepared.prompts:
            digest = file.digests.get((prompt.task, prompt.sample.id))
            if digest is not None and digest != prompt.sample.digest:
                raise ResultsError(
                    f"{file.path} holds answers to another prompt called {prompt.sample.id}: the "
                    "data or its task has changed since; choose another --out"
                )
        self._config = config
        self._file = file
        pieces = by_prefill(prepared.work)
        self.pieces = [pieces[number] for number in rank.share(range(len(pieces)))]

    def missing(self, piece: Iterable[Evaluation]) -> list[Evaluation]:
        """The prompts of a piece with the methods that have no record yet."""
        left: list[Evaluation] = []
        for prompt, protocol, planned in piece:
            keys = [key_of(identify(self._config, prompt, protocol, method)) for method in planned]
            pairs = zip(planned, keys, strict=True)
            if methods := [method for method, key in pairs if key not in self._file.values]:
                left.append(Evaluation(prompt, protocol, methods))
        return left

    def undone(self) -> list[list[Evaluation]]:
        """The pieces that lack records."""
        return [piece for piece in self.pieces if self.missing(piece)]

    def do(self, runner: Runner, piece: Iterable[Evaluation]) -> Iterator[str]:
        """Evaluate what a piece lacks; yields each prompt's task and protocol as it is written."""
        for group in by_prefill(self.missing(piece)):
            prompts, protocol = [evaluation.prompt for evaluation in group], group[0].protocol
            together = evaluate_together(runner, prompts, protocol, group[0].methods)
            for prompt, records in zip(prompts, together, strict=True):
                self._file.append(records)
                yield f"{prompt.task} {protocol}"
